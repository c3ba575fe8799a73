"""`tiles` of 16-bit floats in whole tiles, two elements at a time, in the patches of `mxfp8`.

A warp has 32 rows by 64 columns, eight rows by eight columns in each lane, so that codes of four rows or of four columns are
packed in one word, and shared memory carries words of the transposed codes. Kinds are those of `tiles`; blocks have 128
elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, high_float, low_float
from fast.kernels.rowwise_colwise.mxfp8 import (
    LOW_HALF,
    MAGNITUDES,
    crossed,
    largest_halves,
    patchwise,
    word_of_codes,
    words_of_rows,
)
from fast.kernels.rowwise_colwise.tiles import first_scale, matrix_of, scales_of


@triton.jit
def _patterns(half, IS_BF16: tl.constexpr):
    """float32 patterns of magnitudes in the low halves of words, whose high halves are 0."""
    return bits_of(low_float(half, IS_BF16)) & MAGNITUDE


@triton.jit
def _largest_of_rows(
    magnitudes, IS_BF16: tl.constexpr, HAS_PTX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):
    """Patterns of the rows' largest magnitudes in the order of memory, (32 DOWN,): over words, lanes and warps."""
    WARPS: tl.constexpr = DOWN * ACROSS
    own = largest_halves(tl.reshape(magnitudes, (32 * WARPS, 8, 4)), 2, HAS_PTX)
    first, second = tl.split(tl.permute(tl.reshape(own, (2, 4, 4 * WARPS, 8)), (1, 2, 3, 0)))
    both = largest_halves(crossed(first, second, HAS_PTX), 2, HAS_PTX)
    both = largest_halves(tl.reshape(both, (4, DOWN, ACROSS, 4)), 2, HAS_PTX)
    rows = tl.join(_patterns(both & LOW_HALF, IS_BF16), _patterns(both >> 16, IS_BF16))
    # (4 registers, DOWN, 4 lanes, 2 of a register) -> (DOWN, lanes, 2, 4).
    return tl.reshape(tl.permute(rows, (1, 2, 3, 0)), (32 * DOWN,))


@triton.jit
def largest_of_columns(
    magnitudes, IS_BF16: tl.constexpr, HAS_PTX: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr
):
    """The same of columns, (64 ACROSS,)."""
    own = largest_halves(patchwise(magnitudes, DOWN * ACROSS), 1, HAS_PTX)
    both = largest_halves(tl.reshape(own, (DOWN, 32 * ACROSS)), 0, HAS_PTX)
    columns = tl.join(_patterns(both & LOW_HALF, IS_BF16), _patterns(both >> 16, IS_BF16))
    return tl.reshape(columns, (64 * ACROSS,))


@triton.jit
def _row_codes(low, high, by, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Words of four codes along rows, (32 WARPS, 16); by: multipliers of rows (32 DOWN,), or one, (1, 1)."""
    LEAD: tl.constexpr = 32 * DOWN * ACROSS
    if len(by.shape) == 1:
        by = tl.permute(tl.reshape(by, (DOWN, 4, 8)), (2, 0, 1))
        by = tl.broadcast_to(by[:, :, None, :], (8, DOWN, ACROSS, 4))
        by = tl.reshape(by, (LEAD, 1))
    a, c = tl.split(tl.reshape(low * by, (LEAD, 16, 2)))
    b, d = tl.split(tl.reshape(high * by, (LEAD, 16, 2)))
    return word_of_codes(a, b, c, d, SCHEME)


@triton.jit
def column_codes(low, high, by, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Words of four codes along columns, (64 ACROSS, 8 DOWN); by: multipliers of columns (64 ACROSS,), or one, (1, 1)."""
    WARPS: tl.constexpr = DOWN * ACROSS
    low, high = patchwise(low, WARPS), patchwise(high, WARPS)
    if len(by.shape) == 1:
        of_low, of_high = tl.split(tl.reshape(by, (ACROSS, 32, 2)))
        low *= tl.reshape(tl.broadcast_to(of_low[None, :, :], (DOWN, ACROSS, 32)), (WARPS, 1, 32))
        high *= tl.reshape(tl.broadcast_to(of_high[None, :, :], (DOWN, ACROSS, 32)), (WARPS, 1, 32))
    else:
        low *= by[None, :, :]
        high *= by[None, :, :]
    return turned_words(low, high, SCHEME, DOWN, ACROSS)


@triton.jit
def turned_words(low, high, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """The same of scaled elements as `patchwise` has them."""
    WARPS: tl.constexpr = DOWN * ACROSS
    words = tl.join(words_of_rows(low, WARPS, SCHEME), words_of_rows(high, WARPS, SCHEME))
    words = tl.reshape(words, (DOWN, ACROSS, 8, 64))
    return tl.reshape(tl.permute(words, (1, 3, 0, 2)), (64 * ACROSS, 8 * DOWN))


@triton.jit
def pairs_kernel(
    x, statistic, codes, scale, transposed, transposed_scale, rows, columns,
    SCHEME: tl.constexpr, KIND: tl.constexpr, BOTH: tl.constexpr, REVERSE: tl.constexpr, BAND: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """As `tiles_kernel`, rows a multiple of 32 DOWN * BAND and columns of 64 ACROSS; num_warps is DOWN * ACROSS."""
    WARPS: tl.constexpr = DOWN * ACROSS
    WORDS: tl.constexpr = tl.pointer_type(tl.int32)
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    if BATCH:
        matrix = matrix_of(REVERSE)
        x += matrix * rows * columns
        transposed += matrix * rows * columns
        transposed_scale += first_scale(matrix, rows, columns, KIND, 128, 128)
        if KIND == "vectors":
            statistic += matrix * columns
        elif KIND == "spread":
            statistic += matrix
    wide = columns // (64 * ACROSS)
    tile_row = program // (BAND * wide) * BAND + program % BAND
    tile_column = program % (BAND * wide) // BAND
    row, column = tile_row.to(tl.int64) * (32 * DOWN), tile_column.to(tl.int64) * (64 * ACROSS)
    # Offsets inside a program fit 32 bits; those of its registers are multiples of one stride.
    i = tl.arange(0, 32 * WARPS)
    patch = (i // 4) % WARPS
    across = patch % ACROSS * 64
    lane = i % 4 * 8 + patch // ACROSS * 32
    turn = (i // (4 * WARPS)).to(tl.int64)
    pairs, quads = columns // 2, columns // 4
    at = (x + (row * columns + column)).to(WORDS, bitcast=True)
    at = at + (lane * pairs + across // 2)[:, None] + tl.arange(0, 32)[None, :] + (turn * pairs)[:, None]
    own_row, own_column = row + tl.arange(0, 32 * DOWN), column + tl.arange(0, 64 * ACROSS)
    if KIND == "vectors":
        of_columns = tl.load(statistic + own_column)
        if BOTH:
            of_rows = tl.load(statistic + columns + own_row)
    elif KIND == "spread":
        of_columns = tl.load(statistic + tl.zeros((1,), tl.int32))
    w = tl.load(at)
    magnitudes, low, high = w & MAGNITUDES, low_float(w, IS_BF16), high_float(w, IS_BF16)
    if KIND == "blocks":
        of_columns = largest_of_columns(magnitudes, IS_BF16, SCHEME.has_ptx, DOWN, ACROSS)
        if BOTH:
            of_rows = _largest_of_rows(magnitudes, IS_BF16, SCHEME.has_ptx, DOWN, ACROSS)

    if KIND == "tensor" or KIND == "square":
        if KIND == "square":
            pair = largest_halves(magnitudes, 0, SCHEME.has_ptx)
            largest = tl.max(tl.maximum(pair & LOW_HALF, pair >> 16), axis=0)
            largest = _patterns(largest, IS_BF16)
        else:
            largest = tl.load(statistic)
        stored, _, by_row = scales_of(tl.full((1, 1), 0, tl.int32) + largest, SCHEME)
        by_column = by_row
        one = tl.zeros((1, 1), tl.int32)
        if KIND == "square":
            tl.store(transposed_scale + (tile_column.to(tl.int64) * (rows // 128) + tile_row + one), stored)
            if BOTH:
                tl.store(scale + (tile_row.to(tl.int64) * (columns // 128) + tile_column + one), stored)
        elif program == 0:
            tl.store(transposed_scale + one, stored)
            if BOTH:
                tl.store(scale + one, stored)
    else:
        stored, _, by_column = scales_of(of_columns, SCHEME)
        if KIND == "blocks":
            tl.store(transposed_scale + own_column * (rows // 128) + tile_row, stored)
        elif tile_row == 0:
            tl.store(transposed_scale + own_column, stored)
        if KIND == "spread":
            by_column = by_column[None, :]
        if BOTH:
            stored, _, by_row = scales_of(of_rows, SCHEME)
            if KIND == "blocks":
                tl.store(scale + own_row * (columns // 128) + tile_column, stored)
            elif tile_column == 0:
                tl.store(scale + own_row, stored)
    if BOTH:
        # Stores of 8 bytes, as lanes have them: wider ones would go through shared memory.
        to = (codes + (row * columns + column)).to(WORDS, bitcast=True)
        to = to + (lane * quads + across // 4)[:, None] + tl.max_contiguous(tl.arange(0, 16), [2])[None, :]
        tl.store(to + (turn * quads)[:, None], _row_codes(low, high, by_row, SCHEME, DOWN, ACROSS))
    to = (transposed + (column * rows + row)).to(WORDS, bitcast=True)
    to = to + tl.arange(0, 64 * ACROSS)[:, None] * (rows // 4) + tl.arange(0, 8 * DOWN)[None, :]
    tl.store(to, column_codes(low, high, by_column, SCHEME, DOWN, ACROSS))
