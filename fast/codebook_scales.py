"""Scales of NF4's blocks as the product of few rows stores them: one in float32 for each block, and behind them their parts.

    int32 (rows, N)   K / 64 rows   float32 bits of scales of blocks of 64 columns: code / outer scale + mean, as `dequantize`
                      the others    16 levels; outer scales; their mean; int8 codes of the scales, four in a word; zeros

The stored parts come back exactly.

A level is decoded as hi + SECOND * mid, 16-bit floats with one sign and one high byte, so that decoding looks up three bytes
and not four. Their sums are put together in float32. In bfloat16 a level is 2**-15.97 off, relatively, or 262 roundings of
float32: `reference.linear_error_bound` has 2 K + 6 of them and sums take 19/16 K, so K must be LEAST or more. In float16 it is
2**-19. Levels -1, 0 and 1 are exact; both terms have one sign, so that an infinite input is no NaN.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from reference import SCHEMES, Quantized, Scheme
from reference.schemes.schemes import record_of

#: Columns of a block.
BLOCK = 64
#: Blocks of an outer scale.
GROUP = 256
LEVELS = 16
#: The fewest columns of a weight.
LEAST = 384
#: The code of a scale that is NaN.
NAN = -128
#: What the second term of a level is multiplied by.
SECOND = 0.01953125
#: Patterns of both terms of the levels by dtype.
TERMS = {
    "bfloat16": (
        (0xBF7B, 0xBF80), (0xBF2B, 0xBFB9), (0xBF03, 0xBF2F), (0xBEC8, 0xBE61), (0xBE8E, 0xBEBA), (0xBE37, 0xBE9F),
        (0xBDB8, 0xBD7D), (0x0000, 0x0000), (0x3D9E, 0x3DFF), (0x3E22, 0x3E0F), (0x3E76, 0x3E9A), (0x3EAB, 0x3E4E),
        (0x3EE0, 0x3E28), (0x3F09, 0x3FB4), (0x3F34, 0x3F82), (0x3F7B, 0x3F80),
    ),
    "float16": (
        (0xBBDD, 0xBB00), (0xB974, 0xB9F6), (0xB81E, 0xB845), (0xB632, 0xB651), (0xB477, 0xB46A), (0xB1D0, 0xB122),
        (0xADB6, 0xADF4), (0x0000, 0x0000), (0x2CFF, 0x2CF8), (0x310A, 0x31AB), (0x33BC, 0x333B), (0x354B, 0x35D2),
        (0x36ED, 0x366E), (0x3868, 0x38D9), (0x39AD, 0x3986), (0x3BDD, 0x3B00),
    ),
}  # fmt: skip


def element_with_levels(scheme: Scheme) -> str | None:
    """ "nf4" of the default NF4, whatever its name; None of all others."""
    return _element(scheme.key)


@lru_cache(maxsize=1024)
def _element(key: str) -> str | None:
    scheme = record_of(key)
    return "nf4" if replace(scheme, name="nf4") == SCHEMES["nf4"] else None


def block_scales(q: Quantized) -> torch.Tensor:
    """Scales (N, K / 64) of a plain weight in float32: each step rounded, the largest number in place of infinity."""
    codes = q.scale.reshape(-1).float()
    codes = torch.where(q.scale.reshape(-1) == NAN, torch.nan, codes)
    values = codes / q.outer.reshape(-1).repeat_interleave(GROUP)[: codes.shape[0]] + q.zero
    largest = torch.finfo(torch.float32).max
    values = torch.where(values == torch.inf, largest, values)
    return values.reshape(q.shape[0], -1)


def rows_with_parts(rows: int, columns: int, blocks: int) -> int:
    """Rows of all of the module text, of a weight filled to as many rows and columns; blocks: those that it has."""
    words = LEVELS + -(-blocks // GROUP) + 1 + -(-blocks // 4)
    return columns // BLOCK + -(-words // rows)


def scales_with_parts(q: Quantized, rows: int, columns: int) -> torch.Tensor:
    """The scales of a plain weight (N, K) in the order of the module text, of as many rows and columns, filled by zeros."""
    scales, codes = block_scales(q), q.scale.reshape(-1)
    missing = (0, columns // BLOCK - scales.shape[1], 0, rows - scales.shape[0])
    levels = torch.tensor(q.scheme.format.values.tolist(), device=scales.device)
    packed = torch.nn.functional.pad(codes, (0, -codes.shape[0] % 4)).view(torch.int32)
    floats = (levels, q.outer.reshape(-1), q.zero.reshape(1))
    words = torch.cat([*(part.contiguous().view(torch.int32) for part in floats), packed])
    words = torch.nn.functional.pad(words, (0, -words.shape[0] % rows)).reshape(-1, rows)
    turned = torch.nn.functional.pad(scales, missing).t().contiguous()
    return torch.cat([turned.view(torch.int32), words])


def parts_of(stored: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of scales, outer scales and their mean that `scales_with_parts` was given, of a weight (N, K) without filling."""
    blocks = shape[0] * shape[1] // BLOCK
    groups = -(-blocks // GROUP)
    words = stored[shape[1] // BLOCK :].reshape(-1)[LEVELS:]
    outer, mean, codes = words[:groups], words[groups], words[groups + 1 :].view(torch.int8)[:blocks]
    return codes.clone(), outer.clone().view(torch.float32), mean.clone().view(torch.float32)


__all__ = [
    "BLOCK", "LEAST", "SECOND", "TERMS", "block_scales", "element_with_levels", "parts_of", "rows_with_parts",
    "scales_with_parts",
]  # fmt: skip
