"""What other projects do, as records: their codes, scales and zero points bit for bit.

Each record names its source and says in `deviations` where it breaks the default rules; those of torchao are in
`reference.schemes.torchao`. The versions are those that the tests compare with: torchao 0.18.0, and Transformer Engine's
and compressed-tensors' published reference code of 2026.
"""

from __future__ import annotations

from dataclasses import replace

from reference.formats.formats import FORMATS
from reference.schemes.default_schemes import default_schemes, mx_scheme
from reference.schemes.schemes import BUILT_IN, RECORDS, SCHEMES, Block, Scale, Scheme, Zero
from reference.schemes.torchao import (
    CLIPS,
    LARGE_16_OVERFLOWS,
    LARGE_OVERFLOWS,
    NAN_SPREADS,
    torchao_conventions,
)


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


__all__ = ["compressed_tensors_input", "conventions", "hqq_scheme", "load_schemes"]
