"""Who trains linear layers, and how: bfloat16, a recipe of ours, ours after `ao_lab.tune`, or torchao's recipe of that name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from experiments.harness import libraries
from experiments.harness.libraries import TORCHAO

OURS, BASELINE = "ours", "bfloat16"
#: Recipes that torchao has too, by the same names; MXFP8 by another call.
MXFP8 = "mxfp8"
FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train linear layers.

    library: whose; recipe: its name, nothing for bfloat16. tuned: whether `ao_lab.tune` chose before, which may leave products
    in bfloat16; otherwise the recipe is forced. compiled: whether torch.compile is used.
    """

    library: str = BASELINE
    recipe: str = ""
    tuned: bool = False
    compiled: bool = False

    @property
    def name(self) -> str:
        """The name of its rows, without how it runs."""
        name = f"{self.library}, {self.recipe}" if self.recipe else self.library
        return f"{name}, tuned" if self.tuned else name

    def missing(self) -> str | None:
        """Why it cannot train here; None where it can."""
        return libraries.missing(TORCHAO) if self.library == TORCHAO else None

    def prepare(self, model: nn.Module) -> None:
        """Convert every nn.Linear of the model in place, by the library's own call."""
        if self.library == OURS:
            from ao_lab import convert_for_training_

            convert_for_training_(model, self.recipe, is_linear)
        elif self.library == TORCHAO and self.recipe == MXFP8:
            _torchao_mxfp8(model)
        elif self.library == TORCHAO:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(self.recipe)
            convert_to_float8_training(model, config=config, module_filter_fn=is_linear)


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


def methods(*recipes: str, torchao: bool = True, compiled: bool = False) -> tuple[Method, ...]:
    """bfloat16, then each recipe of ours and of torchao where it has it."""
    found = [Method(compiled=compiled)]
    for recipe in recipes:
        found.append(Method(library=OURS, recipe=recipe, compiled=compiled))
        if torchao and recipe in (*FLOAT8, MXFP8):
            found.append(Method(library=TORCHAO, recipe=recipe, compiled=compiled))
    return tuple(found)


__all__ = ["BASELINE", "FLOAT8", "MXFP8", "OURS", "PLAIN", "Method", "is_linear", "methods"]
