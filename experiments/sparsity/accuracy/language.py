"""A byte-level language model on a corpus: bits per byte of text that no training sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn

from experiments.data.corpora.split_corpus import evaluation_texts
from experiments.data.corpus import Corpus
from experiments.harness.outcome import Values
from experiments.models.language_model import ModelSettings
from experiments.models.pretraining.evaluation import bits_per_byte
from experiments.models.pretraining.model import ByteLevelModel, mean_loss
from experiments.models.pretraining.sizes import SMALL
from experiments.models.train import text_of
from experiments.pretraining.run import BITS, quality
from experiments.runs.settings import Settings
from experiments.sparsity.accuracy.subject import CALIBRATION_SEED, TUNING_SEED, Subject, seeded
from experiments.sparsity.accuracy.training import Schedule, fit

KIND = "language"
#: The largest loss that counts as none, in percent of the dense model's bits per byte. Named before any model was trained:
#: twice that of `fp8_training`, as half of the weights leave where 8 bits keep them all.
MARGIN = 1.0
#: A stand-in for two cores; groups of 32 and of 4 divide its layers.
MICRO = ModelSettings(
    name="byte-level-micro", width=128, layers=2, heads=2, kv_heads=2, feed_forward=256, context=64
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One scale: the model, both trainings, sequences to calibrate with, bytes of each text that are evaluated (None: all)."""

    model: ModelSettings
    start: Schedule
    tune: Schedule
    seeds: int = 5
    calibrated: int = 32
    evaluated: int | None = None

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        return f"{self.model.name}, {self.start.steps} + {self.tune.steps} steps"


PLANS = {
    "quick": Plan(
        model=MICRO,
        start=Schedule(steps=200, batch=8, rate=4e-3),
        tune=Schedule(steps=100, batch=8, rate=2e-3),
        evaluated=4096,
    ),
    #: Of the 29 million parameters, 12 and 6 MB of text.
    "full": Plan(
        model=SMALL,
        start=Schedule(steps=1500, batch=8, rate=5e-4, weight_decay=0.1),
        tune=Schedule(steps=750, batch=8, rate=2.5e-4, weight_decay=0.1),
        # Of each of the nine texts: 1.2 MB, on which pairs of models are compared as well as on all 4.8.
        evaluated=131_072,
    ),
}


@dataclass(frozen=True)
class Text:
    """The text that models are trained on (bytes, uint8), where batches go, and how long a stretch is."""

    data: Tensor
    device: str
    length: int

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Stretches (count, length), int64, drawn with replacement."""
        starts = torch.randint(len(self.data) - self.length, (count,), generator=generator)
        return self.data[starts[:, None] + torch.arange(self.length)].long().to(self.device)


def subject(settings: Settings) -> Subject:
    """The task at a run's scale, on its corpus and device."""
    plan = PLANS[settings.scale]
    text = Text(text_of(settings.corpus), settings.device, plan.model.context + 1)
    return Subject(
        kind=KIND,
        data=settings.corpus.name,
        setting=plan.setting,
        seeds=plan.seeds,
        metric=metric_of(settings.corpus),
        unit="bit",
        higher_is_better=False,
        relative=True,
        margin=MARGIN,
        build=partial(build, plan, settings.device),
        start=partial(start, plan, text),
        go_on=partial(go_on, plan, text),
        calibration=partial(calibration, plan, text),
        evaluate=partial(evaluate, plan, settings.corpus),
        key=(asdict(plan.model), asdict(plan.start), settings.corpus.sha256),
    )


def metric_of(corpus: Corpus) -> str:
    """Bits per byte of the first held-out split."""
    return f"{BITS}, {next(iter(evaluation_texts(corpus))).partition('/')[0]}"


def build(plan: Plan, device: str, seed: int) -> ByteLevelModel:
    """The model with the random weights of a seed."""
    return seeded(lambda: ByteLevelModel(plan.model), seed).to(device)


def start(plan: Plan, text: Text, seed: int) -> ByteLevelModel:
    """A model trained from random weights."""
    model = build(plan, text.device, seed)
    fit(model, plan.start, partial(text.draw, plan.start.batch), mean_loss, seed)
    return model


def go_on(plan: Plan, text: Text, model: nn.Module, seed: int, after: Callable[[nn.Module], object]) -> None:
    """Train a model on, on other stretches."""
    fit(model, plan.tune, partial(text.draw, plan.tune.batch), mean_loss, TUNING_SEED + seed, after)


def calibration(plan: Plan, text: Text, seed: int) -> list[Tensor]:
    """Stretches of the training text, in batches of 16."""
    generator = torch.Generator().manual_seed(CALIBRATION_SEED + seed)
    return list(text.draw(plan.calibrated, generator)[:, :-1].split(16))


def evaluate(plan: Plan, corpus: Corpus, model: nn.Module) -> Values:
    """Bits per byte of each text that was held out, and of each split."""
    texts = {name: text[: plan.evaluated] for name, text in evaluation_texts(corpus).items()}
    return quality(bits_per_byte(model, texts, plan.model.context), texts)


__all__ = ["KIND", "MARGIN", "MICRO", "PLANS", "Plan", "metric_of", "subject"]
