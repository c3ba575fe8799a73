"""compressed-tensors' scales and codes, against its own `calculate_qparams`, `generate_gparam`, `quantize`, `dequantize`.

Release 0.20: older ones compute other bits.

The asymmetric mapping has no record: it rounds qmin - min / s as a whole, with s before it is kept from being zero.

Transformer Engine's NVFP4 (1x16 and 16x16 blocks). Its package needs CUDA, so the rule is restated here in torch's float32
operations, from the published text of its reference quantizer (transformer_engine/pytorch/custom_recipes/
quantization_ref_nvfp4.py, commit 0a6e0d6a, `NVFP4QuantizerRef._quantize_blockwise_reference`, without powers of two, rows or
four-over-six):

* G = min(2688 / amax, largest float32), 1 where that is 0; the multiplier of block maxima is G * (1 / 6).
* The block scale is e4m3(min(a * multiplier, largest float32) clamped to 448).
* x is multiplied by min(1 / (scale * (1 / G)), largest float32), clamped to 6 and rounded to nearest even. What compares as
  zero or as nothing (-0 and NaN) becomes code 0; small negative numbers become 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization.lifecycle.forward import dequantize as their_dequantize
from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
from compressed_tensors.quantization.quant_args import QuantizationArgs
from compressed_tensors.quantization.utils.helpers import calculate_qparams, calculate_range, generate_gparam

from reference.formats.formats import FORMATS
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.schemes.schemes import scheme_of
from tests.support.bits import as_torch, assert_floats, assert_words
from tests.support.edge_blocks import Edges, all_blocks, edge_blocks

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Case:
    """A record and the arguments that ask compressed-tensors for it."""

    name: str
    size: int
    stored: torch.dtype
    arguments: tuple[tuple[str, Any], ...]

    @property
    def args(self) -> QuantizationArgs:
        return QuantizationArgs(symmetric=True, **dict(self.arguments))


CASES = {
    case.name: case
    for case in (
        Case("int8_channel", 32, torch.int8, (("num_bits", 8), ("type", "int"), ("strategy", "channel"))),
        Case("int4_g128", 128, torch.int8,
             (("num_bits", 4), ("type", "int"), ("strategy", "group"), ("group_size", 128))),
        Case("fp8_channel", 32, torch.float8_e4m3fn, (("num_bits", 8), ("type", "float"), ("strategy", "channel"))),
    )
}  # fmt: skip
NVFP4 = QuantizationArgs(
    num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True, scale_dtype=torch.float8_e4m3fn,
    zp_dtype=torch.float8_e4m3fn,
)  # fmt: skip


def edges(case: Case, dtype: str, specials: bool = True) -> torch.Tensor:
    scheme = scheme_of(f"compressed_tensors.{case.name}")
    return as_torch(all_blocks(Edges(scheme.element, scheme.scale.target, case.size, dtype), specials), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_single_level(name: str, dtype: str) -> None:
    case = CASES[name]
    x = edges(case, dtype)
    scale, zero = calculate_qparams(x.amin(1, keepdim=True), x.amax(1, keepdim=True), case.args)
    stored = their_quantize(x, scale, zero, case.args, dtype=case.stored)
    q = quantize(x, f"compressed_tensors.{name}")
    assert_floats(q.scale, scale.float(), "scale")
    bits = dict(case.arguments)["num_bits"]
    ours, theirs = q.codes & ((1 << bits) - 1), stored.view(torch.uint8) & ((1 << bits) - 1)
    # As in torchao's FP8 tests: a NaN code keeps the sign of the NaN that the machine made, after its way through x's dtype.
    scaled = torch.clamp((x / scale).add_(zero.to(x.dtype)), *calculate_range(case.args, "cpu"))
    scaled = scaled.to(case.stored).to(x.dtype)
    negative = scaled.isnan() & scaled.signbit()
    assert_words(ours | negative.to(torch.uint8) << 7, theirs, "codes", x)
    values = their_dequantize(stored, scale, zero, case.args)
    assert_floats(dequantize(q, dtype), values, "values", ours)


def their_codes(values: torch.Tensor) -> torch.Tensor:
    """compressed-tensors gives the rounded values; NaN has no fp4 code, the record writes 0."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    code = torch.searchsorted(table, values.float().abs().nan_to_num(nan=0.0))
    return torch.where(values.isnan(), 0, code + 8 * values.signbit()).to(torch.uint8)


def compare_nvfp4(x: torch.Tensor) -> Quantized:
    blocks = x.reshape(x.shape[0], -1, 16)
    outer = generate_gparam(x.min(), x.max())
    scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), NVFP4, global_scale=outer)
    rounded = their_quantize(x, scale, zero.float(), NVFP4, global_scale=outer)
    q = quantize(x, "compressed_tensors.nvfp4")
    assert_floats(q.outer, outer, "outer scale")
    stored = scale.to(torch.float8_e4m3fn).view(torch.uint8)
    assert_words(q.scale & 0x7F, stored & 0x7F, "scale")
    assert not ((q.scale != stored) & ~scale.isnan()).any()
    assert_words(q.codes, their_codes(rounded), "codes", x)
    values = their_dequantize(rounded, scale, zero.float(), NVFP4, global_scale=outer)
    assert_floats(dequantize(q, str(values.dtype).removeprefix("torch.")), values, "values", x)
    return q


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4(dtype: str) -> None:
    for family in edge_blocks(Edges("float4_e2m1fn", 6.0, 16, dtype)).values():
        for part in [family, *family[:: max(len(family) // 40, 1)]]:
            compare_nvfp4(as_torch(part.reshape(-1, 16), dtype))


def test_a_tensor_that_is_tiny_or_holds_a_nan_has_no_outer_scale() -> None:
    for value in (0.0, 1e-37, np.nan):
        x = torch.full((2, 16), value)
        x[1] = 1e-38
        assert compare_nvfp4(x).outer == 1.0


BLOCK = 16
LARGEST = torch.tensor(torch.finfo(torch.float32).max)
E2M1 = torch.tensor(FORMATS["float4_e2m1fn"].values)


def global_scale(x: torch.Tensor) -> torch.Tensor:
    """The encoding scale of the whole tensor."""
    scale = torch.minimum(torch.tensor(448.0) * torch.tensor(6.0) / x.abs().max().float(), LARGEST)
    return torch.where(scale == 0, torch.tensor(1.0), scale)


def block_maxima(x: torch.Tensor, rows: int) -> torch.Tensor:
    """(rows of blocks, blocks, 1)."""
    tiles = x.float().abs().reshape(x.shape[0] // rows, rows, -1, BLOCK)
    return tiles.amax((1, 3))[..., None]


def fp4_code(x: torch.Tensor) -> torch.Tensor:
    """Codes by counting thresholds: a value at a midpoint belongs to the even neighbour, above or below."""
    above = torch.tensor([0.25, 1.25, 2.5, 5.0])
    from_here = torch.tensor([0.75, 1.75, 3.5])
    magnitude = x.abs()[..., None]
    code = (magnitude > above).sum(-1) + (magnitude >= from_here).sum(-1)
    return (code + 8 * (x < 0)).to(torch.uint8)


def transformer_engine(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, e4m3 scale, encoding scale of the tensor)."""
    encode = global_scale(x)
    multiplier = encode * torch.reciprocal(torch.tensor(6.0))
    scale = torch.minimum(block_maxima(x, rows) * multiplier, LARGEST)
    scale = torch.clamp(scale, -448.0, 448.0).to(torch.float8_e4m3fn)
    step = torch.minimum(1.0 / (scale.float() * (1.0 / encode)), LARGEST)
    step = step.repeat_interleave(rows, 0)
    scaled = torch.clamp(x.float().reshape(x.shape[0], -1, BLOCK) * step, -6.0, 6.0)
    return fp4_code(scaled).reshape(x.shape), scale[..., 0].view(torch.uint8), encode


def values_of(codes: torch.Tensor, scale: torch.Tensor, encode: torch.Tensor, rows: int) -> torch.Tensor:
    """Codes times (block scale times the decoding scale of the tensor), in float32."""
    step = (scale.view(torch.float8_e4m3fn).float() * (1.0 / encode)).repeat_interleave(rows, 0)
    return (E2M1[codes.long()].reshape(codes.shape[0], -1, BLOCK) * step[..., None]).reshape(codes.shape)


def compare(x: torch.Tensor, rows: int) -> Quantized:
    codes, scale, encode = transformer_engine(x, rows)
    q = quantize(x, "te.nvfp4" if rows == 1 else "te.nvfp4_16x16")
    assert_floats(q.outer, encode, "encoding scale")
    nan = scale.view(torch.float8_e4m3fn).isnan()
    assert_words(q.scale & 0x7F, scale & 0x7F, "scale")
    assert not ((q.scale != scale) & ~nan).any()
    assert_words(q.codes, codes, "codes", x)
    values = values_of(codes, scale, encode, rows)
    for out in DTYPES:
        assert_floats(dequantize(q, out), values.to(getattr(torch, out)), f"values in {out}", codes)
    return q


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 16])
def test_edges(rows: int, dtype: str) -> None:
    for family in edge_blocks(Edges("float4_e2m1fn", 6.0, BLOCK * rows, dtype)).values():
        tiles = family.reshape(len(family), rows, BLOCK)
        compare(as_torch(tiles.reshape(-1, BLOCK), dtype), rows)
        for tile in tiles[:: max(len(tiles) // 40, 1)]:
            compare(as_torch(tile, dtype), rows)


@pytest.mark.parametrize("rows", [1, 16])
def test_many_columns(rows: int) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(6)) * 3
    assert compare(x, rows).scale.shape == (64 // rows, 6)
