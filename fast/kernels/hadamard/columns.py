"""Blocks down the columns of a row-major matrix: mixed, scaled and rounded where they lie, so that nothing is transposed.

A thread has all elements of the columns that it works on. So the butterfly and the maximum are arithmetic in registers, every
row is read and written by neighbouring threads, and four random words, which belong to four neighbouring elements of a row of
the transposed matrix, are four rows of one column here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import bits_of, narrow, read, widened
from fast.kernels.hadamard.butterfly import in_dtype, mixed_tuple, one_by_one, side_by_side
from fast.kernels.hadamard.elements import codes_of, factor_of, largest_of, values_of
from fast.kernels.hadamard.words import beside, four_words
from fast.kernels.tile.block_scales import choose_scales
from fast.kernels.tile.quantize import load_outer

#: Columns of a program, two in a thread: 4 bytes of 16-bit floats, and a block of 32 in 64 registers.
COLUMNS, WARPS = 256, 4


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream"])
def columns_kernel(
    x, codes, scale, outer, statistic, y, rows, columns, seed_low, seed_high, stream,
    SCHEME: tl.constexpr, OP: tl.constexpr, LENGTH: tl.constexpr, MIXED: tl.constexpr, SIGNS: tl.constexpr,
    FACTOR: tl.constexpr, BARE: tl.constexpr, DRAWS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """x (rows, columns) in blocks of LENGTH rows: the statistic, or codes and scales, or values y, as the operation says.

    BARE: y is what was mixed, and nothing is quantized.
    """
    tiles = tl.cdiv(columns, C)
    strip, column = tl.program_id(0) // tiles, tl.program_id(0) % tiles * C + tl.arange(0, C)
    inside = column < columns if MASKED else None
    exists = column < columns
    at = strip.to(tl.int64) * (LENGTH * columns) + column
    v = ()
    for i in tl.static_range(LENGTH):
        v += (widened(read(x + (at + i * columns), inside)),)
    if MIXED:
        v = in_dtype(mixed_tuple(v, LENGTH, SIGNS, FACTOR), LENGTH, SCHEME.dtype, SCHEME.has_ptx)
    if BARE:
        for i in tl.static_range(LENGTH):
            tl.store(y + (at + i * columns), narrow(v[i], SCHEME.dtype, False), mask=inside)
    elif OP.statistic:
        largest = largest_of(v, LENGTH, SCHEME.house, SCHEME.has_ptx)
        tl.atomic_max(statistic, tl.max(largest, axis=0), sem="relaxed")
    else:
        g_outer = load_outer(outer, statistic, SCHEME, OP)
        largest = largest_of(v, LENGTH, False, SCHEME.has_ptx)[:, None]
        block = (strip.to(tl.int64) * columns + column)[:, None]
        _, s, scale_code, prepared, _ = choose_scales(
            largest, largest, largest, g_outer, scale, scale, block, exists[:, None], 1, SCHEME, OP
        )
        factor = factor_of(s, scale_code, prepared, g_outer, SCHEME)
        words = None
        if SCHEME.rounding == "stochastic":
            place = beside(column, bits_of(v[0]), SCHEME.has_ptx)
            words = _words(place, strip, rows, seed_low, seed_high, stream, LENGTH, WIDE, C)
        tile = side_by_side(v, LENGTH, C)
        if OP.codes:
            made = codes_of(tile, s, factor, g_outer, words, SCHEME, DRAWS).to(tl.uint8)
            target = codes
        else:
            made = values_of(tile, s, factor, g_outer, words, SCHEME, DRAWS, OP.output)
            target = y
        made = one_by_one(made, LENGTH, C)
        for i in tl.static_range(LENGTH):
            tl.store(target + (at + i * columns), made[i], mask=inside)


@triton.jit
def _words(
    place, strip, rows, seed_low, seed_high, stream, LENGTH: tl.constexpr, WIDE: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Random words of a block of each column, (C, LENGTH): its rows are neighbours in a row of the transposed matrix."""
    quarter = rows // 4
    if WIDE:
        first = place.to(tl.int64) * quarter + strip.to(tl.int64) * (LENGTH // 4)
    else:
        first = place * quarter + strip * (LENGTH // 4)
    counters = ()
    for i in tl.static_range(LENGTH // 4):
        counters += (first + i,)
    a, b, c, d = four_words(side_by_side(counters, LENGTH // 4, C), seed_low, seed_high, stream, WIDE)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (C, LENGTH))


__all__ = ["COLUMNS", "WARPS", "columns_kernel"]
