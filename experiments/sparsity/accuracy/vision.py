"""A vision transformer that reads collages of four handwritten digits: every digit counts, and an image with all four right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from functools import lru_cache, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.harness.outcome import Values
from experiments.models.vision_transformer import VisionConfig, VisionTransformer
from experiments.runs.settings import Settings
from experiments.sparsity.accuracy.digits import CLASSES, GRID, Collages, load
from experiments.sparsity.accuracy.subject import CALIBRATION_SEED, TUNING_SEED, Subject, seeded
from experiments.sparsity.accuracy.training import Schedule, fit

KIND = "vision"
DATA = "collages of digits"
ACCURACY, WHOLE = "digits read", "images with all digits read"
#: The largest loss of digits that counts as none, in points. Named before any sparse fine-tuning was measured: a third of the
#: three points that one-shot pruning is to lose at least, and about the one percent of accuracy that MLPerf's rules allow.
MARGIN = 1.0
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
        margin=MARGIN,
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


__all__ = ["ACCURACY", "KIND", "MARGIN", "PLANS", "WHOLE", "Plan", "subject"]
