"""Configurations with MX and NVFP4 weights: small floats (or mxint8) in blocks whose scales are 8 bits wide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ao_lab.config.base import Config, dtype_name
from ao_lab.config.recipe import registered
from reference import FORMATS, SCHEMES, Scheme
from reference.arrays.errors import choice
from reference.schemes.default_schemes import MX_ELEMENTS


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


def mx_of(dtype: Any, mode: Any) -> Scheme:
    """The default MX scheme with this element and rule of its scales ("rceil" or "floor"); ValueError for others."""
    element = choice(dtype_name(dtype), (*MX_ELEMENTS, "mxint8"), "an MX element")
    rule = choice(str(getattr(mode, "value", mode)).lower(), ("rceil", "floor"), "scaling_mode")
    model = SCHEMES["mxfp8_e4m3"]
    # Integers have no rceil record: their largest magnitude is no power of two times another rule's.
    rule = "floor" if FORMATS[element].kind == "int" else rule
    scale = replace(model.scale, rule=rule, target=FORMATS[element].max)
    return registered(replace(model, element=element, scale=scale))


__all__ = [
    "MXDynamicActivationMXWeightConfig",
    "MXWeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig",
    "NVFP4WeightOnlyConfig",
    "mx_of",
]
