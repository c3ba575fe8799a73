"""Configurations with integer weights; see `ao_lab.config.base` for what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ao_lab.config.base import Config, dtype_name, operands
from ao_lab.config.granularity import GROUPS_OF_32, PER_ROW, ROWS, block_of, is_asymmetric
from ao_lab.config.recipe import integer_scheme
from reference import Scheme
from reference.arrays.errors import choice

#: What the Intx configurations take of torchao's ways to pack codes and to find scales.
ONLY_INTX: dict[str, tuple[Any, ...]] = {
    "intx_packing_format": ("unpacked_to_int8",),
    "intx_choose_qparams_algorithm": ("affine",),
}


@dataclass(frozen=True)
class Int4WeightOnlyConfig(Config):
    """4-bit integers with zero points in groups: `int4_g{group_size}_asymmetric`. Without zero points: scheme="int4_g128"."""

    group_size: int = 128
    set_inductor_config: bool = True
    int4_packing_format: Any = "plain"
    int4_choose_qparams_algorithm: Any = "tinygemm"
    int4_tile_packed_ntile: int = 8
    version: int = 2
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "int4_packing_format": ("plain",),
        "int4_choose_qparams_algorithm": ("tinygemm",),
    }

    def _weight(self) -> Scheme:
        return integer_scheme(4, self.group_size, asymmetric=True)


@dataclass(frozen=True)
class Int8WeightOnlyConfig(Config):
    """8-bit integers, one scale per row (`int8_rowwise`), group or tensor."""

    group_size: int | None = None
    granularity: Any = PER_ROW
    set_inductor_config: bool = True
    version: int = 2

    def _weight(self) -> Scheme:
        block = block_of(self.granularity) if self.group_size is None else self.group_size
        return integer_scheme(8, block, asymmetric=False)


@dataclass(frozen=True)
class IntxWeightOnlyConfig(Config):
    """Integers of 1 to 8 bits, one scale (float32, or bfloat16) per row or group. One bit: the two ends of the range."""

    weight_dtype: Any = "int8"
    granularity: Any = ROWS
    mapping_type: Any = "SYMMETRIC"
    scale_dtype: Any = None
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = ONLY_INTX

    def _weight(self) -> Scheme:
        asymmetric, storage = is_asymmetric(self.mapping_type), scale_storage(self.scale_dtype)
        return integer_scheme(
            integer_bits(self.weight_dtype), block_of(self.granularity), asymmetric, storage
        )


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig(Config):
    """8-bit integers for weight and input, the input's scales (and zero points, if asymmetric) found for each input."""

    act_mapping_type: Any = "SYMMETRIC"
    weight_only_decode: bool = False
    granularity: Any = PER_ROW
    set_inductor_config: bool = True
    version: int = 2
    reduce_range: bool | None = False
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "weight_only_decode": (False,),
        "reduce_range": (False, None),
    }

    def _weight(self) -> Scheme:
        return integer_scheme(8, block_of(operands(self.granularity)[1]), asymmetric=False)

    def _activation(self) -> Scheme:
        block = block_of(operands(self.granularity)[0])
        return integer_scheme(8, block, is_asymmetric(self.act_mapping_type))


@dataclass(frozen=True)
class Int8DynamicActivationIntxWeightConfig(Config):
    """Integers of 1 to 8 bits for the weight, 8-bit integers with a zero point per token for the input."""

    weight_dtype: Any = "int8"
    weight_granularity: Any = GROUPS_OF_32
    weight_mapping_type: Any = "SYMMETRIC"
    weight_scale_dtype: Any = None
    act_mapping_type: Any = "ASYMMETRIC"
    intx_packing_format: Any = "unpacked_to_int8"
    intx_choose_qparams_algorithm: Any = "affine"
    version: int = 2
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = ONLY_INTX

    def _weight(self) -> Scheme:
        asymmetric = is_asymmetric(self.weight_mapping_type)
        bits, block = integer_bits(self.weight_dtype), block_of(self.weight_granularity)
        return integer_scheme(bits, block, asymmetric, scale_storage(self.weight_scale_dtype))

    def _activation(self) -> Scheme:
        return integer_scheme(8, -1, is_asymmetric(self.act_mapping_type))


def scale_storage(dtype: Any) -> str:
    """How scales are stored; None: in float32."""
    return choice(dtype_name(dtype or "float32"), ("float32", "bfloat16"), "the scales' dtype")


def integer_bits(dtype: Any) -> int:
    """The width of torch.int1 to torch.int8, or of their names."""
    names = tuple(f"int{bits}" for bits in range(1, 9))
    return int(choice(dtype_name(dtype), names, "weight_dtype").removeprefix("int"))


__all__ = [
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
]
