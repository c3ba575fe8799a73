"""What other projects do, as records: their codes, scales and zero points bit for bit.

Each record names its source and says in `deviations` what it does that the house forbids. The versions are those that the
tests compare with: torchao 0.18.0, and Transformer Engine's and compressed-tensors' published reference code of 2026.
"""

from __future__ import annotations

from dataclasses import replace

from reference.formats import FORMATS
from reference.schemes import MX_ELEMENTS, Block, Scale, Scheme, Zero, mx_name, mx_scheme

ZERO_IS_NAN = "a zero block becomes NaN"
NAN_SPREADS = "a NaN anywhere makes the whole tensor NaN"
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
        deviations=("scale 2^-127 is applied as 2^-126",),
    )


def _torchao_fp8(element: str, suffix: str) -> list[Scheme]:
    """float8/float8_utils.py (training) and quantization/quant_primitives.py, _choose_scale_float8 (inference)."""
    blocks: dict[str, Block] = {"tensorwise": "tensor", "rowwise": -1}
    made = []
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
        made += [base, _torchao_pow2(base, f"torchao.fp8_{name}_training_pow2{suffix}")]
        inference = Scale(block=block, target=FORMATS[element].max, compute="input")
        made.append(
            Scheme(
                name=f"torchao.fp8_{name}_inference{suffix}", element=element, scale=inference, apply="divide",
                nan="ieee", dequantize="ieee", deviations=(ZERO_IS_NAN, "bfloat16 scales are rounded to bfloat16"),
            )
        )  # fmt: skip
    return made


def _torchao_pow2(base: Scheme, name: str) -> Scheme:
    scale = replace(base.scale, rule="ratio_pow2_log2")
    return replace(
        base, name=name, scale=scale, deviations=("float32 log2 rounds up just below a power of two",)
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
        deviations=("no e4m3 scale below 2^-6", "a zero tensor becomes NaN", NAN_SPREADS),
    )  # fmt: skip
    return [double, single]


def _torchao_integers() -> list[Scheme]:
    """quantization/quant_primitives.py, choose_qparams_affine and quantize_affine, with scale_dtype=float32."""
    made = [
        _torchao_int("int8_rowwise", 8, -1, "absmax", 127.5),
        _torchao_int("int8_rowwise_asymmetric", 8, -1, "minmax_with_zero", 255.0, ("scale", 2.0**-23)),
        _torchao_int("int8_rowwise_no_clipping", 8, -1, "minmax_split", 127.0),
    ]
    for bits in (2, 3, 4, 5, 6, 8):
        half, full = (2.0**bits - 1) / 2, 2.0**bits - 1
        made += [
            _torchao_int(f"int{bits}_g32", bits, 32, "absmax", half),
            _torchao_int(f"int{bits}_g32_asymmetric", bits, 32, "minmax_with_zero", full),
            _torchao_int(f"int{bits}_g32_no_clipping", bits, 32, "minmax_split", 2.0 ** (bits - 1) - 1),
        ]
    return made


def _torchao_int(
    name: str,
    bits: int,
    block: Block,
    statistic: str,
    target: float,
    floor: tuple[str, float | str] = ("scale", "tiny"),
) -> Scheme:
    scale = Scale(block=block, statistic=statistic, target=target, compute="input", floor=floor)
    zero = Zero() if statistic == "minmax_with_zero" else None
    clips = ("the largest positive value clips",) if statistic == "absmax" else ()
    return Scheme(
        name=f"torchao.{name}", element=f"int{bits}", scale=scale, zero=zero, nan="ieee", dequantize="ieee",
        deviations=clips,
    )  # fmt: skip


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
        deviations=("zero is not exactly representable", "every operation is rounded to bfloat16"),
    )  # fmt: skip


def _torchao_nf4() -> Scheme:
    """quantization/quantize_/workflows/nf4/nf4_tensor.py, NF4Tensor.from_tensor(x, 64, 256)."""
    scale = Scale(block="flat:64", target=1.0, compute="input", storage="int8")
    outer = Scale(block=256, target=128.0, compute="input", stored="encode", center="mean")
    return Scheme(
        name="torchao.nf4", element="nf4_torchao", scale=scale, outer=outer, apply="divide", arithmetic="input",
        codes_from="exact", nan="ieee", dequantize="target",
        deviations=("a zero block stores code 0, which is -1", NAN_SPREADS),
    )  # fmt: skip


def _transformer_engine() -> list[Scheme]:
    """transformer_engine/pytorch/custom_recipes/quantization_ref_nvfp4.py, _quantize_blockwise_reference."""
    outer = Scale(
        block="tensor", statistic="absmax_elements", target=6.0 * 448.0, stored="encode", floor=("zero", 1.0)
    )
    made = []
    for name, block in (("te.nvfp4", 16), ("te.nvfp4_16x16", (16, 16))):
        scale = Scale(block=block, target=6.0, storage="float8_e4m3fn")
        made.append(
            Scheme(
                name=name, element="float4_e2m1fn", scale=scale, outer=outer, outer_order="folded", nan="ieee",
                nan_code=0, negative_zero=False, dequantize="ieee",
                deviations=("a block scale may round to 0", NAN_SPREADS),
            )
        )  # fmt: skip
    return made


def _compressed_tensors() -> list[Scheme]:
    """compressed-tensors 0.20, quantization/utils/helpers.py: calculate_qparams; lifecycle/forward.py: quantize, dequantize.

    Everything is computed in the input's dtype, and the scale is kept in it."""
    clips = ("the largest positive value clips",)
    made = []
    for name, element, block, target, deviations in (
        ("int8_channel", "int8", -1, 127.5, clips),
        ("int4_g128", "int4", 128, 7.5, clips),
        ("fp8_channel", "float8_e4m3fn", -1, 448.0, ()),
    ):
        scale = Scale(block=block, target=target, compute="input", floor=("zero", "eps"))
        made.append(
            Scheme(name=f"compressed_tensors.{name}", element=element, scale=scale, apply="divide", arithmetic="input",
                   nan="ieee", negative_zero=False, dequantize="target", deviations=deviations)
        )  # fmt: skip
    return [*made, _compressed_tensors_nvfp4()]


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
        deviations=("a zero block scale is replaced", "a tensor with a NaN or of tiny values has no outer scale"),
    )  # fmt: skip


def conventions() -> list[Scheme]:
    """Every record of another project."""
    made = [
        _torchao_mx(element, mode) for element in MX_ELEMENTS for mode in ("floor", "rceil", "ceil", "even")
    ]
    made += _torchao_fp8("float8_e4m3fn", "") + _torchao_fp8("float8_e5m2", "_e5m2")
    made += _torchao_nvfp4() + _torchao_integers()
    made += [_torchao_tinygemm(group) for group in (32, 64, 128, 256)]
    return [*made, _torchao_nf4(), *_transformer_engine(), *_compressed_tensors()]


__all__ = ["conventions", "mx_name"]
