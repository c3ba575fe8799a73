"""What is trained in experiment `qat_overhead`: bfloat16, our QAT and torchao's for two recipes, adapters beside frozen
quantized weights, and what each must cost.

The floor is that of recomputation: nothing is kept for backward that plain training does not keep, so both operands of every
layer are rounded once in forward and once in backward. A pass reads an element and writes it, 4 bytes of bfloat16. Gradients of
what saturates are masked where it does, which is hardly anywhere, and take no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from experiments.decode.configs import TORCHAO, version_of
from experiments.qat_overhead.model import Blocks, Whole, blocks_of

OURS, BASELINE = "ours", "bfloat16"
LORA = "LoRA"
INT8_INT4, INT4 = "int8 dynamic, int4 g32", "int4 weight-only g128"
#: Bytes of an element that is rounded from bfloat16 to bfloat16, and how often a step does that.
ROUNDED, PASSES = 4, 2
#: What an H200 copies, bytes a second.
COPY_RATE = 4.2e12


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe as both libraries configure it, and whether it rounds inputs too."""

    ours: Callable[[], Any]
    torchao: Callable[[], Any]
    inputs: bool


def int8_int4() -> Any:
    """Ours: 8-bit integers with zero points per token, 4-bit integers in groups of 32."""
    from ao_lab import Int8DynamicActivationIntxWeightConfig, PerGroup

    return Int8DynamicActivationIntxWeightConfig(weight_dtype="int4", weight_granularity=PerGroup(32))


def torchao_int8_int4() -> Any:
    """torchao's of the same."""
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerGroup

    return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))


def int4() -> Any:
    """Ours: 4-bit integers with zero points in groups of 128."""
    from ao_lab import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=128)


def torchao_int4() -> Any:
    """torchao's of the same."""
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=128)


RECIPES = {
    INT8_INT4: Recipe(ours=int8_int4, torchao=torchao_int8_int4, inputs=True),
    INT4: Recipe(ours=int4, torchao=torchao_int4, inputs=False),
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    #: Whose, and of which recipe; together they name a method.
    maker: str = BASELINE
    recipe: str = ""
    #: Whether adapters are trained beside weights that are quantized and frozen; nothing else is trained then.
    lora: bool = False

    @property
    def method(self) -> str:
        """The name of its rows."""
        name = f"{self.maker}, {self.recipe}" if self.recipe else self.maker
        return f"{name}, {LORA}" if self.lora else name

    @property
    def rounds(self) -> bool:
        """Whether it rounds the operands of layers that it trains."""
        return bool(self.recipe) and not self.lora

    def prepare(self, model: Blocks | Whole) -> None:
        """Make the linear layers of the blocks train for the recipe."""
        if self.maker == OURS:
            from ao_lab import LoRA, QATConfig, quantize_

            if self.lora:
                model.requires_grad_(False)
            config = QATConfig(
                RECIPES[self.recipe].ours(), step="prepare", lora=LoRA() if self.lora else None
            )
            quantize_(blocks_of(model), config, is_linear)
        elif self.maker == TORCHAO:
            from torchao.quantization import quantize_ as theirs_
            from torchao.quantization.qat import QATConfig as TheirConfig

            theirs_(blocks_of(model), TheirConfig(RECIPES[self.recipe].torchao(), step="prepare"), is_linear)

    def missing(self) -> str | None:
        """Why it cannot be trained here; None where it can."""
        if self.maker == TORCHAO and version_of(TORCHAO) == "none":
            return "missing: torchao is not installed"
        return None


def is_linear(module: nn.Module, name: str) -> bool:
    """Which modules are rounded: every linear layer, by its own class."""
    return type(module) is nn.Linear


PLAIN = Arm()
ARMS = (
    PLAIN,
    *(Arm(maker=maker, recipe=recipe) for recipe in RECIPES for maker in (OURS, TORCHAO)),
    Arm(maker=OURS, recipe=INT8_INT4, lora=True),
)


def rounding_bytes(recipe: Recipe, layers: list[tuple[int, int]], tokens: int) -> int:
    """Bytes that one step must move to round the operands of linear layers (outputs, inputs)."""
    elements = sum(outputs * inputs + recipe.inputs * tokens * inputs for outputs, inputs in layers)
    return elements * ROUNDED * PASSES


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer."""
    return [
        (layer.out_features, layer.in_features) for layer in model.modules() if isinstance(layer, nn.Linear)
    ]


__all__ = [
    "ARMS",
    "COPY_RATE",
    "INT4",
    "INT8_INT4",
    "LORA",
    "OURS",
    "PLAIN",
    "RECIPES",
    "Arm",
    "Recipe",
    "linear_shapes",
    "rounding_bytes",
]
