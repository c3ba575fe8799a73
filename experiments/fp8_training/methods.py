"""Who trains linear layers, and how: bfloat16, a recipe of ours, ours after `ao_lab.tune`, or torchao's recipe of that name.

Sums are those of the recipe unless a method's name says otherwise: fast in the output and precise in both gradients, like
torchao's of the same name; "blockwise" is precise in all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from experiments.harness import revision
from experiments.harness.revision import TORCHAO
from experiments.models.llama import ModelSettings
from experiments.models.pretraining import SIZES, Budget, PretrainSettings, Size
from experiments.report.targets import limit_of
from reference.training.recipe import PRODUCTS, Recipe, recipe_of

OURS, BASELINE = "ours", "bfloat16"
#: Recipes that are measured with fast sums in all three products too, and what their names say then.
SUMMED_FAST, FAST_SUMS = ("tensorwise", "rowwise"), "fast sums"


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train linear layers.

    library: whose; recipe: its name, nothing for bfloat16. fast_sums: whether all three products of ours accumulate fast, not
    the output alone. tuned: whether `ao_lab.tune` chose before, which may leave products in bfloat16; otherwise the recipe is
    forced. compiled: whether torch.compile is used.
    """

    library: str = BASELINE
    recipe: str = ""
    fast_sums: bool = False
    tuned: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """The name of its rows, without how it runs."""
        words = [self.library, *([self.recipe] if self.recipe else [])]
        return ", ".join(words + [FAST_SUMS] * self.fast_sums + ["tuned"] * self.tuned)

    def missing(self) -> str | None:
        """Why it cannot train here; None where it can."""
        return revision.missing(TORCHAO) if self.library == TORCHAO else None

    def prepare(self, model: nn.Module, fuse: bool = False) -> None:
        """Convert every nn.Linear of the model in place, by the library's own call; fuse: layers between too, of ours."""
        if self.library == OURS:
            from ao_lab import convert_for_training_

            recipe = with_fast_sums(self.recipe) if self.fast_sums else self.recipe
            convert_for_training_(model, recipe, is_linear, fuse=fuse)
        elif self.library == TORCHAO and self.recipe == MXFP8:
            _torchao_mxfp8(model)
        elif self.library == TORCHAO:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(self.recipe)
            convert_to_float8_training(model, config=config, module_filter_fn=is_linear)


def with_fast_sums(recipe: str) -> Recipe:
    """The record of a recipe whose three products all accumulate fast."""
    record = recipe_of(recipe)
    products = {name: replace(getattr(record, name), accumulation="fast") for name in PRODUCTS}
    return replace(record, name=f"{record.name}_fast_sums", **products)


def _torchao_mxfp8(model: nn.Module) -> None:
    """torchao's MXFP8 training, emulated where the GPU has no units for it, which is the only way that it runs there."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    quantize_(model, config, filter_fn=is_linear)


def is_linear(module: nn.Module, name: str) -> bool:
    """The filter of all libraries: every nn.Linear, subclasses excluded."""
    return type(module) is nn.Linear


#: Recipes that torchao has too, by the same names; MXFP8 by another call.
MXFP8 = "mxfp8"


PLAIN = Method()


def methods(*recipes: str, fast: Sequence[str] = (), compiled: bool = False) -> tuple[Method, ...]:
    """bfloat16, then each recipe of ours, with fast sums where `fast` names it, and of torchao where it has it."""
    found = [Method(compiled=compiled)]
    for recipe in recipes:
        found.append(Method(library=OURS, recipe=recipe, compiled=compiled))
        if recipe in fast:
            found.append(Method(library=OURS, recipe=recipe, fast_sums=True, compiled=compiled))
        if recipe in (*FLOAT8, MXFP8):
            found.append(Method(library=TORCHAO, recipe=recipe, compiled=compiled))
    return tuple(found)


# What is trained to compare recipes: paired seeds of a small model, sweeps of learning rates, long trainings.

PAIRED, SWEEP, LONG = "paired", "sweep", "long"
#: The recipe that quantizes nothing, and what its rows are called on each device.
BASE = "bf16"
BASE_NAMES = {"cpu": "float32", "cuda": "bfloat16"}
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = (*FLOAT8, "blockwise", MXFP8, "mxfp6", "mxfp4", "nvfp4")
#: The recipe of 8-bit floats that the larger model is trained with, and MXFP8: the paper's open question.
LONG_RECIPES = (BASE, "rowwise", MXFP8)
RATES = (1.25e-4, 2.5e-4, 5e-4, 1e-3)
#: The largest gap to bfloat16 that counts as none, in percent of bfloat16's loss. Named before anything was trained.
MARGIN = limit_of("fp8_training", PAIRED, "gap").bound

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
    paired="micro", budget=Budget(bytes=48 * 512), seeds=3, recipes=("rowwise", MXFP8), evaluated=8192
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
#: What shows on a CPU, in some minutes, which part of a loss rare bytes have: two seeds in float32, and one by MXFP8.
BASES = Plan(paired="micro", budget=Budget(bytes=800_000), seeds=2, recipes=(), evaluated=32768)
RARE_BYTES = (BASES, replace(BASES, seeds=1, recipes=(MXFP8,)))
