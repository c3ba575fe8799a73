"""Scales of blocks that are multiplied into 16-bit elements without rounding, as the product of few rows stores them.

A power of two times e2m1 or e4m3, and an e4m3 scale times e2m1, have at most 8 significant bits: bfloat16 holds them. So these
scales are factors of the decoded weight and not of the sums, and take 2 bytes of a product's reading:

    int32 (1 + K / block, N / 2)    row 0        float32 bits of the weight's own scale, N / 2 times: the outer scale, or 2**S
                                                 of weights with scales beyond what a factor holds
                                    the others   as (K / 64, N / 2, 64 / block): factors of rows n, the low half, and n + 8

A factor is the bfloat16 scale times 2**(EXPONENTS - S), which is also what decoding lacks: the bits of an element, put into a
bfloat16 as they are, are that many powers of two too small. Experts have an axis in front.
"""

from __future__ import annotations

from typing import Any

import torch

from reference import Quantized, Scheme

#: What elements are to the kernel where their scales are factors, by format, storage and columns of a block.
FORMS = {
    ("float4_e2m1fn", "float8_e8m0fnu", 32): "e2m1",
    ("float4_e2m1fn", "float8_e4m3fn", 16): "e2m1",
    ("float8_e4m3fn", "float8_e8m0fnu", 32): "e4m3_mx",
}
#: Powers of two in a factor, by element and columns of a block. Of blocks of 16 columns 8 fewer than decoding lacks, as their
#: scales go up to 448: a product of theirs is 2**-8 of the weight's.
EXPONENTS = {("e2m1", 32): 126, ("e2m1", 16): 118, ("e4m3_mx", 32): 120}
#: Exponents of the smallest elements.
SMALLEST = {"e2m1": -1, "e4m3_mx": -9}
#: Outer scales from here on are not taken: sums of a product times these may be beyond float32 where its result is not.
OUTER = 2.0**119
#: The largest exponent field of a number, the pattern of NaN, and NaN among powers of two.
LARGEST, NAN, NAN_POWER = 254, 0x7FC0, 255
#: Columns whose factors of a pair of rows lie side by side.
ATOM = 64


def element_with_factors(scheme: Scheme) -> str | None:
    """What elements of a scheme with such scales are to the kernel; None where it has others, or a zero point."""
    scale, outer = scheme.scale, scheme.outer
    if not isinstance(scale.block, int) or scheme.zero is not None or scale.stored != "decode":
        return None
    element = FORMS.get((scheme.element, scale.storage, scale.block))
    single = outer is None or (
        scale.storage == "float8_e4m3fn" and outer.block == "tensor" and outer.stored == "decode"
    )
    plain = scheme.outer_order not in ("encode", "folded") or outer is None
    return element if single and plain else None


def exponent_of(scheme: Scheme) -> int:
    """Of `EXPONENTS`."""
    return EXPONENTS[(str(element_with_factors(scheme)), int(str(scheme.scale.block)))]


def values_reason(q: Quantized) -> str | None:
    """Why the scales of a plain weight are no factors of its elements, exactly; None where they are."""
    scheme = q.scheme
    if scheme.scale.storage == "float8_e4m3fn":
        if bool(((q.scale & 0x7F) == 0x7F).any()):
            return "none of its scales may be NaN"
        outer = q.outer
        large = outer is not None and bool(((outer.abs() >= OUTER) & outer.isfinite()).any())
        return f"its outer scale must be below {OUTER:.0e}" if large else None
    element = str(element_with_factors(scheme))
    block = int(str(scheme.scale.block)) * scheme.format.bits // 8
    codes = q.codes & (0x77 if scheme.format.bits == 4 else 0x7F)
    filled = (codes.unflatten(-1, (-1, block)) != 0).any(-1)
    least = _shift(q.scale, exponent_of(scheme)) + 1 - SMALLEST[element]
    if bool((filled & (q.scale < least)).any()):
        return "scales of blocks that are not all zero must leave their elements 2**-126 or more, of the largest scale's part"
    return None


def _shift(scale: torch.Tensor, exponent: int) -> torch.Tensor:
    """S of weights (..., 1, 1): what the largest power of two is beyond a factor."""
    powers = torch.where(scale == NAN_POWER, 0, scale.to(torch.int32))
    return (powers.amax((-2, -1), keepdim=True) + (exponent - LARGEST)).clamp(min=0)


def factors_of(q: Quantized, rows: int, columns: int) -> torch.Tensor:
    """Scales of a plain weight (..., N, K) in the order of the module text, of as many rows and columns, filled by zeros."""
    exponent, block = exponent_of(q.scheme), int(str(q.scheme.scale.block))
    if q.scheme.scale.storage == "float8_e4m3fn":
        values = q.scale.view(torch.float8_e4m3fn).float() * 2.0**exponent
        halves = values.to(torch.bfloat16).view(torch.int16).to(torch.int32)
        own = torch.ones((), device=q.scale.device) if q.outer is None else q.outer.float()
        own = own.view(torch.int32).reshape([1] * halves.dim()).expand(*halves.shape[:-2], 1, 1)
    else:
        shift = _shift(q.scale, exponent)
        field = (q.scale.to(torch.int32) + exponent - shift) << 7
        halves, own = torch.where(q.scale == NAN_POWER, NAN, field), (shift + 127) << 23
    missing = (0, columns // block - halves.shape[-1], 0, rows - halves.shape[-2])
    halves = torch.nn.functional.pad(halves, missing).unflatten(-2, (-1, 2, 8))
    low, high = halves.unbind(-3)
    pairs = ((low & 0xFFFF) | (high << 16)).flatten(-3, -2)
    ordered = pairs.unflatten(-1, (-1, ATOM // block)).transpose(-3, -2)
    factors = ordered.reshape(*pairs.shape[:-2], columns // block, rows // 2)
    return torch.cat([own.expand(*own.shape[:-1], rows // 2), factors], -2)


def scales_of(
    factors: torch.Tensor, scheme: Scheme, index: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales (..., N, K / block) and the outer scale that `factors_of` was given. index: numbers of rows, of these alone."""
    exponent, block = exponent_of(scheme), int(str(scheme.scale.block))
    own, ordered = factors[..., :1, :1], factors[..., 1:, :]
    pairs = ordered.reshape(*factors.shape[:-2], -1, factors.shape[-1], ATOM // block).transpose(-3, -2)
    halves = _halves(pairs.flatten(-2), index)
    if scheme.scale.storage == "float8_e4m3fn":
        values = (halves << 16).view(torch.float32) * 2.0**-exponent
        scale = values.to(torch.float8_e4m3fn).view(torch.uint8)
        outer = own.reshape(-1)[0].clone().view(torch.float32) if scheme.outer is not None else None
        return scale, outer
    powers = ((halves >> 7) & 255) - exponent + ((own >> 23) - 127)
    return torch.where(halves & 0xFFFF == NAN, NAN_POWER, powers).to(torch.uint8), None


def _halves(pairs: torch.Tensor, index: torch.Tensor | None) -> Any:
    """Of pairs (..., N / 2, blocks) those of all rows in order, or of some."""
    if index is not None:
        found = pairs[(index >> 4) * 8 + (index & 7)]
        return torch.where(((index >> 3) & 1)[:, None] == 0, found & 0xFFFF, (found >> 16) & 0xFFFF)
    split = pairs.unflatten(-2, (-1, 8))
    return torch.stack([split & 0xFFFF, (split >> 16) & 0xFFFF], -3).flatten(-4, -2)


__all__ = ["element_with_factors", "exponent_of", "factors_of", "scales_of", "values_reason"]
