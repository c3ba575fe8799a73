"""Configurations with float8 weights or inputs; see `ao_lab.config.base` for what they share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ao_lab.config.base import Config, dtype_name, operands
from ao_lab.config.granularity import PerRow, PerTensor, block_of
from ao_lab.config.recipe import block_name, integer_scheme, registered
from reference import FORMATS, SCHEMES, Scheme
from reference.arrays.errors import choice

NO_LAYOUT: dict[str, tuple[Any, ...]] = {"kernel_preference": ("auto",)}


@dataclass(frozen=True)
class Float8WeightOnlyConfig(Config):
    """Float8, one scale per row (`fp8_rowwise`), tensor, or block of 128."""

    weight_dtype: Any = "float8_e4m3fn"
    set_inductor_config: bool = True
    version: int = 2
    granularity: Any = None

    def _weight(self) -> Scheme:
        return float8_scheme(self.weight_dtype, self.granularity or PerRow())


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(Config):
    """Float8 for weight and input, the input's scales found for each input. Granularity: PerTensor (as torchao), PerRow, or
    the pair of PerBlock((1, 128)) for the input and PerBlock((128, 128)) for the weight."""

    activation_dtype: Any = "float8_e4m3fn"
    weight_dtype: Any = "float8_e4m3fn"
    granularity: Any = None
    packing_format: Any = "plain"
    mm_config: Any = None
    activation_value_lb: float | None = None
    activation_value_ub: float | None = None
    kernel_preference: Any = "auto"
    set_inductor_config: bool = True
    version: int = 2
    alg_id: int = 0
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NO_LAYOUT,
        "packing_format": ("plain",),
        "mm_config": (None,),
        "activation_value_lb": (None,),
        "activation_value_ub": (None,),
    }

    def _weight(self) -> Scheme:
        return float8_scheme(self.weight_dtype, operands(self.granularity or PerTensor())[1])

    def _activation(self) -> Scheme:
        return float8_scheme(self.activation_dtype, operands(self.granularity or PerTensor())[0])


@dataclass(frozen=True)
class Float8DynamicActivationInt4WeightConfig(Config):
    """4-bit integers in groups of 128 for the weight, float8 per token for the input."""

    int4_packing_format: Any = "plain"
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"int4_packing_format": ("plain", "preshuffled")}

    def _weight(self) -> Scheme:
        return integer_scheme(4, 128, asymmetric=False)

    def _activation(self) -> Scheme:
        return SCHEMES["fp8_rowwise"]


def float8_scheme(dtype: Any, granularity: Any) -> Scheme:
    """The default float8 scheme with this element and granularity; ValueError where no record has them."""
    element = choice(dtype_name(dtype), ("float8_e4m3fn", "float8_e5m2"), "a float8 dtype")
    model, block = SCHEMES["fp8_rowwise"], block_of(granularity)
    scale = replace(model.scale, block=block, target=FORMATS[element].max)
    found = registered(wanted := replace(model, element=element, scale=scale))
    if found is wanted:
        raise ValueError(f"block of float8 is tensorwise, rowwise, 1x128 or 128x128; got {block_name(block)}")
    return found


__all__ = [
    "NO_LAYOUT",
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8WeightOnlyConfig",
    "float8_scheme",
]
