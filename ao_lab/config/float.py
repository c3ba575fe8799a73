"""Configurations with float8, MX, NVFP4 and NF4 weights; see `ao_lab.config.base` for what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ao_lab.config.base import Config, dtype_name, operands
from ao_lab.config.granularity import PerRow, PerTensor, block_of
from ao_lab.config.recipe import block_name, integer_scheme
from reference import SCHEMES, Scheme
from reference.arrays.errors import choice
from reference.schemes.default_schemes import MX_ELEMENTS, mx_name

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


@dataclass(frozen=True)
class MXWeightOnlyConfig(Config):
    """An MX format (float8, float6, float4 or mxint8) for the weight. Scales by "rceil", as torchao's, or "floor"."""

    weight_dtype: Any = "float8_e4m3fn"
    scaling_mode: Any = "rceil"

    def _weight(self) -> Scheme:
        return mx_of(self.weight_dtype, self.scaling_mode)


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig(Config):
    """MX formats for weight and input, the input's scales found for each input."""

    block_size: int = 32
    activation_dtype: Any = "float8_e4m3fn"
    weight_dtype: Any = "float8_e4m3fn"
    kernel_preference: Any = "auto"
    scaling_mode: Any = "rceil"
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block_size": (32,),
        "kernel_preference": ("auto", "emulated"),
    }

    def _weight(self) -> Scheme:
        return mx_of(self.weight_dtype, self.scaling_mode)

    def _activation(self) -> Scheme:
        return mx_of(self.activation_dtype, self.scaling_mode)


@dataclass(frozen=True)
class NVFP4WeightOnlyConfig(Config):
    """NVFP4 for the weight."""

    use_dynamic_per_tensor_scale: bool = True
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"use_dynamic_per_tensor_scale": (True,)}

    def _weight(self) -> Scheme:
        return SCHEMES["nvfp4"]


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig(Config):
    """NVFP4 for weight and input, the input's scales of both levels found for each input."""

    use_triton_kernel: bool = True
    use_dynamic_per_tensor_scale: bool = True
    step: Any = None
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"use_dynamic_per_tensor_scale": (True,), "step": (None,)}

    def _weight(self) -> Scheme:
        return SCHEMES["nvfp4"]

    def _activation(self) -> Scheme:
        return SCHEMES["nvfp4"]


@dataclass(frozen=True)
class NF4WeightOnlyConfig(Config):
    """NF4 with double quantization (QLoRA) for the weight."""

    block_size: int = 64
    scaler_block_size: int = 256
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"block_size": (64,), "scaler_block_size": (256,)}

    def _weight(self) -> Scheme:
        return SCHEMES["nf4"]


def mx_of(dtype: Any, mode: Any) -> Scheme:
    """The house's MX scheme with this element and rule of its scales."""
    element = choice(dtype_name(dtype), (*MX_ELEMENTS, "mxint8"), "an MX element")
    rule = choice(str(getattr(mode, "value", mode)).lower(), ("rceil", "floor"), "scaling_mode")
    # Integers have no rceil record: their largest magnitude is no power of two times another rule's.
    suffix = "_rceil" if rule == "rceil" and element != "mxint8" else ""
    return SCHEMES[mx_name(element) + suffix]


def float8_scheme(dtype: Any, granularity: Any) -> Scheme:
    """The house's float8 scheme with this element and granularity."""
    element = choice(dtype_name(dtype), ("float8_e4m3fn", "float8_e5m2"), "a float8 dtype")
    block = {"128": "1x128"}.get(str(block_of(granularity)), block_name(block_of(granularity)))
    suffix = "_e5m2" if element == "float8_e5m2" else ""
    choice(block, ("tensorwise", "rowwise", "1x128", "128x128"), "block of float8")
    return SCHEMES[f"fp8_{block}{suffix}"]


__all__ = [
    "Float8DynamicActivationFloat8WeightConfig",
    "Float8DynamicActivationInt4WeightConfig",
    "Float8WeightOnlyConfig",
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
]
