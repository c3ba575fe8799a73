"""What is trained dense and 2:4: a vision transformer that reads collages of four digits, and a language model.

Every digit counts, and an image with all four right. The digits are the 1797 images (8 x 8 pixels, 0 to 16) of E. Alpaydin and
C. Kaynak, "Optical Recognition of Handwritten Digits" (UCI Machine Learning Repository, 1998, doi 10.24432/C50P49, CC BY 4.0),
in the file that scikit-learn has as `sklearn/datasets/data/digits.csv.gz`; it is in this folder: 57 kB, where scikit-learn and
what it needs would be 45 MB to install for it, and a GPU without a network would have none. They are moved, faint and under
noise; those of training and of evaluation are other images.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.data.corpus import Corpus, evaluation_texts
from experiments.harness.measuring import Values
from experiments.models.encoders import VisionConfig, VisionTransformer
from experiments.models.llama import ModelSettings
from experiments.models.pretraining import SMALL, ByteLevelModel, bits_per_byte, mean_loss
from experiments.models.train import text_of
from experiments.pretraining.run import BITS, quality
from experiments.report.targets import limit_of
from experiments.runs.settings import Settings
from experiments.sparsity.pairs import (
    CALIBRATION_SEED,
    EXPERIMENT,
    TUNING_SEED,
    Schedule,
    Subject,
    fit,
    seeded,
)

KIND = "vision"
DATA = "collages of digits"
ACCURACY, WHOLE = "digits read", "images with all digits read"
#: The seed of the collages of evaluation, the same for all models.
EVALUATION_SEED = 77
#: Images that are evaluated at once.
BATCH = 500


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One scale: the model, the task, both trainings, and how many collages are evaluated and calibrated with."""

    model: VisionConfig
    start: Schedule
    tune: Schedule
    collages: Collages = field(default_factory=lambda: Collages(noise=0.1))
    seeds: int = 5
    evaluated: int = 2000
    calibrated: int = 256

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        return f"{self.model.name}, {self.start.steps} + {self.tune.steps} steps"


def sized(name: str, width: int, layers: int) -> VisionConfig:
    """A model of collages with cells of 10 pixels in patches of 5."""
    return VisionConfig(
        name=name, image=20, patch=5, width=width, layers=layers, heads=width // 16, feed_forward=4 * width,
        classes=CLASSES, grid=GRID,
    )  # fmt: skip


#: Pixels of a digit's side, digits of a collage's side, and the classes of a digit.
SIDE, GRID, CLASSES = 8, 2, 10


@dataclass(frozen=True)
class Collages:
    """How hard the task is.

    cell: pixels of the square in which a digit lies anywhere. noise: the deviation of what is added to every pixel, where ink
    is 1. faintest: the least that a digit's ink is multiplied with.
    """

    cell: int = 10
    noise: float = 0.3
    faintest: float = 0.5

    @property
    def side(self) -> int:
        """Pixels of a collage's side."""
        return GRID * self.cell

    def draw(self, digits: Digits, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(count, 1, side, side) float32 with mean near 0, and the digits (count, 4) int64, rows first."""
        chosen = torch.randint(len(digits.labels), (count, GRID**2), generator=generator)
        room = self.cell - SIDE + 1
        down, right = torch.randint(room, (2, count, GRID**2), generator=generator)
        ink = self.faintest + (1 - self.faintest) * torch.rand(count, GRID**2, 1, 1, generator=generator)
        cells = torch.zeros(count, GRID**2, self.cell, self.cell)
        rows = torch.arange(SIDE)
        image, place = torch.arange(count)[:, None, None, None], torch.arange(GRID**2)[None, :, None, None]
        y = down[..., None, None] + rows[:, None]
        x = right[..., None, None] + rows[None, :]
        cells[image, place, y, x] = digits.images[chosen] * ink
        whole = (
            cells.unflatten(1, (GRID, GRID)).permute(0, 1, 3, 2, 4).reshape(count, 1, self.side, self.side)
        )
        whole += self.noise * torch.randn(whole.shape, generator=generator)
        return whole - whole.mean(), digits.labels[chosen]


@dataclass(frozen=True)
class Digits:
    """Single digits: images (count, 8, 8), float32, 0 to 1, and labels (count), int64."""

    images: Tensor
    labels: Tensor


PLANS = {
    "quick": Plan(
        model=sized("vit-200k", 96, 2),
        start=Schedule(steps=350, batch=48, rate=3e-3),
        tune=Schedule(steps=250, batch=48, rate=2e-3),
        evaluated=1000,
    ),
    "full": Plan(
        model=sized("vit-3m", 256, 4),
        start=Schedule(steps=6000, batch=128, rate=1e-3),
        tune=Schedule(steps=3000, batch=128, rate=5e-4),
        evaluated=10_000,
    ),
}


def subject(settings: Settings) -> Subject:
    """The task at a run's scale, on its device."""
    plan, device = PLANS[settings.scale], settings.device
    return Subject(
        kind=KIND,
        data=DATA,
        setting=plan.setting,
        seeds=plan.seeds,
        metric=ACCURACY,
        unit="%",
        higher_is_better=True,
        relative=False,
        margin=limit_of(EXPERIMENT, KIND, "gap").bound,
        build=partial(build, plan, device),
        start=partial(start, plan, device),
        go_on=partial(go_on, plan, device),
        calibration=partial(calibration, plan, device),
        evaluate=partial(evaluate, plan, device),
        key=(astuple(plan.model), astuple(plan.start), astuple(plan.collages)),
    )


def build(plan: Plan, device: str, seed: int) -> VisionTransformer:
    """The model with the random weights of a seed."""
    return seeded(lambda: VisionTransformer(plan.model), seed).to(device)


def start(plan: Plan, device: str, seed: int) -> VisionTransformer:
    """A model trained from random weights."""
    model = build(plan, device, seed)
    fit(model, plan.start, partial(draw, plan, device, plan.start.batch), loss_of, seed)
    return model


def go_on(plan: Plan, device: str, model: nn.Module, seed: int, after: Callable[[nn.Module], object]) -> None:
    """Train a model on, on other collages."""
    fit(model, plan.tune, partial(draw, plan, device, plan.tune.batch), loss_of, TUNING_SEED + seed, after)


def draw(plan: Plan, device: str, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Collages of training digits with their digits."""
    images, labels = plan.collages.draw(load()[0], count, generator)
    return images.to(device), labels.to(device)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of all digits."""
    images, labels = batch
    return functional.cross_entropy(model(images).flatten(0, 1), labels.flatten())


def calibration(plan: Plan, device: str, seed: int) -> list[Tensor]:
    """Collages of training digits."""
    generator = torch.Generator().manual_seed(CALIBRATION_SEED + seed)
    return list(draw(plan, device, plan.calibrated, generator)[0].split(BATCH))


@lru_cache(maxsize=1)
def evaluation(collages: Collages, count: int) -> tuple[Tensor, Tensor]:
    """Collages of digits that no training sees."""
    return collages.draw(load()[1], count, torch.Generator().manual_seed(EVALUATION_SEED))


@torch.no_grad()
def evaluate(plan: Plan, device: str, model: nn.Module) -> Values:
    """Digits that are read, and images all of whose digits are, in percent."""
    images, labels = evaluation(plan.collages, plan.evaluated)
    read = torch.cat([model(part.to(device)).argmax(-1).cpu() for part in images.split(BATCH)]) == labels
    return {
        ACCURACY: (100 * float(read.double().mean()), "%"),
        WHOLE: (100 * float(read.all(1).double().mean()), "%"),
    }


FILE = Path(__file__).with_name("digits.csv.gz")
SHA256 = "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
#: The largest value of a pixel.
INK = 16.0
#: The last images of the file, whose writers are mostly others, are those of evaluation.
HELD_OUT = 450


@cache
def load() -> tuple[Digits, Digits]:
    """Digits of training and of evaluation. ValueError where the file is not the one that is named above."""
    data = FILE.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(
            f"{FILE.name} is not the file of 1797 digits that this task is of; restore it from the repository"
        )
    lines = gzip.decompress(data).decode().split()
    table = np.array([line.split(",") for line in lines], dtype=np.float32)
    images = torch.from_numpy(table[:, :-1].reshape(-1, SIDE, SIDE) / INK)
    labels = torch.from_numpy(table[:, -1]).long()
    first = len(labels) - HELD_OUT
    return Digits(images[:first], labels[:first]), Digits(images[first:], labels[first:])


# A byte-level language model on a corpus: bits per byte of text that no training sees.

LANGUAGE_KIND = "language"
#: A stand-in for two cores; groups of 32 and of 4 divide its layers.
MICRO = ModelSettings(
    name="byte-level-micro", width=128, layers=2, heads=2, kv_heads=2, feed_forward=256, context=64
)


@dataclass(frozen=True, kw_only=True)
class LanguagePlan:
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


LANGUAGE_PLANS = {
    "quick": LanguagePlan(
        model=MICRO,
        start=Schedule(steps=200, batch=8, rate=4e-3),
        tune=Schedule(steps=100, batch=8, rate=2e-3),
        evaluated=4096,
    ),
    #: Of the 29 million parameters, 12 and 6 MB of text.
    "full": LanguagePlan(
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


def language_subject(settings: Settings) -> Subject:
    """The task at a run's scale, on its corpus and device."""
    plan = LANGUAGE_PLANS[settings.scale]
    text = Text(text_of(settings.corpus), settings.device, plan.model.context + 1)
    return Subject(
        kind=LANGUAGE_KIND,
        data=settings.corpus.name,
        setting=plan.setting,
        seeds=plan.seeds,
        metric=metric_of(settings.corpus),
        unit="bit",
        higher_is_better=False,
        relative=True,
        margin=limit_of(EXPERIMENT, LANGUAGE_KIND, "gap").bound,
        build=partial(language_build, plan, settings.device),
        start=partial(language_start, plan, text),
        go_on=partial(language_go_on, plan, text),
        calibration=partial(language_calibration, plan, text),
        evaluate=partial(language_evaluate, plan, settings.corpus),
        key=(asdict(plan.model), asdict(plan.start), settings.corpus.sha256),
    )


def metric_of(corpus: Corpus) -> str:
    """Bits per byte of the first held-out split."""
    return f"{BITS}, {next(iter(evaluation_texts(corpus))).partition('/')[0]}"


def language_build(plan: LanguagePlan, device: str, seed: int) -> ByteLevelModel:
    """The model with the random weights of a seed."""
    return seeded(lambda: ByteLevelModel(plan.model), seed).to(device)


def language_start(plan: LanguagePlan, text: Text, seed: int) -> ByteLevelModel:
    """A model trained from random weights."""
    model = language_build(plan, text.device, seed)
    fit(model, plan.start, partial(text.draw, plan.start.batch), mean_loss, seed)
    return model


def language_go_on(
    plan: LanguagePlan, text: Text, model: nn.Module, seed: int, after: Callable[[nn.Module], object]
) -> None:
    """Train a model on, on other stretches."""
    fit(model, plan.tune, partial(text.draw, plan.tune.batch), mean_loss, TUNING_SEED + seed, after)


def language_calibration(plan: LanguagePlan, text: Text, seed: int) -> list[Tensor]:
    """Stretches of the training text, in batches of 16."""
    generator = torch.Generator().manual_seed(CALIBRATION_SEED + seed)
    return list(text.draw(plan.calibrated, generator)[:, :-1].split(16))


def language_evaluate(plan: LanguagePlan, corpus: Corpus, model: nn.Module) -> Values:
    """Bits per byte of each text that was held out, and of each split."""
    texts = {name: text[: plan.evaluated] for name, text in evaluation_texts(corpus).items()}
    return quality(bits_per_byte(model, texts, plan.model.context), texts)
