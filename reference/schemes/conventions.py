"""What other projects do, as records: their codes, scales and zero points bit for bit.

Each record names its source and says in `deviations` where it breaks the default rules. The versions are those that the tests
compare with: torchao 0.18.0, and Transformer Engine's and compressed-tensors' published reference code of 2026.

Those of torchao are what its public classes do:

* `torchao.int8_*`: `Int8WeightOnlyConfig`, `Int8DynamicActivationInt8WeightConfig`, weights and inputs (`Int8Tensor`):
  float32 scales of float32's epsilon or more.
* `torchao.intx*_*`: `IntxWeightOnlyConfig`, `Int8DynamicActivationIntxWeightConfig` (its inputs:
  `torchao.intx8_rowwise_asymmetric`): scales and arithmetic in the dtype of what is quantized. `torchao.intx*_*_f32`: with
  `scale_dtype=torch.float32`; of 2 to 6 bits in groups of 32 also called `torchao.int*_g32`.
* `torchao.int4_g*_tinygemm`: `Int4WeightOnlyConfig` packed for tinygemm; its plain layout is written by GPU kernels of MSLK.
* `torchao.fp8_*_inference`: `Float8WeightOnlyConfig`, `Float8DynamicActivationFloat8WeightConfig`; `torchao.fp8_*_training`:
  `convert_to_float8_training`.
* `torchao.mx*_floor`, `_rceil`, `_ceil`, `_even`: `MXDynamicActivationMXWeightConfig`, by its scaling mode.
* `torchao.nvfp4`: `NVFP4WeightOnlyConfig`, `NVFP4DynamicActivationNVFP4WeightConfig`; without a per-tensor scale
  `torchao.nvfp4_single_level`.
* `torchao.nf4`: `NF4WeightOnlyConfig`.

`torchao_integer` gives the record of an integer scheme of any width and block by its name, `torchao_float6` those of FP6.
"""

from __future__ import annotations

import re
from dataclasses import replace

from reference.formats.formats import FORMATS
from reference.schemes.schemes import (
    BUILT_IN,
    MX_ELEMENTS,
    RECORDS,
    SCHEMES,
    Block,
    Scale,
    Scheme,
    Zero,
    default_schemes,
    mx_scheme,
)

#: Deviations that several conventions share.
LARGE_OVERFLOWS = (
    "finite inputs near the largest float32, or the largest of a 16-bit input's own dtype, become non-finite"
)
LARGE_16_OVERFLOWS = (
    "finite inputs near the largest of a 16-bit dtype become infinite when they are dequantized to it"
)
SMALL_IS_NAN = "a block of zeros, or one so small that its scale rounds to 0, becomes NaN"
TINY_TENSOR_IS_NAN = "a tensor of zeros, or one so small that its scale rounds to 0, becomes NaN"
NAN_SPREADS = "a NaN anywhere makes the whole tensor NaN"
CLIPS = "the largest positive value clips"
# torchao's fp6 and fp4 casts have no NaN: their integer arithmetic leaves these codes (prototype/custom_fp_utils.py).
NAN_CODES = {"float6_e2m3fn": 0x0C, "float6_e3m2fn": 0x0E, "float4_e2m1fn": 0x03}


def _torchao_mx(element: str, mode: str) -> Scheme:
    """prototype/mx_formats/mx_tensor.py, to_mx."""
    base = mx_scheme(element)
    if mode == "rceil":
        return replace(
            base,
            name=f"torchao.{base.name}_rceil",
            scale=replace(base.scale, rule="rceil_log2"),
            nan="nan",
            nan_code=NAN_CODES.get(element),
            smallest_exponent=0,
            dequantize="target",
            deviations=(
                "float32 log2 misses maxima just above a power of two",
                "scale 2^-127 is applied as 1",
                LARGE_OVERFLOWS,
            ),
        )
    return replace(
        base,
        name=f"torchao.{base.name}_{mode}",
        scale=replace(base.scale, rule=mode),
        nan="element",
        nan_code=NAN_CODES.get(element),
        smallest_exponent=-126,
        dequantize="target",
        deviations=("scale 2^-127 is applied as 2^-126", *(() if mode == "floor" else (LARGE_OVERFLOWS,))),
    )


def _torchao_fp8(element: str, suffix: str) -> list[Scheme]:
    """float8/float8_utils.py (training) and quantization/quant_primitives.py, _choose_scale_float8 (inference)."""
    blocks: dict[str, Block] = {"tensorwise": "tensor", "rowwise": -1, "1x128": 128, "128x128": (128, 128)}
    records = []
    for name, block in blocks.items():
        training = Scale(
            block=block,
            target=FORMATS[element].max,
            compute="float64",
            stored="encode",
            floor=("statistic", 1e-12),
        )
        base = Scheme(
            name=f"torchao.fp8_{name}_training{suffix}", element=element, scale=training, apply="encode", nan="ieee",
            dequantize="ieee",
        )  # fmt: skip
        if name in ("tensorwise", "rowwise"):
            records += [base, _torchao_pow2(base, f"torchao.fp8_{name}_training_pow2{suffix}")]
        # Torchao takes whole blocks alone; a short last block is ours.
        inference = Scale(
            block=block, target=FORMATS[element].max, compute="input", partial=name.endswith("128")
        )
        records.append(
            Scheme(
                name=f"torchao.fp8_{name}_inference{suffix}", element=element, scale=inference, apply="divide",
                nan="ieee", dequantize="ieee",
                deviations=(SMALL_IS_NAN, LARGE_16_OVERFLOWS, "bfloat16 scales are rounded to bfloat16"),
            )
        )  # fmt: skip
    return records


def _torchao_pow2(base: Scheme, name: str) -> Scheme:
    scale = replace(base.scale, rule="ratio_pow2_log2")
    return replace(
        base,
        name=name,
        scale=scale,
        deviations=("float32 log2 rounds up just below a power of two", LARGE_OVERFLOWS),
    )


def _torchao_nvfp4() -> list[Scheme]:
    """prototype/mx_formats/nvfp4_tensor.py, nvfp4_quantize, with and without a per-tensor scale."""
    scale = Scale(block=16, target=6.0, floor=("scale", 2.0**-6), storage="float8_e4m3fn")
    outer = Scale(block="tensor", statistic="absmax_elements", target=6.0 * 448.0)
    single = Scheme(
        name="torchao.nvfp4_single_level", element="float4_e2m1fn", scale=scale, nan="ieee",
        nan_code=NAN_CODES["float4_e2m1fn"], dequantize="ieee",
        deviations=("no e4m3 scale below 2^-6", "block scales above 448 saturate"),
    )  # fmt: skip
    double = replace(
        single, name="torchao.nvfp4", outer=outer, outer_order="reciprocal_first",
        deviations=("no e4m3 scale below 2^-6", TINY_TENSOR_IS_NAN, NAN_SPREADS),
    )  # fmt: skip
    return [double, single]


#: Statistic of each of torchao's mapping types by the end of a record's name.
MAPPINGS = {"": "absmax", "_asymmetric": "minmax_with_zero", "_no_clipping": "minmax_split"}
# int8_g48_asymmetric (of Int8Tensor), intx4_rowwise, intx4_g32_f32 and intx4_g32_bf16 (of IntxUnpackedToInt8Tensor).
INTEGER = re.compile(
    r"torchao\.int(x?)([1-8])_(?:g([1-9]\d*)|(rowwise)|(tensorwise))(_asymmetric|_no_clipping)?(?:_(f32|bf16|f16))?"
)
STORAGE = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def torchao_integer(name: str) -> Scheme | None:
    """The record of torchao's integers with this name, whatever their width and block; None for a name of another kind.

    `torchao.int8_*`: `Int8Tensor`, whose scales are float32 values no smaller than float32's epsilon. `torchao.intx*_*`:
    `IntxUnpackedToInt8Tensor`, whose scales and arithmetic are of the weight's dtype; with the end `_f32` those of float32
    (`scale_dtype=torch.float32`), with `_bf16` or `_f16` those of a weight in that dtype, its scales stored in it.
    ValueError for symmetric integers of one bit: torchao's map every weight to 0.
    """
    match = INTEGER.fullmatch(name)
    if match is None:
        return None
    input_dtype, digits, group, rows, _, mapping, ending = match.groups()
    bits = int(digits)
    block: Block = int(group) if group else -1 if rows else "tensor"
    if ending and not input_dtype:
        return None
    if bits == 1 and mapping != "_asymmetric":
        raise ValueError(
            f"{name}: torchao's symmetric integers of one bit are 0 for every weight; add _asymmetric, or use 2 bits"
        )
    return integer_record(name, bits, block, mapping or "", bool(input_dtype), ending)


#: Elements of torchao's FP6 by the ends of names: `torchao.fp6_e3m2_rowwise`, its scales in bfloat16 (or `_f16`).
FP6 = re.compile(r"torchao\.fp6_(e3m2|e2m3)_rowwise(_f16)?")


def torchao_float6(name: str) -> Scheme | None:
    """The record of torchao's FP6 weights with this name, None for another: `fpx_weight_only` of torchao 0.12.

    dtypes/floatx/floatx_tensor_core_layout.py, to_scaled_tc_floatx: elements are of the float32 weight over the row's largest
    magnitude (at least 1e-12) over the format's, and that scale is then rounded to the weight's dtype.
    """
    match = FP6.fullmatch(name)
    if match is None:
        return None
    element = f"float6_{match[1]}fn"
    storage = "float16" if match[2] else "bfloat16"
    scale = Scale(block=-1, target=FORMATS[element].max, floor=("statistic", 1e-12), storage=storage)
    note = "elements are of the scale before it was rounded for storing"
    return Scheme(
        name=name, element=element, scale=scale, apply="divide", codes_from="exact", deviations=(note,)
    )


def integer_record(
    name: str, bits: int, block: Block, mapping: str, input_dtype: bool, ending: str | None
) -> Scheme:
    """quantization/quant_primitives.py: choose_qparams_affine, quantize_affine, dequantize_affine."""
    target = {"": (2.0**bits - 1) / 2, "_asymmetric": 2.0**bits - 1, "_no_clipping": 2.0 ** (bits - 1) - 1}
    least: tuple[str, float | str] = (
        ("scale", 2.0**-23) if bits == 8 and not input_dtype else ("scale", "tiny")
    )
    scale = Scale(
        block=block, statistic=MAPPINGS[mapping], target=target[mapping], compute="input", floor=least,
        storage="float32" if ending is None else STORAGE[ending],
    )  # fmt: skip
    clips = (CLIPS,) if not mapping else ()
    # Codes and zero points of one bit are torchao's -1 and 0, counted from 0.
    return Scheme(
        name=name, element="uint1" if bits == 1 else f"int{bits}", scale=scale,
        zero=Zero() if mapping == "_asymmetric" else None, arithmetic="input" if input_dtype and ending != "f32" else "float32",
        nan="ieee", dequantize="ieee", deviations=(*clips, LARGE_OVERFLOWS),
    )  # fmt: skip


def _torchao_integers() -> list[Scheme]:
    """The integer schemes listed in `SCHEMES`; `torchao_integer` gives the others."""
    names = [f"int8_{block}{mapping}" for block in ("rowwise", "tensorwise") for mapping in MAPPINGS]
    names += [f"int{bits}_g32{mapping}" for bits in (2, 3, 4, 5, 6, 8) for mapping in MAPPINGS]
    names += [f"intx{form}{mapping}" for form in ("4_g32", "8_rowwise") for mapping in ("", "_asymmetric")]
    records = [torchao_integer(f"torchao.{name}") for name in names]
    return [scheme for scheme in records if scheme is not None]


def _torchao_tinygemm(group: int) -> Scheme:
    """_choose_qparams_affine_tinygemm and _quantize_affine_tinygemm, the layout of Int4TilePackedTo4dTensor."""
    scale = Scale(
        block=group,
        statistic="minmax",
        target=15.0,
        compute="input",
        floor=("scale", "tiny"),
        storage="bfloat16",
    )
    return Scheme(
        name=f"torchao.int4_g{group}_tinygemm", element="uint4", scale=scale, zero=Zero(rule="value", storage="bfloat16"),
        apply="divide", arithmetic="input", nan="ieee", dequantize="target",
        deviations=("zero is not exactly representable", "every operation is rounded to bfloat16", LARGE_OVERFLOWS),
    )  # fmt: skip


def _torchao_nf4() -> Scheme:
    """quantization/quantize_/workflows/nf4/nf4_tensor.py, NF4Tensor.from_tensor(x, 64, 256)."""
    scale = Scale(block="flat:64", target=1.0, compute="input", storage="int8")
    outer = Scale(block=256, target=128.0, compute="input", stored="encode", center="mean")
    return Scheme(
        name="torchao.nf4", element="nf4_torchao", scale=scale, outer=outer, apply="divide", arithmetic="input",
        codes_from="exact", nan="ieee", dequantize="target",
        deviations=("a zero block stores code 0, which is -1", NAN_SPREADS, LARGE_OVERFLOWS),
    )  # fmt: skip


def torchao_conventions() -> list[Scheme]:
    """Every record of torchao in `SCHEMES`."""
    records = [
        _torchao_mx(element, mode) for element in MX_ELEMENTS for mode in ("floor", "rceil", "ceil", "even")
    ]
    records += _torchao_fp8("float8_e4m3fn", "") + _torchao_fp8("float8_e5m2", "_e5m2")
    records += _torchao_nvfp4() + _torchao_integers()
    records += [_torchao_tinygemm(group) for group in (32, 64, 128, 256)]
    return [*records, _torchao_nf4()]


def _transformer_engine() -> list[Scheme]:
    """transformer_engine/pytorch/custom_recipes/quantization_ref_nvfp4.py, _quantize_blockwise_reference."""
    outer = Scale(
        block="tensor", statistic="absmax_elements", target=6.0 * 448.0, stored="encode", floor=("zero", 1.0)
    )
    records = []
    for name, block in (("te.nvfp4", 16), ("te.nvfp4_16x16", (16, 16))):
        scale = Scale(block=block, target=6.0, storage="float8_e4m3fn")
        records.append(
            Scheme(
                name=name, element="float4_e2m1fn", scale=scale, outer=outer, outer_order="folded", nan="ieee",
                nan_code=0, negative_zero=False, dequantize="ieee",
                deviations=("a block scale may round to 0", NAN_SPREADS),
            )
        )  # fmt: skip
    return records


def _compressed_tensors() -> list[Scheme]:
    """compressed-tensors 0.20, quantization/utils/helpers.py: calculate_qparams; lifecycle/forward.py: quantize, dequantize.

    Everything is computed in the input's dtype, and the scale is stored in it."""
    clips = (CLIPS, LARGE_OVERFLOWS)
    records = []
    for name, element, block, target, deviations in (
        ("int8_channel", "int8", -1, 127.5, clips),
        ("int4_g128", "int4", 128, 7.5, clips),
        ("fp8_channel", "float8_e4m3fn", -1, 448.0, (LARGE_16_OVERFLOWS,)),
    ):
        scale = Scale(block=block, target=target, compute="input", floor=("zero", "eps"))
        records.append(
            Scheme(name=f"compressed_tensors.{name}", element=element, scale=scale, apply="divide", arithmetic="input",
                   nan="ieee", negative_zero=False, dequantize="target", deviations=deviations)
        )  # fmt: skip
    return [*records, _compressed_tensors_nvfp4(), *_compressed_tensors_inputs()]


def compressed_tensors_input(element: str, block: Block, name: str) -> Scheme:
    """How compressed-tensors 0.20 quantizes a layer's input to integers or floats, with a dynamic scale.

    helpers.py, compute_dynamic_scales_and_zp, calculate_qparams; forward_helpers.py, _quantize_dequantize: scale and quotient
    are rounded to the input's dtype, an all-zero block has that dtype's eps as its scale. A token is the last axis of an input
    of three axes; of an input of two axes its reader takes one scale for all (block "tensor").
    """
    fmt = FORMATS[element]
    target = (fmt.max - fmt.min) / 2
    scale = Scale(block=block, target=target, compute="input", floor=("zero", "eps"))
    deviations = (CLIPS, LARGE_OVERFLOWS) if fmt.kind == "int" else (LARGE_16_OVERFLOWS,)
    return Scheme(name=f"compressed_tensors.{name}", element=element, scale=scale, apply="divide", arithmetic="input",
                  nan="ieee", negative_zero=False, dequantize="ieee", deviations=deviations)  # fmt: skip


def _compressed_tensors_inputs() -> list[Scheme]:
    """Also mxfp_utils.py, generate_mx_scales: all MX formats but the 6-bit one round the largest magnitude to one bit."""
    records = [
        compressed_tensors_input("int8", -1, "int8_token"),
        compressed_tensors_input("int8", "tensor", "int8_tensor"),
        compressed_tensors_input("int8", 128, "int8_group_128"),
        compressed_tensors_input("int4", -1, "int4_token"),
        compressed_tensors_input("float8_e4m3fn", -1, "fp8_token"),
        compressed_tensors_input("float8_e4m3fn", "tensor", "fp8_tensor"),
        compressed_tensors_input("float8_e4m3fn", 128, "fp8_group_128"),
    ]
    for element, bits in (("float4_e2m1fn", 1), ("float6_e2m3fn", 3), ("float8_e4m3fn", 1)):
        base = mx_scheme(element, "even")
        deviations = (
            "float16 inputs: a scale below 2^-24 becomes 1",
            "a largest magnitude of at least 1.75 * 2^127 makes its block NaN, a NaN need not",
        )
        name, scale = f"compressed_tensors.{base.name}", replace(base.scale, even_bits=bits)
        records.append(replace(base, name=name, scale=scale, deviations=deviations))
    return records


def _compressed_tensors_nvfp4() -> Scheme:
    """Also helpers.py, generate_gparam, and utils/fp4_utils.py, cast_to_fp4."""
    scale = Scale(block=16, target=6.0, compute="input", floor=("zero", 2.0**-3), storage="float8_e4m3fn")
    outer = Scale(
        block="tensor",
        statistic="absmax_elements",
        target=6.0 * 448.0,
        compute="input",
        stored="encode",
        by_reciprocal=True,
        nonfinite=1.0,
    )
    return Scheme(
        name="compressed_tensors.nvfp4", element="float4_e2m1fn", scale=scale, outer=outer, outer_order="encode",
        apply="divide", nan="ieee", nan_code=0, negative_zero=False, dequantize="ieee",
        deviations=("a zero block scale is replaced", "a tensor with a NaN or of tiny values has no outer scale",
                    LARGE_OVERFLOWS),
    )  # fmt: skip


def hqq_scheme(bits: int, group: int, storage: str = "bfloat16") -> Scheme:
    """hqq 0.2.8, core/quantize.py, `Quantizer.quantize` along axis 1 before its zero points are optimized; it keeps scales and
    zero points in the dtype of its layer. Its zero point z, a float in steps of the scale, is the value (2^(bits - 1) - z) s
    here.
    """
    scale = Scale(
        block=group, statistic="minmax", target=2.0**bits - 1, floor=("scale", "tiny"), storage=storage
    )
    return Scheme(
        name=f"hqq.int{bits}_g{group}", element=f"uint{bits}", scale=scale, zero=Zero(rule="value", storage=storage),
        apply="divide", nan="ieee", dequantize="ieee",
        deviations=("zero is not exactly representable", LARGE_OVERFLOWS),
    )  # fmt: skip


def _hqq() -> list[Scheme]:
    return [hqq_scheme(bits, group) for bits in (2, 3, 4, 8) for group in (64, 128)]


def conventions() -> list[Scheme]:
    """Every record of another project."""
    return [*torchao_conventions(), *_transformer_engine(), *_compressed_tensors(), *_hqq()]


def load_schemes() -> dict[str, Scheme]:
    """`SCHEMES`, filled by the first call, in `import reference`: the default schemes, and conventions built from them."""
    if not SCHEMES:
        SCHEMES.update({scheme.name: scheme for scheme in [*default_schemes(), *conventions()]})
        # A record that only served to build another may have had the name of one of these.
        RECORDS.update(SCHEMES)
        BUILT_IN.update(SCHEMES)
    return SCHEMES


__all__ = [
    "compressed_tensors_input",
    "conventions",
    "integer_record",
    "load_schemes",
    "torchao_conventions",
    "torchao_float6",
    "torchao_integer",
]
