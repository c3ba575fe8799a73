"""torchao's affine integers in their mappings, and tinygemm's float zero point, against `quant_primitives`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchao.quantization.quant_primitives import (
    MappingType,
    _choose_qparams_affine_tinygemm,
    _dequantize_affine_tinygemm,
    _quantize_affine_tinygemm,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)

from reference.quantize.quantize import dequantize, quantize
from reference.schemes.schemes import Scheme, scheme_of
from tests.support.bits import as_torch, assert_floats, assert_words
from tests.support.edge_blocks import Edges, all_blocks

DTYPES = ("float32", "bfloat16")
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


def compare(
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
        compare(edges_of(scheme, dtype), scheme, MAPPINGS[mapping], 32, eps)
    compare(edges_of(scheme, "bfloat16"), bfloat16_variant(scheme), MAPPINGS[mapping], 32, eps)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("bits", [3, 8])
def test_every_finite_float16(bits: int, mapping: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = np.random.default_rng(9).permutation(values[np.isfinite(values)])
    for x in (values, np.sort(values)):
        groups = torch.from_numpy(x.reshape(-1, 32).copy())
        scheme = scheme_of(f"torchao.int{bits}_g32{mapping}")
        compare(groups, scheme, MAPPINGS[mapping], 32, EPS if bits == 8 else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_rows_and_tokens(mapping: str, dtype: str) -> None:
    scheme = scheme_of(f"torchao.int8_rowwise{mapping}")
    compare(edges_of(scheme, dtype, 48), scheme, MAPPINGS[mapping], -1, EPS)


def test_one_sided_blocks() -> None:
    """Blocks that do not hold zero: the asymmetric range is widened to it, and half of the symmetric codes stay unused."""
    x = 1 + torch.rand(64, 32, generator=torch.Generator().manual_seed(4))
    for mapping, theirs in MAPPINGS.items():
        for sign in (1, -1):
            compare(sign * x, scheme_of(f"torchao.int4_g32{mapping}"), theirs, 32)


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
