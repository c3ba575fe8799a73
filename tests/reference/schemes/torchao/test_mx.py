"""torchao's MX formats: five elements in four scale modes, against `to_mx` and `to_dtype` of the installed torchao."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from torchao.float8.float8_utils import _round_scale_down_to_power_of_2
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

from reference.arrays.namespace import namespace_of
from reference.arrays.softfloat import ceil_log2_float32, floor_log2_float32
from reference.formats.formats import FORMATS
from reference.quantize.quantize import Quantized, dequantize, quantize
from reference.schemes.schemes import MX_ELEMENTS, mx_name, scheme_of
from tests.support.bits import as_torch, assert_codes, assert_floats, assert_words, torchao_nan_codes, words
from tests.support.edge_blocks import Edges, Floats, all_blocks

BLOCK = 32
MODES = ("floor", "rceil", "ceil", "even")
DTYPES = ("float32", "bfloat16")
THEIRS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "float6_e2m3fn": DTYPE_FP6_E2M3,
    "float6_e3m2fn": DTYPE_FP6_E3M2,
    "float4_e2m1fn": torch.float4_e2m1fn_x2,
}


def scheme_name(element: str, mode: str) -> str:
    return f"torchao.{mx_name(element)}_{mode}"


def theirs(x: torch.Tensor, element: str, mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(scale, stored data, one code per element)."""
    scale, data = to_mx(x, THEIRS[element], BLOCK, ScaleCalculationMode[mode.upper()])
    codes = unpack_uint4(data) if element == "float4_e2m1fn" else data.view(torch.uint8)
    return scale, data, codes


def in_nan_blocks(x: Floats, scale: np.ndarray) -> np.ndarray:
    """NaNs and infinities in a block with a NaN. In three modes torchao divides by an infinite scale, and inf / inf is a NaN
    with the machine's sign; RCEIL multiplies by NaN, and the machine says which NaN's sign survives. Both write that sign
    into the code. The record writes the NaN that arithmetic makes without a sign."""
    return ~np.isfinite(x) & (scale.reshape(-1, 1) == 255)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_codes_scales_and_values_on_edges(element: str, mode: str, dtype: str) -> None:
    blocks = all_blocks(Edges(element, FORMATS[element].max, BLOCK, dtype))
    x = as_torch(blocks, dtype)
    scale, data, codes = theirs(x, element, mode)
    q = quantize(x, scheme_name(element, mode))
    assert_words(q.scale, scale, "scale")
    # Three blocks with NaN and inf, three with -NaN and -inf.
    count = 0 if mode == "rceil" else 6
    machine = in_nan_blocks(blocks, words(scale))
    assert_codes(q.codes, codes, "codes", x, FORMATS[element].sign_mask, machine, count)
    for out in DTYPES:
        values = to_dtype(data, scale, THEIRS[element], BLOCK, getattr(torch, out))
        assert_floats(dequantize(q, out), values, f"values in {out}", codes)


@lru_cache(maxsize=1)
def every_bfloat16_maximum() -> Floats:
    """A block for every finite or infinite positive bfloat16 as its largest magnitude."""
    rng = np.random.default_rng(11)
    maxima = (np.arange(0x7F81, dtype=np.uint32) << 16).view(np.float32)[:, None]
    fractions = rng.uniform(-1, 1, (len(maxima), BLOCK)) * np.exp2(rng.integers(-6, 1, (len(maxima), BLOCK)))
    fractions[:, :4] = [-1, 1, 0.5, 0]
    with np.errstate(invalid="ignore"):
        products = (maxima * fractions).astype(np.float32)
    blocks = (
        np.nan_to_num(products, nan=0.0, posinf=np.inf, neginf=-np.inf).view(np.uint32) & 0xFFFF0000
    ).view(np.float32)
    blocks.setflags(write=False)
    return blocks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_every_bfloat16_block_maximum(element: str, mode: str) -> None:
    x = as_torch(every_bfloat16_maximum(), "bfloat16")
    scale, _, codes = theirs(x, element, mode)
    q = quantize(x, scheme_name(element, mode))
    assert_words(q.scale, scale, "scale")
    assert_words(q.codes, codes, "codes", x)


@pytest.mark.parametrize("out", DTYPES)
@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_every_code_with_every_scale(element: str, out: str) -> None:
    bits = FORMATS[element].bits
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1) & ((1 << bits) - 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 256 // BLOCK)
    data = pack_uint4(codes) if bits == 4 else codes
    data = data if bits < 8 else data.view(THEIRS[element])
    values = to_dtype(data, scale.view(torch.float8_e8m0fnu), THEIRS[element], BLOCK, getattr(torch, out))
    q = Quantized(codes, scale, None, None, (256, 256), 1, scheme_of(scheme_name(element, "floor")))
    assert_floats(dequantize(q, out), values, f"values in {out}", codes)


def around_powers_of_two(steps: int) -> Floats:
    """Every positive float32 within `steps` of a power of two."""
    powers = np.exp2(np.arange(-149.0, 128.0)).astype(np.float32).view(np.uint32).astype(np.int64)
    near = np.unique(powers[:, None] + np.arange(-steps, steps + 1))
    return near[(near > 0) & (near < 0x7F800000)].astype(np.uint32).view(np.float32)


def test_powers_of_two_through_a_float32_logarithm() -> None:
    x = around_powers_of_two(64)
    ns, bits = namespace_of(x), x.view(np.int32)
    floor = floor_log2_float32(ns, bits)
    assert_words(floor, _round_scale_down_to_power_of_2(torch.from_numpy(x)), "exp2(floor(log2(x)))", x)
    ceiling = ceil_log2_float32(ns, bits)
    assert_words(ceiling, torch.ceil(torch.log2(torch.from_numpy(x))).to(torch.int32), "ceil(log2(x))", x)
    # So many of these 34,892 results are not the true power of two: the logarithm rounds to an integer first.
    fraction, exponent = np.frexp(x.astype(np.float64))
    assert (floor.view(np.float32) != np.ldexp(1.0, exponent - 1)).sum() == 7412
    assert (ceiling != exponent - (fraction == 0.5)).sum() == 3700


@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_payload_of_a_nan_reaches_fp6_and_fp4_codes(element: str) -> None:
    """torchao's fp6 and fp4 casts have no NaN and round its payload. The record has the code of the quiet NaN without payload;
    fp8 has a true NaN."""
    payloads = np.arange(0x7F81, 0x8000, dtype=np.uint32) << 16
    blocks = np.zeros((2 * len(payloads), BLOCK), np.uint32)
    blocks[:, 5] = np.concatenate([payloads, payloads | 0x80000000])
    x = as_torch(blocks.view(np.float32), "bfloat16")
    _, _, codes = theirs(x, element, "floor")
    ours = quantize(x, scheme_name(element, "floor")).codes
    different = ours != codes
    assert different.sum() == different[:, 5].sum() == PAYLOADS[element]
    if FORMATS[element].bits < 8:
        quiet = torch.from_numpy((blocks[:, 5] | 0x400000).view(np.float32))
        assert_words(codes[:, 5], torchao_nan_codes(quiet, FORMATS[element]), "code of a NaN", quiet)


# Of 254 patterns.
PAYLOADS = {
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "float6_e2m3fn": 220,
    "float6_e3m2fn": 188,
    "float4_e2m1fn": 128,
}
