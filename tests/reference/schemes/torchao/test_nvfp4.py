"""torchao's NVFP4 with one and two levels of scales, against `nvfp4_quantize` and `NVFP4Tensor.dequantize`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

from reference.formats.formats import FORMATS
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.quantize.scales import Scales
from reference.schemes.schemes import scheme_of
from tests.support.bits import as_torch, assert_floats, assert_words, counted_machine, torchao_nan_codes
from tests.support.edge_blocks import Edges, all_blocks, edge_blocks

BLOCK = 16
DTYPES = ("float32", "bfloat16")
ELEMENT = "float4_e2m1fn"


def edges(dtype: str) -> Edges:
    return Edges(ELEMENT, 6.0, BLOCK, dtype)


def their_values(
    codes: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None, out: str
) -> torch.Tensor:
    tensor = NVFP4Tensor(
        pack_uint4(codes), scale.view(torch.float8_e4m3fn), BLOCK, getattr(torch, out), per_tensor_scale=outer
    )
    return tensor.dequantize(getattr(torch, out))


def machine_nans(x: torch.Tensor, scale: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
    """The scaled elements as this machine computes them. Where they are NaN, torchao's integer cast to fp4 keeps their sign
    and payload (the NaN of an e4m3 scale has one); the record writes every NaN as code 3."""
    steps = scale.view(torch.float8_e4m3fn).float()
    factor = 1.0 / steps if outer is None else (1.0 / outer) / steps
    blocks = x.float().reshape(x.shape[0], -1, BLOCK)
    return torch.clamp(blocks * factor.unsqueeze(-1), -6.0, 6.0).reshape(x.shape)


def assert_scales(q: Quantized, scale: torch.Tensor, x: torch.Tensor, outer: torch.Tensor | None) -> None:
    """Equal bytes; 0 / 0 (a zero block of a tensor whose outer scale is 0) has the machine's sign in the NaN byte."""
    largest = x.float().reshape(x.shape[0], -1, BLOCK).abs().amax(-1) / 6.0
    ratio = largest if outer is None else largest / outer
    negative = ratio.isnan() & ratio.signbit()
    assert_words(q.scale | negative.to(torch.uint8) << 7, scale, "scale")


def compare(x: torch.Tensor, outer: torch.Tensor | None, given: bool = False) -> tuple[Quantized, int]:
    """Equal codes, scales and values, NaN codes as explained. Returns the number of codes that differ."""
    scale, data = nvfp4_quantize(x, BLOCK, outer)
    codes = unpack_uint4(data)
    scale = scale.view(torch.uint8)
    name = "torchao.nvfp4_single_level" if outer is None else "torchao.nvfp4"
    q = quantize(x, name, scales=Scales(outer=outer) if given else None)
    assert_scales(q, scale, x, outer)
    scaled = machine_nans(x, scale, outer)
    expected = torch.where(scaled.isnan(), torchao_nan_codes(scaled, FORMATS[ELEMENT]), q.codes)
    assert_words(expected, codes, "codes", x)
    assert (q.codes[scaled.isnan()] == 3).all()
    if outer is not None:
        assert_floats(q.outer, outer, "outer scale")
    for out in DTYPES:
        stored = replace(q, codes=codes, scale=scale)
        assert_floats(
            dequantize(stored, out), their_values(codes, scale, outer, out), f"values in {out}", codes
        )
    return q, int((q.codes != codes).sum())


def two_levels(x: torch.Tensor) -> tuple[Quantized, int]:
    return compare(x, per_tensor_amax_to_scale(x.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_level_on_edges(dtype: str) -> None:
    _, nans = compare(as_torch(all_blocks(edges(dtype)), dtype), None)
    if counted_machine():
        # The elements of NaN blocks other than the NaNs themselves.
        assert nans == 256


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_levels_on_edges(dtype: str) -> None:
    nans = 0
    for family in edge_blocks(edges(dtype)).values():
        tensors = [family, *family[:: max(len(family) // 50, 1)]]
        nans += sum(two_levels(as_torch(part.reshape(-1, BLOCK), dtype))[1] for part in tensors)
    if counted_machine():
        # Tensors with a NaN, and those whose outer scale underflows to 0, become NaN as a whole.
        assert nans == {"float32": 1352, "bfloat16": 596}[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_scales_at_their_floor_and_at_ties(dtype: str) -> None:
    """Block maxima 2**-20 .. 1 of the tensor's, around every e4m3 scale and every midpoint between two."""
    values = FORMATS["float8_e4m3fn"].values
    values = np.unique(np.abs(values[np.isfinite(values)])).astype(np.float64)
    maxima = np.concatenate([values, (values[1:] + values[:-1]) / 2, 2.0 ** np.arange(-12.0, -5)]) * 6
    rng = np.random.default_rng(5)
    for top in (1.0, 3.0, 1 / 3, 2.0**-100, 1.7e38):
        blocks = rng.uniform(-1, 1, (3 * len(maxima), BLOCK)).astype(np.float32)
        near = edges(dtype).exact(maxima * (top / 2688)).view(np.uint32).astype(np.int64)
        near = (near[:, None] + edges(dtype).step * np.arange(-1, 2)).reshape(-1)
        near = np.maximum(near, 0).astype(np.uint32).view(np.float32)
        blocks = edges(dtype).exact(blocks * near[:, None])
        blocks[:, 3] = near
        blocks[0, 0] = edges(dtype).exact(top)
        _, nans = two_levels(as_torch(blocks, dtype))
        assert nans == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_calibrated_outer_scale(dtype: str) -> None:
    x = as_torch(edge_blocks(edges(dtype))["random"], dtype)
    for outer in (1.0, 0.37, 1e-20, 1e20, 2.0**-126):
        compare(x, torch.tensor(outer), given=True)


def test_every_code_with_every_scale() -> None:
    codes = (torch.arange(256, dtype=torch.uint8) % 16).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 256 // BLOCK)
    for outer in (None, torch.tensor(0.37), torch.tensor(3e37), torch.tensor(1e-44)):
        name = "torchao.nvfp4_single_level" if outer is None else "torchao.nvfp4"
        q = Quantized(codes, scale, outer, None, (256, 256), 1, scheme_of(name))
        for out in DTYPES:
            assert_floats(
                dequantize(q, out), their_values(codes, scale, outer, out), f"values in {out}", codes
            )
