"""What is trained to compare recipes: paired seeds of a small model, sweeps of learning rates, long trainings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.fp8_training.methods import FLOAT8, MXFP8
from experiments.models.language_model import ModelSettings
from experiments.models.pretraining.settings import Budget, PretrainSettings
from experiments.models.pretraining.sizes import SIZES, Size

PAIRED, SWEEP, LONG = "paired", "sweep", "long"
#: The recipe that quantizes nothing, and what its rows are called on each device.
BASE = "bf16"
BASE_NAMES = {"cpu": "float32", "cuda": "bfloat16"}
RECIPES = (*FLOAT8, "blockwise", MXFP8, "mxfp6", "mxfp4", "nvfp4")
#: The recipe of 8-bit floats that the larger model is trained with, and MXFP8: the paper's open question.
LONG_RECIPES = (BASE, "rowwise", MXFP8)
RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3)
#: The largest gap to bfloat16 that counts as none, in percent of bfloat16's loss. Named before anything was trained.
MARGIN = 0.5

#: A stand-in of seconds a training where quantization is emulated by the specification itself; blocks of 128 divide its layers.
MICRO = ModelSettings(
    name="byte-level-micro", width=128, layers=2, heads=2, kv_heads=2, feed_forward=256, context=64
)
KNOWN_SIZES = {**SIZES, "micro": Size(MICRO, batch=8, rate=1e-3)}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training: what it belongs to, the name of its size, its recipe, and its settings."""

    kind: str
    size: str
    recipe: str
    settings: PretrainSettings

    @property
    def setting(self) -> str:
        """The setting of its rows: size and budget."""
        return f"{self.size}, {self.settings.budget}"

    def method(self, device: str) -> str:
        """The method of its rows: the recipe, in a sweep with the peak learning rate."""
        name = BASE_NAMES[device] if self.recipe == BASE else self.recipe
        return f"{name}, rate {self.settings.rate:g}" if self.kind == SWEEP else name


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Trainings of a scale. evaluated: bytes of each text that a model is evaluated on; None: all.

    Paired trainings run eagerly, whatever their recipe, so that nothing but the recipe differs; others are compiled on a GPU,
    low-precision layers with all else.
    """

    paired: str
    budget: Budget
    seeds: int
    recipes: tuple[str, ...]
    sweeps: tuple[tuple[str, Budget, tuple[float, ...]], ...] = ()
    long: tuple[str, Budget, tuple[str, ...]] | None = None
    evaluated: int | None = None

    def trials(self, kinds: Sequence[str] = (PAIRED, SWEEP, LONG)) -> list[Trial]:
        """All of them, in the order in which they are trained: the sweep says how fast the others learn, then recipe by recipe
        all seeds, so that an interval is complete before the next one begins."""
        found = []
        if SWEEP in kinds:
            for size, budget, rates in self.sweeps:
                found += [self.trial(SWEEP, size, BASE, budget, 0, rate) for rate in rates]
        if PAIRED in kinds:
            for recipe in (BASE, *self.recipes):
                found += [
                    self.trial(PAIRED, self.paired, recipe, self.budget, seed) for seed in range(self.seeds)
                ]
        if LONG in kinds and self.long is not None:
            size, budget, recipes = self.long
            found += [self.trial(LONG, size, recipe, budget, 0) for recipe in recipes]
        return found

    def of_recipe(self, recipe: str) -> Plan:
        """The plan of one recipe: paired with the baseline, and its long training alone."""
        long = None if self.long is None else (*self.long[:2], (recipe,))
        return replace(self, recipes=() if recipe == BASE else (recipe,), long=long)

    def trial(
        self, kind: str, size: str, recipe: str, budget: Budget, seed: int, rate: float | None = None
    ) -> Trial:
        """One training, at the size's own learning rate unless another is given."""
        known = KNOWN_SIZES[size]
        settings = PretrainSettings(
            model=known.model,
            budget=budget,
            batch=known.batch,
            rate=rate or known.rate,
            seed=seed,
            method=recipe,
            compiled=kind != PAIRED,
        )
        return Trial(kind=kind, size=size, recipe=recipe, settings=settings)


QUICK = Plan(
    paired="micro",
    budget=Budget(bytes=48 * 512),
    seeds=3,
    recipes=("rowwise", MXFP8),
    evaluated=8192,
)
FULL = Plan(
    paired="30m",
    budget=Budget(bytes=12_000_000),
    seeds=5,
    recipes=RECIPES,
    sweeps=(("30m", Budget(bytes=12_000_000), RATES), ("120m", Budget(bytes=12_000_000), RATES)),
    # Nine minutes on an H200 by the slowest of its recipes.
    long=("120m", Budget(bytes=210_000_000), LONG_RECIPES),
)
PLANS = {"quick": QUICK, "full": FULL}


__all__ = [
    "BASE",
    "BASE_NAMES",
    "LONG",
    "LONG_RECIPES",
    "MARGIN",
    "PAIRED",
    "PLANS",
    "RECIPES",
    "SWEEP",
    "Plan",
    "Trial",
]
