"""Transformer Engine's NVFP4 (1x16 and 16x16 blocks). Its package needs CUDA, so the rule is restated here in torch's float32
operations, from the published text of its reference quantizer (transformer_engine/pytorch/custom_recipes/
quantization_ref_nvfp4.py, commit 0a6e0d6a, `NVFP4QuantizerRef._quantize_blockwise_reference`, without powers of two, rows or
four-over-six):

* G = min(2688 / amax, largest float32), 1 where that is 0; the multiplier of block maxima is G * (1 / 6).
* The block scale is e4m3(min(a * multiplier, largest float32) clamped to 448).
* x is multiplied by min(1 / (scale * (1 / G)), largest float32), clamped to 6 and rounded to nearest even. What compares as
  zero or as nothing (-0 and NaN) becomes code 0; small negative numbers become 8.
"""

from __future__ import annotations

import pytest
import torch

from reference.formats.formats import FORMATS
from reference.quantize.quantize import Quantized, dequantize, quantize
from tests.support.bits import as_torch, assert_floats, assert_words
from tests.support.edge_blocks import Edges, edge_blocks

BLOCK = 16
DTYPES = ("float32", "bfloat16")
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
