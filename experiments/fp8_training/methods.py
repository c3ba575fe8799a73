"""Who trains linear layers, and how: bfloat16, a recipe of ours, ours after `ao_lab.tune`, or torchao's recipe of that name.

Sums are those of the recipe unless a method's name says otherwise: fast in the output and precise in both gradients, like
torchao's of the same name; "blockwise" is precise in all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from experiments.harness import libraries
from experiments.harness.libraries import TORCHAO
from reference.training.recipe import PRODUCTS, Recipe, recipe_of

OURS, BASELINE = "ours", "bfloat16"
#: Recipes that torchao has too, by the same names; MXFP8 by another call.
MXFP8 = "mxfp8"
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
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
        return libraries.missing(TORCHAO) if self.library == TORCHAO else None

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


__all__ = [
    "BASELINE",
    "FAST_SUMS",
    "FLOAT8",
    "MXFP8",
    "OURS",
    "PLAIN",
    "SUMMED_FAST",
    "Method",
    "is_linear",
    "methods",
    "with_fast_sums",
]
