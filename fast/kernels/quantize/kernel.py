"""One kernel for every blocked tensor: choose scales, quantize, fake-quantize, dequantize, mask gradients.

A program takes a tile of P blocks with SIZE elements each. Where the elements lie is compile-time (`SHAPE`):

* ``flat``: block b is elements b * length ... of the flattened tensor (groups that divide the last axis, whole rows, the
  whole tensor). With CHUNKED a block is larger than a tile, and the second grid axis counts blocks.
* ``columns``: blocks run along an axis that is not the last; P neighbouring columns make a tile, so that memory is read in
  rows. See `columns`.
* ``tiles``: blocks of rows x INNER, and rows with a short last block.
* ``strips``: P blocks of rows x INNER side by side, whose rows are read and written together where codes are made: a row of a
  block is less than a warp reads at once. Elsewhere these are ``tiles``.

With CHUNKED a block is larger than a tile, and neighbouring programs take its parts.

What happens is a `BlockOp`: where scales come from (the tile, a statistic that an earlier pass left, the caller) and what is
written. Blocks too large for one tile take two passes: the first leaves statistics by atomic maximum on bit patterns, the
second reads x again, in reverse order, since the end of x is what the L2 cache still holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import order_key, read, widened
from fast.kernels.quantize.columns import column_places
from fast.kernels.rules.second_level import leave_averages, quantize_groups
from fast.kernels.rules.statistics import absmax, value_range
from fast.kernels.sm90.pack_32 import load_groups
from fast.kernels.tile.dequantize import dequantize_tile
from fast.kernels.tile.quantize import quantize_tile
from fast.kernels.tile.quantize_pairs import pairs_tile, segments_tile, strip_tile
from fast.kernels.tile.saturation import mask_saturated_gradients
from fast.kernels.tile.strips import of_blocks

# Neighbours that a thread has of a strip: 16 bytes of 16-bit floats.
WIDTH = tl.constexpr(8)


@triton.jit
def all_of(SIZE: tl.constexpr, P: tl.constexpr):
    """A mask that the compiler drops."""
    return tl.full((P, SIZE), 1, tl.int1)


@triton.jit
def in_block(SIZE: tl.constexpr, INNER: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Offsets in a block, (1, SIZE), row by row; TRANSPOSED: of a rectangle with rows of INNER, column by column."""
    i = tl.arange(0, SIZE)[None, :]
    if TRANSPOSED:
        HEIGHT: tl.constexpr = SIZE // INNER
        i = i % HEIGHT * INNER + i // HEIGHT
    return i


@triton.jit
def block_places(
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
    SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, REVERSE: tl.constexpr,
    SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr, TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """(offsets (P, SIZE), which exist, block index (P, 1), which exist, first chunk). TRANSPOSED: see `in_block`."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    i = in_block(SIZE, INNER, TRANSPOSED)
    p = tl.arange(0, P)[:, None]
    chunk = 0
    if CHUNKED and SHAPE == "flat":
        chunk, program = program % chunks, program // chunks
        i = i + (chunk.to(tl.int64) if WIDE else chunk) * SIZE
    if SHAPE == "flat":
        block = p + program * P
        at = (block.to(tl.int64) if WIDE else block) * length + i
        inside = all_of(SIZE, P)
        if MASKED:
            inside = (block < count) & (i < length) & (at < limit)
        return at, inside, block, block < count, chunk == 0
    elif SHAPE == "columns":
        return column_places(
            program, columns, rows, length, limit, chunks, lead_stride, row_stride, inner_row,
            CHUNKED, MASKED, WIDE, SIZE, INNER, P,
        )  # fmt: skip
    else:
        block = p + program * P
        column, rest = block % columns, block // columns
        row, lead = rest % rows, rest // rows
        base = (lead.to(tl.int64) if WIDE else lead) * lead_stride
        base += (row.to(tl.int64) if WIDE else row) * row_stride + column * column_stride
        r, c = i // INNER, i % INNER
        at = base + (r.to(tl.int64) if WIDE else r) * inner_row + c * inner_column
        height: tl.constexpr = SIZE // INNER
        inside = all_of(SIZE, P)
        if MASKED:
            inside = (block < count) & (row * height + r < limit) & (column * INNER + c < length)
        return at, inside, block, block < count, chunk == 0


@triton.jit
def strip_places(
    columns, length, row_stride, column_stride, WIDE: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
    REVERSE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Offsets of the units of P blocks side by side, (rows, P, INNER / UNIT), of which a thread has WIDTH elements."""
    program = tl.program_id(0)
    if REVERSE:
        program = tl.num_programs(0) - 1 - program
    block = program * P
    strip, column = block // columns, block % columns
    r = tl.arange(0, SIZE // INNER)[:, None, None]
    p = tl.arange(0, P)[None, :, None]
    c = tl.arange(0, INNER // UNIT)[None, None, :]
    base = (strip.to(tl.int64) if WIDE else strip) * (row_stride // UNIT) + column * (column_stride // UNIT)
    at = base + (r.to(tl.int64) if WIDE else r) * (length // UNIT) + (p * (INNER // UNIT) + c)
    return tl.multiple_of(tl.max_contiguous(at, [1, 1, WIDTH // UNIT]), [1, 1, WIDTH // UNIT])


@triton.jit
def blocks_kernel(
    x, g, words, statistic, outer_statistic, outer, scale, zero, codes, y,
    count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column, stride,
    SCHEME: tl.constexpr, OP: tl.constexpr, SHAPE: tl.constexpr, CHUNKED: tl.constexpr, MASKED: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Run an operation on a tile; see the module."""
    at, inside, block, exists, first = block_places(
        count, columns, rows, length, limit, chunks, lead_stride, row_stride, column_stride, inner_row, inner_column,
        SHAPE, CHUNKED, MASKED, WIDE, OP.reverse, SIZE, INNER, P,
    )  # fmt: skip
    # Two operations use arguments otherwise: the mask of saturated blocks is `codes`; of scales that are quantized (level
    # "groups"), x are the scales, zero their mean, limit their number, and rows the number of averages.
    if WIDE and (OP.packed or OP.pairs):
        # Packed codes of many blocks are more bytes than int32 counts, and pairs of elements may be more than that.
        block = block.to(tl.int64)
    if OP.level == "averages":
        leave_averages(x, statistic, at, inside, block, exists, SCHEME)
    elif OP.level == "groups":
        quantize_groups(x, statistic, scale, outer, zero, at, inside, block, exists, limit, rows, SCHEME, OP)
    elif OP.dequantize:
        dequantize_tile(codes, scale, outer, zero, y, at, inside, block, exists, SCHEME, OP, SIZE)
    elif OP.pairs and SCHEME.ranged:
        segments_tile(x, codes, scale, zero, block, exists, stride, SCHEME, OP, SIZE)
    elif OP.pairs and SHAPE == "strips":
        elements = strip_places(
            columns, length, row_stride, column_stride, WIDE, SIZE, INNER, P, OP.reverse, 1
        )
        both = strip_places(columns, length, row_stride, column_stride, WIDE, SIZE, INNER, P, OP.reverse, 2)
        UNIT: tl.constexpr = 8 if OP.packed else 4
        out = strip_places(columns, length, row_stride, column_stride, WIDE, SIZE, INNER, P, OP.reverse, UNIT)
        strip_tile(
            x, codes, scale, outer, outer_statistic, elements, both, out, block, exists, stride, SCHEME, OP
        )
    elif OP.pairs:
        pairs_tile(
            x, codes, scale, outer, outer_statistic, at, inside, block, exists, stride, SCHEME, OP, SIZE
        )
    elif OP.saturation == "gradient":
        mask_saturated_gradients(x, g, codes, at, inside, block, exists, stride, SCHEME, OP)
    else:
        # Packed integers and stretched levels leave as words of 32 codes, which a thread makes if it has their elements.
        GROUPS: tl.constexpr = OP.packed and SCHEME.digits != "" and not MASKED and SIZE % 32 == 0
        # Of what makes codes alone, and neither reads nor writes more.
        STRIPS: tl.constexpr = (
            SHAPE == "strips" and OP.codes and OP.output == "" and SCHEME.rounding == "nearest_even"
        )
        if STRIPS:
            at = strip_places(columns, length, row_stride, column_stride, WIDE, SIZE, INNER, P, OP.reverse, 1)
            tile = of_blocks(tl.load(x + at))
            if OP.packed:
                # Packed codes leave as words of eight.
                at = strip_places(
                    columns, length, row_stride, column_stride, WIDE, SIZE, INNER, P, OP.reverse, 8
                )
        elif GROUPS:
            tile = load_groups(x, block, SIZE)
        else:
            tile = read(x + at, inside)
        if SHAPE == "columns":
            # Neighbours in a register are not of one block.
            tile = widened(tile, SCHEME.signs_nan)
        if OP.statistic:
            _leave_statistic(tile, inside, statistic, block, exists, stride, SCHEME, OP)
        else:
            quantize_tile(
                tile, g, words, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists,
                first, stride, SCHEME, OP,
            )  # fmt: skip


@triton.jit
def _leave_statistic(tile, inside, statistic, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr):
    """Atomic maxima of what this tile sees: magnitudes, and for ranges the keys of minimum and maximum."""
    v = widened(tile, SCHEME.signs_nan)
    if OP.outer == "statistic":
        # Over all elements: one statistic, and in default schemes only finite ones count.
        largest = tl.max(absmax(v, SCHEME.house, SCHEME.has_ptx), axis=0)
        tl.atomic_max(statistic + tl.zeros_like(largest), largest, sem="relaxed")
    elif SCHEME.level.statistic == "absmax":
        tl.atomic_max(statistic + block, absmax(v, False, SCHEME.has_ptx), mask=exists, sem="relaxed")
    else:
        largest, low, high = value_range(tile, inside, SCHEME.signs_nan, SCHEME.with_zero, SCHEME.has_ptx)
        tl.atomic_max(statistic + block, largest, mask=exists, sem="relaxed")
        tl.atomic_min(statistic + stride + block, order_key(low), mask=exists, sem="relaxed")
        tl.atomic_max(statistic + 2 * stride + block, order_key(high), mask=exists, sem="relaxed")
