"""Variants of training in experiment `qat_overhead`: bfloat16, our QAT and torchao's for two recipes, and LoRA over frozen
quantized weights; and the least number of bytes that each must move.

The floor assumes recomputation: nothing is saved for backward that bfloat16 training does not save, so both operands of every
layer are rounded once in forward and once in backward. A pass reads and writes each element, 4 bytes of bfloat16. Masking the
gradients of saturated elements, which are rare, takes no pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from experiments.harness import libraries
from experiments.harness.libraries import TORCHAO
from experiments.qat_overhead.model import DecoderLayers, ModelWithLoss, layers_of

OURS, BASELINE = "ours", "bfloat16"
LORA = "LoRA"
INT8_INT4, INT4 = "int8 dynamic, int4 g32", "int4 weight-only g128"
#: Bytes moved to round one element from bfloat16 to bfloat16, and how often a step does that.
BYTES_PER_ELEMENT, PASSES = 4, 2
#: Copy rate of an H200, bytes a second.
COPY_RATE = 4.2e12


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe as a configuration of both libraries, and whether it rounds inputs too."""

    ours: Callable[[], Any]
    torchao: Callable[[], Any]
    inputs: bool


def int8_int4() -> Any:
    """Ours: 8-bit integers with zero points per token, 4-bit integers in groups of 32."""
    from ao_lab import Int8DynamicActivationIntxWeightConfig, PerGroup

    return Int8DynamicActivationIntxWeightConfig(weight_dtype="int4", weight_granularity=PerGroup(32))


def torchao_int8_int4() -> Any:
    """The same in torchao."""
    import torch
    from torchao.quantization import Int8DynamicActivationIntxWeightConfig
    from torchao.quantization.granularity import PerGroup

    return Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))


def int4() -> Any:
    """Ours: 4-bit integers with zero points in groups of 128."""
    from ao_lab import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=128)


def torchao_int4() -> Any:
    """The same in torchao."""
    from torchao.quantization import Int4WeightOnlyConfig

    return Int4WeightOnlyConfig(group_size=128)


RECIPES = {
    INT8_INT4: Recipe(ours=int8_int4, torchao=torchao_int8_int4, inputs=True),
    INT4: Recipe(ours=int4, torchao=torchao_int4, inputs=False),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train.

    library, recipe: whose QAT, for which recipe; together they name a method. lora: whether only LoRA adapters are trained,
    over weights that are quantized and frozen.
    """

    library: str = BASELINE
    recipe: str = ""
    lora: bool = False

    @property
    def method(self) -> str:
        """The name of its rows."""
        name = f"{self.library}, {self.recipe}" if self.recipe else self.library
        return f"{name}, {LORA}" if self.lora else name

    @property
    def rounds(self) -> bool:
        """Whether it rounds the operands of the layers it trains."""
        return bool(self.recipe) and not self.lora

    def prepare(self, model: DecoderLayers | ModelWithLoss) -> None:
        """Prepare the linear layers of the decoder layers for QAT with the recipe."""
        if self.library == OURS:
            from ao_lab import LoRA, QATConfig, quantize_

            if self.lora:
                model.requires_grad_(False)
            config = QATConfig(
                RECIPES[self.recipe].ours(), step="prepare", lora=LoRA() if self.lora else None
            )
            quantize_(layers_of(model), config, is_linear)
        elif self.library == TORCHAO:
            from torchao.quantization import quantize_
            from torchao.quantization.qat import QATConfig

            quantize_(layers_of(model), QATConfig(RECIPES[self.recipe].torchao(), step="prepare"), is_linear)

    def missing(self) -> str | None:
        """Why it cannot be trained here; None where it can."""
        return libraries.missing(TORCHAO) if self.library == TORCHAO else None


def is_linear(module: nn.Module, name: str) -> bool:
    """The filter of `quantize_`: every nn.Linear, subclasses excluded."""
    return type(module) is nn.Linear


PLAIN = Variant()
VARIANTS = (
    PLAIN,
    *(Variant(library=library, recipe=recipe) for recipe in RECIPES for library in (OURS, TORCHAO)),
    Variant(library=OURS, recipe=INT8_INT4, lora=True),
)


def rounding_bytes(recipe: Recipe, layers: list[tuple[int, int]], tokens: int) -> int:
    """Bytes that one step must move to round the operands of linear layers, given as (outputs, inputs)."""
    elements = sum(outputs * inputs + recipe.inputs * tokens * inputs for outputs, inputs in layers)
    return elements * BYTES_PER_ELEMENT * PASSES


def linear_shapes(model: nn.Module) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer."""
    return [
        (layer.out_features, layer.in_features) for layer in model.modules() if isinstance(layer, nn.Linear)
    ]


__all__ = [
    "COPY_RATE",
    "INT4",
    "INT8_INT4",
    "LORA",
    "OURS",
    "PLAIN",
    "RECIPES",
    "VARIANTS",
    "Recipe",
    "Variant",
    "linear_shapes",
    "rounding_bytes",
]
