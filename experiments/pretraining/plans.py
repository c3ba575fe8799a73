"""Which models experiment `pretraining` trains, and for how long: at each scale, or as a command names them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, fields

from experiments.models.pretraining.settings import Budget, PretrainSettings
from experiments.models.pretraining.sizes import SIZES
from experiments.runs.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training: the name of a size, and its settings."""

    size: str
    settings: PretrainSettings

    @property
    def setting(self) -> str:
        """The setting of its rows: size and budget."""
        return f"{self.size}, {self.settings.budget}"

    @property
    def method(self) -> str:
        """The method of its rows: number format, peak learning rate, bytes a step."""
        one = self.settings
        return f"{one.method}, rate {one.rate:g}, {one.step_bytes} bytes a step"


def training(
    size: str, budget: Budget, rate: float | None = None, seed: int = 0, batch: int | None = None
) -> Training:
    """A training of a size, with the size's rate and batch where none are given; ValueError for an unknown size."""
    if size not in SIZES:
        near = difflib.get_close_matches(size, SIZES, n=1, cutoff=0.4)
        hint = f"the nearest is {near[0]}; " if near else ""
        raise ValueError(f"unknown size {size!r}; {hint}the sizes are {', '.join(SIZES)}")
    known = SIZES[size]
    settings = PretrainSettings(
        model=known.model, budget=budget, batch=batch or known.batch, rate=rate or known.rate, seed=seed
    )
    return Training(size=size, settings=settings)


def sweep(
    size: str,
    budget: Budget,
    rates: Sequence[float] = (),
    seeds: Sequence[int] = (0,),
    batch: int | None = None,
) -> tuple[Training, ...]:
    """A training for each rate and seed; without rates, the size's own."""
    return tuple(training(size, budget, rate, seed, batch) for rate in rates or (None,) for seed in seeds)


#: What each scale trains where no command names it, and the first bytes of each text that it is evaluated on (None: all).
PLANS = {
    "quick": sweep("tiny", Budget(bytes=60_000), (2e-3, 4e-3)),
    "full": (*sweep("30m", Budget(seconds=60), (1e-3, 2e-3, 4e-3)), *sweep("120m", Budget(seconds=240))),
}
EVALUATED = {"quick": 4096, "full": None}


@dataclass(frozen=True, kw_only=True)
class PretrainingSettings(Settings):
    """Settings of a run that was told what to train."""

    trainings: tuple[Training, ...] = ()


def settings_with(settings: Settings, trainings: Sequence[Training]) -> PretrainingSettings:
    """The same settings for these trainings alone: published rows of others stay."""
    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    names = tuple(f"{one.setting}, {one.method}" for one in trainings)
    return PretrainingSettings(**{**given, "only": names, "trainings": tuple(trainings)})


__all__ = ["EVALUATED", "PLANS", "PretrainingSettings", "Training", "settings_with", "sweep", "training"]
