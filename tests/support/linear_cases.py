"""Weights and inputs of `linear` whose products are exact in float32 in any order, and products with all their digits."""

from __future__ import annotations

from typing import Any

import torch

import fast
import reference
from reference import Quantized, Scales
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import Scheme

#: Half a unit in the last place, relative.
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
#: Patterns of 1/2, 1 and 2 in the dtypes that scales are kept in.
POWERS = {
    "float32": [0.5, 1.0, 2.0],
    "bfloat16": [0x3F00, 0x3F80, 0x4000],
    "float16": [0x3800, 0x3C00, 0x4000],
    "float8_e8m0fnu": [126, 127, 128],
    "float8_e4m3fn": [0x30, 0x38, 0x40],
}


def generator(seed: int) -> torch.Generator:
    """Numbers of the host, the same for every device."""
    return torch.Generator().manual_seed(seed)


def integers(low: int, high: int, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random integers from low to high, as float32."""
    return torch.randint(low, high + 1, shape, generator=generator(seed)).to(torch.float32)


def exact_weight(scheme: Scheme, rows: int, length: int, seed: int = 0) -> Quantized:
    """Small integers (for mxint8, sixteenths) times powers of two, which the scheme holds exactly, in given scales."""
    if scheme.element == "nf4":
        return exact_levels(scheme, rows, length, seed)
    blocks = Blocks.of((rows, length), scheme.scale, 1)
    drawn = torch.randint(0, 3, blocks.scale_shape, generator=generator(seed + 1))
    powers = torch.tensor(POWERS[scheme.scale.storage])
    words = {"float32": torch.float32, "bfloat16": torch.uint16, "float16": torch.uint16}
    dtype = words.get(scheme.scale.storage, torch.uint8)
    scale = powers.to(dtype)[drawn] if dtype != torch.uint16 else powers.to(torch.int32)[drawn].to(dtype)
    zero = None
    if scheme.zero is not None:
        zero = torch.randint(-1, 2, blocks.scale_shape, generator=generator(seed + 2)).to(torch.int8)
        if scheme.zero.rule == "value":
            zero = zero.to(torch.bfloat16).view(torch.uint16)
    outer = None if scheme.outer is None else torch.tensor(2.0)
    most = {2: 1, 3: 3, 4: 6, 5: 12, 6: 7}.get(scheme.format.bits, 100)
    dense = integers(-most, most, (rows, length), seed)
    if scheme.element == "mxint8":
        dense = integers(-24, 24, (rows, length), seed) / 16
    return fast.quantize(dense, scheme, scales=Scales(scale, outer, zero), packed=scheme.format.bits < 8)


def exact_levels(scheme: Scheme, rows: int, length: int, seed: int = 0) -> Quantized:
    """NF4 of its levels -1, 0 and 1, under scales 1, 2 and 4: codes by outer scales 1 and 2, about a mean of 1."""
    draw, blocks = generator(seed), rows * length // 64
    codes = torch.tensor([0, 7, 15], dtype=torch.uint8)[torch.randint(0, 3, (rows, length), generator=draw)]
    outer = 1.0 + torch.arange(-(-blocks // 256)) % 2
    scale = torch.tensor([0, 1, 3])[torch.randint(0, 3, (blocks,), generator=draw)]
    scale = (scale * outer.repeat_interleave(256)[:blocks]).to(torch.int8)
    packed = fast.pack(codes, scheme.format)
    return Quantized(packed, scale, outer, torch.tensor(1.0), (rows, length), 1, scheme, packed=True)


def exact_inputs(rows: int, length: int, dtype: torch.dtype, seed: int = 5) -> torch.Tensor:
    """-1, 0 and 1."""
    return integers(-1, 1, (rows, length), seed).to(dtype)


def exact_result(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """The product where float64 holds all sums: rounded once to x's dtype."""
    result = x.double() @ fast.dequantize(w).double().t()
    result = result if bias is None else result + bias.double()
    narrow = result.to(torch.float32)
    if not torch.equal(narrow.double(), result):
        raise ValueError("the sums of this case are not exact in float32")
    return narrow.to(x.dtype)


def distance_allowed(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and how far from it `reference.linear_error_bound` lets a kernel be."""
    truth = x.double() @ fast.dequantize(w).double().t() + (0.0 if bias is None else bias.double())
    allowed: Any = reference.linear_error_bound(x, w, bias)
    return truth, allowed


def weight(scheme: Scheme, rows: int, length: int, seed: int = 0) -> Quantized:
    """Random weights whose rows differ by powers of two."""
    dense = (
        torch.randn(rows, length, generator=generator(seed)) * 2.0 ** (3 * torch.arange(rows) % 7)[:, None]
    )
    return fast.quantize(dense, scheme, packed=scheme.format.bits < 8)


def inputs(rows: int, length: int, dtype: torch.dtype, seed: int = 7) -> torch.Tensor:
    """Random inputs."""
    return torch.randn(rows, length, generator=generator(seed)).to(dtype)


def outside(got: Any, x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> int:
    """How many results are farther away than allowed."""
    truth, allowed = distance_allowed(x, w, bias)
    return int((~((got.double() - truth).abs() <= allowed)).sum())
