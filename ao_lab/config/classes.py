"""The configurations under torchao's names: integers, few levels, float8, MX, NVFP4; `ao_lab.config.base` has what they share.

`LowBitWeightOnlyConfig` has the levels that ParetoQ trains (Liu et al., arXiv 2502.02631), with one scale per row or group:

    quantize_(model, QATConfig(LowBitWeightOnlyConfig(bits=1.58), step="prepare", learn_scales=True))

Below 3 bits levels are stretched: 3 or 4 of them, balanced, each the middle of an interval of one width, and the largest
magnitude is the end of the outermost interval (`ternary`: -1, 0, 1; `stretched2`: -1.5, -0.5, 0.5, 1.5). From 3 bits on they
are the default symmetric integers, trained by learned step sizes. Learned scales start where the paper's do, at the largest
magnitude of their row; their gradient is that of `reference.fake_quantize_vjp`, the derivative of what was computed.

Where this is not the authors' program: an element exactly at zero takes -0.5 in `stretched2` (there +0.5); elements saturate
beyond the end of the outermost interval (there from 0.99 of it on); a saturated ternary element moves the scale by its value
(there by 1.5 times it); "lsq" counts the elements of a block (there those of the tensor).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ao_lab.config.base import Config, dtype_name, operands
from ao_lab.config.granularity import GROUPS_OF_32, PER_ROW, ROWS, PerRow, PerTensor, block_of, is_asymmetric
from ao_lab.config.recipe import block_name, integer_scheme, registered, stretched
from reference import FORMATS, SCHEMES, Scheme
from reference.arrays.namespace import choice
from reference.schemes.schemes import MX_ELEMENTS

#: What the Intx configurations take of torchao's ways to pack codes and to find scales.
ONLY_INTX: dict[str, tuple[Any, ...]] = {
    "intx_packing_format": ("unpacked_to_int8",),
    "intx_choose_qparams_algorithm": ("affine",),
}


@dataclass(frozen=True)
class Int4WeightOnlyConfig(Config):
    """INT4 weights (W4A16) with zero points in groups: `int4_g{group_size}_asymmetric`. Symmetric: scheme="int4_g128"."""

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
    """INT8 weights (W8A16), one scale per output channel (`int8_rowwise`), group or tensor."""

    group_size: int | None = None
    granularity: Any = PER_ROW
    set_inductor_config: bool = True
    version: int = 2

    def _weight(self) -> Scheme:
        block = block_of(self.granularity) if self.group_size is None else self.group_size
        return integer_scheme(8, block, asymmetric=False)


@dataclass(frozen=True)
class IntxWeightOnlyConfig(Config):
    """Integer weights of 1 to 8 bits, a float32 or bfloat16 scale per output channel or group. One bit: both ends."""

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
    """INT8 weights and activations (W8A8), dynamic: activation scales (and zero points, if asymmetric) at run time."""

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
    """Integer weights of 1 to 8 bits, dynamic INT8 activations with a zero point per token (W4A8 and others)."""

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


#: Elements of fewer than 3 bits; log2(3) is 1.58.
STRETCHED = {1.58: "ternary", 2: "stretched2"}


@dataclass(frozen=True)
class LowBitWeightOnlyConfig(Config):
    """Weights of 1.58 bits (three levels), 2, 3 or 4 bits (meant for QAT)."""

    bits: float = 2
    granularity: Any = ROWS

    def _weight(self) -> Scheme:
        if self.bits not in (*STRETCHED, 3, 4):
            raise ValueError(
                f"LowBitWeightOnlyConfig: bits is 1.58 (three levels), 2, 3 or 4; got {self.bits!r}"
            )
        block, element = block_of(self.granularity), STRETCHED.get(self.bits)
        if element is not None:
            return stretched(element, block)
        return integer_scheme(int(self.bits), block, asymmetric=False)


@dataclass(frozen=True)
class NF4WeightOnlyConfig(Config):
    """NF4 weights (W4A16) with double quantization, as in QLoRA."""

    block_size: int = 64
    scaler_block_size: int = 256
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"block_size": (64,), "scaler_block_size": (256,)}

    def _weight(self) -> Scheme:
        return SCHEMES["nf4"]


# Configurations with float8 weights or inputs; see `ao_lab.config.base` for what they share.

NO_LAYOUT: dict[str, tuple[Any, ...]] = {"kernel_preference": ("auto",)}


@dataclass(frozen=True)
class Float8WeightOnlyConfig(Config):
    """FP8 weights (W8A16), one scale per output channel (`fp8_rowwise`), tensor, or 128x128 block."""

    weight_dtype: Any = "float8_e4m3fn"
    set_inductor_config: bool = True
    version: int = 2
    granularity: Any = None

    def _weight(self) -> Scheme:
        return float8_scheme(self.weight_dtype, self.granularity or PerRow())


@dataclass(frozen=True)
class Float8DynamicActivationFloat8WeightConfig(Config):
    """FP8 weights and activations (W8A8), dynamic. Granularity: PerTensor (as torchao), PerRow, or
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
    """INT4 weights in groups of 128, dynamic FP8 activations per token (W4A8)."""

    int4_packing_format: Any = "plain"
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"int4_packing_format": ("plain", "preshuffled")}

    def _weight(self) -> Scheme:
        return integer_scheme(4, 128, asymmetric=False)

    def _activation(self) -> Scheme:
        return SCHEMES["fp8_rowwise"]


# Configurations with MX and NVFP4 weights: small floats (or mxint8) in blocks whose scales are 8 bits wide.


@dataclass(frozen=True)
class MXWeightOnlyConfig(Config):
    """MX weights (FP8, FP6, FP4 or INT8 in blocks of 32). Scale rounding "rceil", as in torchao, or "floor"."""

    weight_dtype: Any = "float8_e4m3fn"
    scaling_mode: Any = "rceil"

    def _weight(self) -> Scheme:
        return mx_of(self.weight_dtype, self.scaling_mode)


@dataclass(frozen=True)
class MXDynamicActivationMXWeightConfig(Config):
    """MX weights and activations (MXFP8, MXFP6, MXFP4), dynamic."""

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
    """NVFP4 weights (W4A16)."""

    use_dynamic_per_tensor_scale: bool = True
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"use_dynamic_per_tensor_scale": (True,)}

    def _weight(self) -> Scheme:
        return SCHEMES["nvfp4"]


@dataclass(frozen=True)
class NVFP4DynamicActivationNVFP4WeightConfig(Config):
    """NVFP4 weights and activations (W4A4), dynamic: activation scales of both levels at run time."""

    use_triton_kernel: bool = True
    use_dynamic_per_tensor_scale: bool = True
    step: Any = None
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"use_dynamic_per_tensor_scale": (True,), "step": (None,)}

    def _weight(self) -> Scheme:
        return SCHEMES["nvfp4"]

    def _activation(self) -> Scheme:
        return SCHEMES["nvfp4"]


def scale_storage(dtype: Any) -> str:
    """How scales are stored; None: in float32."""
    return choice(dtype_name(dtype or "float32"), ("float32", "bfloat16", "float16"), "the scales' dtype")


def integer_bits(dtype: Any) -> int:
    """The width of torch.int1 to torch.int8, or of their names."""
    names = tuple(f"int{bits}" for bits in range(1, 9))
    return int(choice(dtype_name(dtype), names, "weight_dtype").removeprefix("int"))


def float8_scheme(dtype: Any, granularity: Any) -> Scheme:
    """The default float8 scheme with this element and granularity; ValueError where no record has them."""
    element = choice(dtype_name(dtype), ("float8_e4m3fn", "float8_e5m2"), "a float8 dtype")
    model, block = SCHEMES["fp8_rowwise"], block_of(granularity)
    scale = replace(model.scale, block=block, target=FORMATS[element].max)
    result = registered(wanted := replace(model, element=element, scale=scale))
    if result is wanted:
        raise ValueError(f"block of float8 is tensorwise, rowwise, 1x128 or 128x128; got {block_name(block)}")
    return result


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
    "NO_LAYOUT", "Float8DynamicActivationFloat8WeightConfig", "Float8DynamicActivationInt4WeightConfig",
    "Float8WeightOnlyConfig", "Int4WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig", "Int8WeightOnlyConfig", "IntxWeightOnlyConfig", "LowBitWeightOnlyConfig",
    "MXDynamicActivationMXWeightConfig", "MXWeightOnlyConfig", "NF4WeightOnlyConfig",
    "NVFP4DynamicActivationNVFP4WeightConfig", "NVFP4WeightOnlyConfig", "float8_scheme",
]  # fmt: skip
