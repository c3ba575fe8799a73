"""Columns of rows sorted by expert as transposed 8-bit codes (and MX codes below), groups filled up by zeros, without a copy.

As `rowwise_colwise.pairs` and `mxfp8`, of 16-bit floats in patches of 32 x 64; rows come by index, and a row of no index is
zeros. KIND says what has one scale:

* ``"vectors"``: a column in a group. `maxima` has found their largest magnitudes before.
* ``"tensor"``: a group. The same.
* ``"blocks"``: 128 places.
* ``"mx"``: 32 places, powers of two.

A group's scale stands at each STEP of its places, and for each column in `table`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import high_float, low_float
from fast.kernels.grouped.maxima import GRAIN
from fast.kernels.rowwise_colwise.mxfp8 import MAGNITUDES, along_columns, patchwise
from fast.kernels.rowwise_colwise.pairs import column_codes, largest_of_columns, turned_words
from fast.kernels.rowwise_colwise.tiles import scales_of


@triton.jit
def _group_factors(
    statistic, owners, scale, table, first, own_column, places, columns, experts,
    SCHEME: tl.constexpr, KIND: tl.constexpr, STEP: tl.constexpr, DOWN: tl.constexpr,
):  # fmt: skip
    """Multipliers of the grains of a tile, (2 DOWN, columns or 1), whose scales are stored."""
    grain = first // GRAIN + tl.arange(0, 2 * DOWN)
    exists = grain < places // GRAIN
    owner = tl.load(owners + grain, mask=exists, other=experts)
    wide_owner = owner.to(tl.int64)[:, None]
    before = tl.load(owners + grain - 1, mask=exists & (grain > 0), other=-1)
    if KIND == "tensor":
        largest = tl.load(statistic + owner)[:, None]
    else:
        largest = tl.load(statistic + wide_owner * columns + own_column[None, :])
    stored, _, by = scales_of(largest, SCHEME)
    stored = tl.broadcast_to(stored, (2 * DOWN, own_column.shape[0]))
    begins = exists & (owner != before) & (owner < experts)
    tl.store(table + wide_owner * columns + own_column[None, :], stored, mask=begins[:, None])
    at = own_column[None, :] * (places // STEP) + (grain // (STEP // GRAIN))[:, None]
    tl.store(scale + at, stored, mask=(exists & (grain % (STEP // GRAIN) == 0))[:, None])
    return by


@triton.jit
def _grain_codes(low, high, by, SCHEME: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Words of four codes along columns, (64 ACROSS, 8 DOWN), under the multipliers of grains."""
    WARPS: tl.constexpr = DOWN * ACROSS
    if by.shape[1] == 1:
        of_low = tl.reshape(by, (DOWN, 1, 2, 1, 1))
        of_high = of_low
    else:
        of_low, of_high = tl.split(tl.reshape(by, (DOWN, 2, ACROSS, 32, 2)))
        of_low = tl.permute(of_low, (0, 2, 1, 3))[:, :, :, None, :]
        of_high = tl.permute(of_high, (0, 2, 1, 3))[:, :, :, None, :]
    low = tl.reshape(patchwise(low, WARPS), (DOWN, ACROSS, 2, 16, 32)) * of_low
    high = tl.reshape(patchwise(high, WARPS), (DOWN, ACROSS, 2, 16, 32)) * of_high
    low, high = tl.reshape(low, (WARPS, 32, 32)), tl.reshape(high, (WARPS, 32, 32))
    return turned_words(low, high, SCHEME, DOWN, ACROSS)


@triton.jit
def group_columns_kernel(
    x, source, owners, statistic, codes, scale, table, places, columns, experts,
    SCHEME: tl.constexpr, KIND: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, BAND: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr,
):  # fmt: skip
    """codes (columns, places), scale (columns, places / STEP or the block), table (experts, columns), 0 before.

    places: a multiple of 16; columns: of 64 ACROSS. Programs go down BAND tiles first, then to the next columns; those of KINDs
    with a first read from the end. num_warps is DOWN * ACROSS. source, owners: see `layout.group_layout`.
    """
    WARPS: tl.constexpr = DOWN * ACROSS
    WORDS: tl.constexpr = tl.pointer_type(tl.int32)
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    program = tl.program_id(0)
    if KIND == "vectors" or KIND == "tensor":
        program = tl.num_programs(0) - 1 - program
    wide = columns // (64 * ACROSS)
    band, rest = program // (BAND * wide), program % (BAND * wide)
    high = tl.minimum(tl.cdiv(places, 32 * DOWN) - band * BAND, BAND)
    tile_row = band * BAND + rest % high
    first, column = tile_row * (32 * DOWN), (rest // high).to(tl.int64) * (64 * ACROSS)
    own_column = column + tl.arange(0, 64 * ACROSS)
    i = tl.arange(0, 32 * WARPS)
    patch = (i // 4) % WARPS
    place = first + i % 4 * 8 + patch // ACROSS * 32 + i // (4 * WARPS)
    row = tl.load(source + place, mask=place < places, other=-1)
    begin = row.to(tl.int64) * (columns // 2) + patch % ACROSS * 32
    at = (x + column).to(WORDS, bitcast=True) + begin[:, None] + tl.arange(0, 32)[None, :]
    w = tl.load(at, mask=(row >= 0)[:, None], other=0)
    magnitudes, low, high = w & MAGNITUDES, low_float(w, IS_BF16), high_float(w, IS_BF16)
    if KIND == "mx":
        made, code = along_columns(magnitudes, low, high, WARPS, IS_BF16, SCHEME)
        made = tl.reshape(
            tl.permute(tl.reshape(made, (DOWN, ACROSS, 8, 64)), (1, 3, 0, 2)), (64 * ACROSS, 8 * DOWN)
        )
        block = first // 32 + tl.arange(0, DOWN)
        to_scale = scale + own_column[:, None] * (places // 32) + block[None, :]
        code = tl.trans(tl.reshape(code, (DOWN, 64 * ACROSS))).to(tl.uint8)
        tl.store(to_scale, code, mask=(block < places // 32)[None, :])
    elif KIND == "blocks":
        of_columns = largest_of_columns(magnitudes, IS_BF16, SCHEME.has_ptx, DOWN, ACROSS)
        stored, _, by = scales_of(of_columns, SCHEME)
        tl.store(scale + own_column * (places // 128) + tile_row, stored)
        made = column_codes(low, high, by, SCHEME, DOWN, ACROSS)
    else:
        by = _group_factors(
            statistic, owners, scale, table, first, own_column, places, columns, experts, SCHEME, KIND, STEP, DOWN,
        )  # fmt: skip
        made = _grain_codes(low, high, by, SCHEME, DOWN, ACROSS)
    word = first // 4 + tl.arange(0, 8 * DOWN)
    to = codes.to(WORDS, bitcast=True) + own_column[:, None] * (places // 4) + word[None, :]
    if MASKED:
        tl.store(to, made, mask=(word < places // 4)[None, :])
    else:
        tl.store(to, made)


__all__ = ["group_columns_kernel"]
