"""compressed-tensors' scales and codes, against its own `calculate_qparams`, `generate_gparam`, `quantize`, `dequantize`.

Release 0.20: older ones compute other bits.

The asymmetric mapping has no record: it rounds qmin - min / s as a whole, with s before it is kept from being zero.
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
from compressed_tensors.quantization.utils.helpers import (
    calculate_qparams,
    calculate_range,
    generate_gparam,
)

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
    scaled = torch.clamp((x / scale).add_(zero.to(x.dtype)), *calculate_range(case.args, "cpu"))
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
