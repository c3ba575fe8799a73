"""torchao's FP8 conventions, training and inference, and its affine integers, tinygemm's too, against the installed torchao."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _choose_scale_float8,
    _dequantize_affine_float8,
    _dequantize_affine_tinygemm,
    _quantize_affine_float8,
    _quantize_affine_tinygemm,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from reference.formats.formats import FORMATS
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.schemes.schemes import Scheme, scheme_of
from tests.support.bits import as_torch, assert_floats, assert_words, counted_machine
from tests.support.edge_blocks import Edges, all_blocks, edge_blocks

SIZE = 32
DTYPES = ("float32", "bfloat16")
ELEMENTS = {"float8_e4m3fn": "", "float8_e5m2": "_e5m2"}
VARIANTS = ("training", "training_pow2", "inference")


def record(element: str, variant: str, granularity: str) -> Scheme:
    return scheme_of(f"torchao.fp8_{granularity}_{variant}{ELEMENTS[element]}")


def train(
    x: torch.Tensor, element: str, variant: str, axis: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, values in the dtype that torchao gives) of the training cast."""
    result = hp_tensor_to_float8_dynamic(
        x,
        getattr(torch, element),
        LinearMMConfig(),
        scaling_granularity=ScalingGranularity.TENSORWISE if axis is None else ScalingGranularity.AXISWISE,
        axiswise_dim=axis,
        round_scales_to_power_of_2=variant.endswith("pow2"),
    )
    return result._data.view(torch.uint8), result._scale, result.to_original_precision()


def infer(x: torch.Tensor, element: str, axis: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, values in x's dtype) of the inference cast."""
    block = list(x.shape) if axis is None else [1 if i != axis % x.ndim else n for i, n in enumerate(x.shape)]
    scale = _choose_scale_float8(x, block, getattr(torch, element))
    stored = _quantize_affine_float8(x, scale, getattr(torch, element))
    return stored.view(torch.uint8), scale, _dequantize_affine_float8(stored, scale, x.dtype)


def negative_nans(x: torch.Tensor, scale: torch.Tensor, variant: str) -> torch.Tensor:
    """Elements whose scaled value is a NaN with its sign set, as this machine computes it. torchao writes that sign into the
    code, the record writes every NaN as 0x7f. IEEE 754 leaves the sign open: inf / inf, inf * 0 and the 0 / 0 of a zero block
    in the inference convention are negative on x86 and positive on ARM, and of two NaNs either may survive."""
    scaled = x.float() / scale if variant == "inference" else x.float() * scale
    return scaled.isnan() & scaled.signbit()


def compare(x: torch.Tensor, element: str, variant: str, axis: int | None) -> tuple[Quantized, int]:
    """Equal codes, scales and values; the sign of NaN codes as explained. Returns the number of those."""
    scheme = record(element, variant, "tensorwise" if axis is None else "rowwise")
    codes, scale, values = (
        infer(x, element, axis) if variant == "inference" else train(x, element, variant, axis)
    )
    q = quantize(x, scheme, axis=-1 if axis is None else axis)
    assert_floats(q.scale, scale, "scale")
    negative = negative_nans(x, scale, variant)
    assert not (q.codes[negative] != 0x7F).any()
    assert_words(q.codes | negative.to(torch.uint8) << 7, codes, "codes", x)
    outputs = DTYPES if variant == "inference" else [str(values.dtype).removeprefix("torch.")]
    for out in outputs:
        if variant == "inference":
            values = _dequantize_affine_float8(
                codes.view(getattr(torch, element)), scale, getattr(torch, out)
            )
        assert_floats(dequantize(q, out), values, f"values in {out}", codes)
    return q, int(negative.sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_rows_on_edges(element: str, variant: str, dtype: str) -> None:
    blocks = all_blocks(Edges(element, FORMATS[element].max, SIZE, dtype))
    _, signs = compare(as_torch(blocks, dtype), element, variant, -1)
    if counted_machine():
        assert signs == SIGNS[variant, element, dtype]


# Training: inf * 0. Inference: also every element of a block whose maximum / 448 (57344) underflows to 0, and -NaN / NaN.
SIGNS = dict.fromkeys([(v, e, d) for v in VARIANTS[:2] for e in ELEMENTS for d in DTYPES], 76)
SIGNS |= {
    ("inference", "float8_e4m3fn", "float32"): 1432,
    ("inference", "float8_e4m3fn", "bfloat16"): 1761,
    ("inference", "float8_e5m2", "float32"): 1290,
    ("inference", "float8_e5m2", "bfloat16"): 2080,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("element", ELEMENTS)
def test_tensors_on_edges(element: str, variant: str, dtype: str) -> None:
    blocks = edge_blocks(Edges(element, FORMATS[element].max, SIZE, dtype), specials=False)
    for family in blocks.values():
        compare(as_torch(family, dtype), element, variant, None)
        for row in family[:: max(len(family) // 24, 1)]:
            compare(as_torch(row.reshape(4, 8), dtype), element, variant, None)


@pytest.mark.parametrize("variant", VARIANTS)
def test_nan_and_infinity_in_a_tensor(variant: str) -> None:
    special = edge_blocks(Edges("float8_e4m3fn", 448.0, SIZE))["special"]
    for row in special:
        x = as_torch(row, "float32")
        compare(x, "float8_e4m3fn", variant, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_columns(variant: str, dtype: str) -> None:
    x = torch.randn(48, 33, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    q, _ = compare(x, "float8_e4m3fn", variant, 0)
    assert q.scale.shape == (1, 33)


def test_every_code_with_scales_of_every_binade() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(556, 1)
    steps = np.random.default_rng(3).integers(0, 1 << 23, (2, 278))
    scale = torch.from_numpy(
        ((np.arange(278) % 256 << 23) + steps).reshape(-1, 1).astype(np.uint32).view(np.float32)
    )
    for element in ELEMENTS:
        stored = codes.view(getattr(torch, element))
        inference = Quantized(
            codes, scale, None, None, (556, 256), 1, record(element, "inference", "rowwise")
        )
        training = replace(inference, scheme=record(element, "training", "rowwise"))
        for out in DTYPES:
            values = _dequantize_affine_float8(stored, scale, getattr(torch, out))
            assert_floats(dequantize(inference, out), values, f"product in {out}", codes)
        assert_floats(dequantize(training), stored.to(torch.float32) / scale, "quotient", codes)


def test_inference_rounds_bfloat16_scales_and_leaves_zero_rows_without_one() -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    q, _ = compare(x, "float8_e4m3fn", "inference", -1)
    assert torch.equal(q.scale, q.scale.to(torch.bfloat16).to(torch.float32))
    assert dequantize(quantize(torch.zeros(2, 8), "torchao.fp8_rowwise_inference")).isnan().all()
    assert not dequantize(quantize(torch.zeros(2, 8), "fp8_rowwise")).any()


# torchao's affine integers in their mappings, and tinygemm's float zero point, against `quant_primitives`.

BITS = (2, 3, 4, 5, 6, 8)
MAPPINGS = {
    "": MappingType.SYMMETRIC,
    "_no_clipping": MappingType.SYMMETRIC_NO_CLIPPING_ERR,
    "_asymmetric": MappingType.ASYMMETRIC,
}
# The smallest scale of torchao's Int8Tensor: float32's epsilon.
EPS = 2.0**-23


def bfloat16_variant(scheme: Scheme) -> Scheme:
    """torchao without scale_dtype on bfloat16 input: scales are kept, and elements computed, in bfloat16."""
    return replace(scheme, arithmetic="input", scale=replace(scheme.scale, storage="bfloat16"))


def element_bounds(bits: int) -> tuple[torch.dtype, int, int]:
    return torch.int8, -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def integer_compare(
    x: torch.Tensor, scheme: Scheme, mapping: MappingType, block: int, eps: float | None = None
) -> None:
    """Equal codes, scales, zero points and values."""
    bits = scheme.format.bits
    dtype, low, high = element_bounds(bits)
    kept = getattr(torch, scheme.scale.storage)
    shape = (1, x.shape[1] if block == -1 else block)
    scale, zero = choose_qparams_affine(
        x, mapping, shape, dtype, low, high, eps, kept, torch.int8, keepdim=True
    )
    codes = quantize_affine(x, shape, scale, zero, dtype, low, high)
    q = quantize(x, scheme)
    assert_floats(q.scale.view(torch.bfloat16) if kept is torch.bfloat16 else q.scale, scale, "scale")
    assert_words(torch.zeros_like(zero) if q.zero is None else q.zero, zero, "zero")
    assert_words(q.codes & ((1 << bits) - 1), codes.view(torch.uint8) & ((1 << bits) - 1), "codes", x)
    for out in DTYPES:
        values = dequantize_affine(
            codes, shape, scale, zero, dtype, low, high, output_dtype=getattr(torch, out)
        )
        assert_floats(dequantize(q, out), values, f"values in {out}", codes)


def edges_of(scheme: Scheme, dtype: str, size: int = 32) -> torch.Tensor:
    return as_torch(all_blocks(Edges(scheme.element, scheme.scale.target, size, dtype)), dtype)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", BITS)
def test_groups_on_edges(bits: int, mapping: str) -> None:
    """NaN and infinity included: quantize_affine converts a NaN to int8, which C leaves undefined and every CPU makes 0."""
    scheme = scheme_of(f"torchao.int{bits}_g32{mapping}")
    eps = EPS if bits == 8 else None
    for dtype in DTYPES:
        integer_compare(edges_of(scheme, dtype), scheme, MAPPINGS[mapping], 32, eps)
    integer_compare(edges_of(scheme, "bfloat16"), bfloat16_variant(scheme), MAPPINGS[mapping], 32, eps)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", [3, 8])
def test_every_finite_float16(bits: int, mapping: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = np.random.default_rng(9).permutation(values[np.isfinite(values)])
    for x in (values, np.sort(values)):
        groups = torch.from_numpy(x.reshape(-1, 32).copy())
        scheme = scheme_of(f"torchao.int{bits}_g32{mapping}")
        integer_compare(groups, scheme, MAPPINGS[mapping], 32, EPS if bits == 8 else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_rows_and_tokens(mapping: str, dtype: str) -> None:
    scheme = scheme_of(f"torchao.int8_rowwise{mapping}")
    integer_compare(edges_of(scheme, dtype, 48), scheme, MAPPINGS[mapping], -1, EPS)


def test_one_sided_blocks() -> None:
    """Blocks that do not hold zero: the asymmetric range is widened to it, and half of the symmetric codes stay unused."""
    x = 1 + torch.rand(64, 32, generator=torch.Generator().manual_seed(4))
    for mapping, theirs in MAPPINGS.items():
        for sign in (1, -1):
            integer_compare(sign * x, scheme_of(f"torchao.int4_g32{mapping}"), theirs, 32)


def compare_tinygemm(x: torch.Tensor, scheme: Scheme, outputs: tuple[str, ...]) -> None:
    """Equal codes, scales, zero values and values of the float zero point."""
    block = (1, scheme.scale.block)
    kept = x.dtype
    scale, zero = _choose_qparams_affine_tinygemm(
        x, MappingType.ASYMMETRIC, block, torch.int32, 0, 15, scale_dtype=kept, zero_point_dtype=kept
    )
    codes = _quantize_affine_tinygemm(x, block, scale, zero, torch.int32, 0, 15)
    q = quantize(x, scheme)
    assert_floats(q.scale.view(kept), scale, "scale")
    assert_floats(q.zero.view(kept), zero, "zero")
    assert_words(q.codes, codes.to(torch.uint8), "codes", x)
    for out in outputs:
        values = _dequantize_affine_tinygemm(
            codes, block, scale, zero, torch.int32, 0, 15, output_dtype=getattr(torch, out)
        )
        assert_floats(dequantize(q, out), values, f"values in {out}", codes)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_tinygemm(group: int) -> None:
    """The kernel takes bfloat16 only, and that is the record; float32 is the same record with float32 kept."""
    scheme = scheme_of(f"torchao.int4_g{group}_tinygemm")
    compare_tinygemm(edges_of(scheme, "bfloat16", group), scheme, DTYPES)
    wide = replace(
        scheme, scale=replace(scheme.scale, storage="float32"), zero=replace(scheme.zero, storage="float32")
    )
    compare_tinygemm(edges_of(scheme, "float32", group), wide, ("float32",))
