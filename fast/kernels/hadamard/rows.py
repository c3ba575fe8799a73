"""Blocks along the rows of a matrix of 16-bit floats: mixed, scaled and rounded from one read.

A number of a tile is a word of four neighbouring elements, which four random words of one counter round. So no word moves, and
two stages of the butterfly are arithmetic in registers; the others ask a neighbouring lane.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import high_float, low_float, narrow
from fast.kernels.hadamard.butterfly import in_dtype, mixed_words
from fast.kernels.hadamard.elements import codes_of, factor_of, largest_of, values_of
from fast.kernels.hadamard.words import four_words
from fast.kernels.tile.block_scales import choose_scales
from fast.kernels.tile.quantize import load_outer

#: Words of a program: four or eight of a thread.
TILE, WARPS = 512, 4


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream"])
def rows_kernel(
    x, codes, scale, outer, statistic, y, count, seed_low, seed_high, stream,
    SCHEME: tl.constexpr, OP: tl.constexpr, WORDS: tl.constexpr, MIXED: tl.constexpr, SIGNS: tl.constexpr,
    FACTOR: tl.constexpr, BARE: tl.constexpr, DRAWS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """x, `count` blocks of 4 * WORDS elements one after the other: as `columns.columns_kernel` does.

    BARE: y is what was mixed, and nothing is quantized.
    """
    block = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)[:, None]
    at = block * WORDS + tl.arange(0, WORDS)[None, :]
    exists = block < count
    inside = tl.broadcast_to(exists, (P, WORDS)) if MASKED else None
    v = _elements(x, at, inside, SCHEME.dtype)
    if MIXED:
        v = in_dtype(mixed_words(v, WORDS, SIGNS, FACTOR), 4, SCHEME.dtype, SCHEME.has_ptx)
    if BARE:
        made = ()
        for i in tl.static_range(4):
            made += (narrow(v[i], SCHEME.dtype, False),)
        _store_words(y, at, inside, made)
    elif OP.statistic:
        largest = tl.max(tl.max(largest_of(v, 4, SCHEME.house, SCHEME.has_ptx), axis=1), axis=0)
        tl.atomic_max(statistic, largest, sem="relaxed")
    else:
        g_outer = load_outer(outer, statistic, SCHEME, OP)
        largest = tl.max(largest_of(v, 4, False, SCHEME.has_ptx), axis=1, keep_dims=True)
        _, s, scale_code, prepared, _ = choose_scales(
            largest, largest, largest, g_outer, scale, scale, block, exists, 1, SCHEME, OP
        )
        factor = factor_of(s, scale_code, prepared, g_outer, SCHEME)
        words = (None, None, None, None)
        if SCHEME.rounding == "stochastic":
            words = four_words(at, seed_low, seed_high, stream, WIDE)
        _quantized(v, s, factor, g_outer, words, codes, y, at, inside, SCHEME, OP, DRAWS)


@triton.jit
def _quantized(
    v, s, factor, outer, words, codes, y, at, inside, SCHEME: tl.constexpr, OP: tl.constexpr, DRAWS: tl.constexpr
):  # fmt: skip
    """Codes or values of four elements a word, stored."""
    if OP.codes:
        made = codes_of(v[0], s, factor, outer, words[0], SCHEME, DRAWS)
        for i in tl.static_range(1, 4):
            made = made | (codes_of(v[i], s, factor, outer, words[i], SCHEME, DRAWS) << (8 * i))
        tl.store(codes.to(tl.pointer_type(tl.int32), bitcast=True) + at, made, mask=inside)
    else:
        values = ()
        for i in tl.static_range(4):
            values += (values_of(v[i], s, factor, outer, words[i], SCHEME, DRAWS, OP.output),)
        _store_words(y, at, inside, values)


@triton.jit
def _elements(x, at, inside, DTYPE: tl.constexpr):
    """float32 of four neighbours of each word, a tuple."""
    word = tl.load(x.to(tl.pointer_type(tl.int64), bitcast=True) + at, mask=inside)
    low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
    BF16: tl.constexpr = DTYPE == "bfloat16"
    return low_float(low, BF16), high_float(low, BF16), low_float(high, BF16), high_float(high, BF16)


@triton.jit
def _store_words(y, at, inside, v):
    """Four 16-bit floats side by side."""
    low, high = _pair(v[0], v[1]), _pair(v[2], v[3])
    word = low.to(tl.uint32, bitcast=True).to(tl.int64) | (high.to(tl.int64) << 32)
    tl.store(y.to(tl.pointer_type(tl.int64), bitcast=True) + at, word, mask=inside)


@triton.jit
def _pair(a, b):
    """Two 16-bit floats as one int32, the first in the low half."""
    return a.to(tl.uint16, bitcast=True).to(tl.int32) | (b.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


__all__ = ["TILE", "WARPS", "rows_kernel"]
