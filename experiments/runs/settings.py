"""Settings of a run of the experiments: scale, device and seed, models of a user's, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from ao_lab.install.revision import utc_now
from experiments.data import corpus
from experiments.data.corpus import Corpus
from experiments.data.evaluation import MultipleChoiceSettings
from experiments.data.texts import OwnText
from experiments.harness.measuring import KERNEL, Values
from experiments.harness.revision import commit, versions
from experiments.harness.rows import Row, table_name
from experiments.models.pretrained import DEFAULT as DEFAULT_MODEL
from experiments.models.train import FULL, QUICK, Trained, TrainSettings, cache_key, trained_model
from reference import SCHEMES

SCALES = ("quick", "full")
#: What the 4-bit configuration of `decode` stores, which published tables have.
SERVED = ("int4_g64_asymmetric_bf16", "torchao.int4_g64_tinygemm")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class RealModels:
    """A run on real models alone. models: names of records or folders, which must be there. tasks: of lm-evaluation-harness.
    windows: of each text; length: tokens of a window; None: the scale's own. accept: words of accepted terms. own_text: text
    to evaluate or to fine-tune on, in place of prose. peers: interpreters that have other projects' quantizers, for
    `calibration`. execute: whether programs that a model writes are run, for `ptq`."""

    models: tuple[str, ...]
    tasks: tuple[str, ...] = ()
    windows: int | None = None
    length: int | None = None
    accept: tuple[str, ...] = ()
    own_text: OwnText | None = None
    peers: tuple[str, ...] = ()
    execute: bool = False

    def __post_init__(self) -> None:
        """ValueError for numbers that make no window."""
        if (self.windows is not None and self.windows < 1) or (self.length is not None and self.length < 2):
            raise ValueError(
                f"--windows is at least 1 and --length at least 2 tokens, got {self.windows} and {self.length}"
            )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every experiment. `schemes` are measured in this order; `shape` is that of synthetic tensors."""

    scale: str
    device: str
    cache: Path
    seed: int = 0
    train: TrainSettings = QUICK
    multiple_choice: MultipleChoiceSettings = field(default_factory=MultipleChoiceSettings)
    schemes: tuple[str, ...] = ()
    #: Schemes that no registry has and models are served in; `ptq` measures these as well.
    served: tuple[str, ...] = ()
    shape: tuple[int, int] = (512, 1024)
    text: Corpus | None = None
    #: Names of configurations or parts, where an experiment can measure a part of itself; without, all.
    only: tuple[str, ...] = ()
    #: After which nothing more starts, where an experiment can stop in between (`fp8_training`); None: no limit.
    seconds: float | None = None
    #: Trainings at once, each in a process of its own, where an experiment can (`fp8_training`); 1: all in this process.
    workers: int = 1
    #: Whether published rows are taken as measured whose code has not changed since.
    changed: bool = False
    #: Real models, by the name of a record or by folder.
    models: tuple[str, ...] = ()
    #: What was asked for of real models (`--model`); None: the models above beside the stand-in.
    asked: RealModels | None = None

    @cached_property
    def corpus(self) -> Corpus:
        """The text: sympy's source, unless another was given."""
        return self.text or corpus.load()

    @cached_property
    def trained(self) -> Trained:
        """The trained model, from the cache or trained now."""
        return trained_model(self.train, self.corpus, self.device, self.cache)

    @property
    def model_key(self) -> str:
        """The cache's key of the model, known before it is trained."""
        return cache_key(self.train, self.corpus, self.device)

    @cached_property
    def device_name(self) -> str:
        """How rows call the device: cpu, or the GPU's name."""
        return torch.cuda.get_device_name() if self.device == "cuda" else "cpu"

    def row(
        self,
        experiment: str,
        kind: str,
        data: str,
        setting: str,
        method: str,
        metric: str,
        value: float,
        unit: str,
        kernel: str = "",
    ) -> Row:
        """A row of this run, measured now. kernel: family and variant of what computed, where one did."""
        return Row(
            experiment=experiment,
            table=table_name(kind, self.scale, data),
            setting=setting,
            method=method,
            metric=metric,
            value=float(value),
            unit=unit,
            device=self.device_name,
            seed=self.seed,
            kernel=kernel,
            date=utc_now(),
            commit=commit(),
            versions=versions(self.device),
        )

    def rows(
        self, experiment: str, kind: str, data: str, setting: str, method: str, values: Values
    ) -> list[Row]:
        """Rows of a method's values; the name of its kernel among them (`outcome.kernel`) goes into each row."""
        kernel = next((one.removeprefix(KERNEL) for one in values if one.startswith(KERNEL)), "")
        return [
            self.row(experiment, kind, data, setting, method, metric, value, unit, kernel)
            for metric, (value, unit) in values.items()
            if not metric.startswith(KERNEL)
        ]


def settings_for(scale: str, device: str | None, cache: Path) -> Settings:
    """Settings of a scale: quick is minutes on two cores, full is for a GPU. ValueError for other names."""
    if scale not in SCALES:
        raise ValueError(f"scale is one of {', '.join(SCALES)}; got {scale!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in DEVICES:
        raise ValueError(f"device is one of {', '.join(DEVICES)}; got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device 'cuda' needs a GPU, and torch sees none; use --device cpu, or see `ao-lab doctor`"
        )
    schemes = tuple(SCHEMES)
    models = (DEFAULT_MODEL,)
    if scale == "quick":
        return Settings(
            scale=scale, device=device, cache=cache, schemes=schemes, served=SERVED, models=models
        )
    # A better model gets harder questions: shorter continuations are harder to tell apart.
    multiple_choice = MultipleChoiceSettings(windows=40, context=512, questions=24, continuation=4, batch=10)
    return Settings(
        scale=scale,
        device=device,
        cache=cache,
        schemes=schemes,
        served=SERVED,
        models=models,
        train=FULL,
        multiple_choice=multiple_choice,
        shape=(2048, 4096),
    )
