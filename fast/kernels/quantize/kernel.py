"""One kernel for every blocked tensor: choose scales, quantize, fake-quantize, dequantize, mask gradients.

A program takes a tile of P blocks with SIZE elements each. Where the elements lie is compile-time (`SHAPE`):

* ``flat``: block b is elements b * length ... of the flattened tensor (groups that divide the last axis, whole rows, the
  whole tensor). With CHUNKED a block is larger than a tile, and the second grid axis counts blocks.
* ``columns``: blocks run along an axis that is not the last; P neighbouring columns make a tile, so that memory is read in
  rows (`column_places`).
* ``tiles``: blocks of rows x INNER, and rows with a short last block.
* ``strips``: P blocks of rows x INNER side by side, whose rows are read and written together where codes are made: a row of a
  block is less than a warp reads at once. Elsewhere these are ``tiles``.

With CHUNKED a block is larger than a tile, and neighbouring programs take its parts.

What happens is a `BlockOp`: where scales come from (the tile, a statistic that an earlier pass left, the caller) and what is
written. Blocks too large for one tile take two passes: the first leaves statistics by atomic maximum on bit patterns (those of
one block in few parts side by side, which need no memory that is filled before), the second reads x again, in reverse order,
since the end of x is what the L2 cache still holds.

Where blocks run along an axis that is not the last, a tile has P neighbouring columns and SIZE rows of a block. Triton hands
out lanes along columns first, then along rows, and warps last; a thread has INNER neighbouring columns, since `at` is said to
have no more neighbours than that (and INNER divides the number of columns, so that they are in one place of memory, there or
not there together). So

* of a warp's lanes P / INNER lie along columns, and a maximum over rows takes log2(32 * INNER / P) shuffles;
* a program of one warp needs no barrier, nor shared memory but to put scales side by side, which is why `geometry` asks for
  narrow tiles;
* INNER is 8 where scales are made of the tile: 16 bytes of 16-bit floats. With 16, as 16-byte stores of codes would have it, a
  thread had half the rows, three times the shuffles and twice the arithmetic of scales.

Programs follow memory: tiles of one strip of rows, then parts of a block, blocks along the axis, leading indices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import narrow, order_key, read, widened
from fast.kernels.rules.elements import load_packed
from fast.kernels.rules.scales import double_scale, leave_averages, loaded_scale, quantize_groups
from fast.kernels.rules.statistics import absmax, value_range
from fast.kernels.rules.values import combined, loaded_zero, values
from fast.kernels.sm90.integers import load_groups
from fast.kernels.tile.fast_codes import finished, load_values, of_blocks
from fast.kernels.tile.quantize import (
    mask_saturated_gradients,
    pairs_tile,
    quantize_tile,
    segments_tile,
    strip_tile,
)

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
    """Atomic maxima of what this tile sees: magnitudes, and for ranges the keys of minimum and maximum. A part of one block of
    few leaves its own."""
    v = widened(tile, SCHEME.signs_nan)
    if OP.parts > 1:
        tl.store(statistic + tl.program_id(0) + block, absmax(v, False, SCHEME.has_ptx))
    elif OP.outer == "statistic":
        # Over all elements: one statistic, and in default schemes only finite ones count.
        largest = tl.max(absmax(v, SCHEME.block_nan, SCHEME.has_ptx), axis=0)
        tl.atomic_max(statistic + tl.zeros_like(largest), largest, sem="relaxed")
    elif SCHEME.level.statistic == "absmax":
        tl.atomic_max(statistic + block, absmax(v, False, SCHEME.has_ptx), mask=exists, sem="relaxed")
    else:
        largest, low, high = value_range(tile, inside, SCHEME.signs_nan, SCHEME.with_zero, SCHEME.has_ptx)
        tl.atomic_max(statistic + block, largest, mask=exists, sem="relaxed")
        tl.atomic_min(statistic + stride + block, order_key(low), mask=exists, sem="relaxed")
        tl.atomic_max(statistic + 2 * stride + block, order_key(high), mask=exists, sem="relaxed")


# Values of a tile of codes: the counterpart of `reference.dequantize`.


@triton.jit
def dequantize_tile(
    codes, scale, outer, zero, y, at, inside, block, exists, SCHEME: tl.constexpr, OP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Read codes and scales, write the values that the operation asks for."""
    PRECISION: tl.constexpr = OP.output if SCHEME.dequantize == "target" else "float32"
    if OP.packed:
        SEQUENCE: tl.constexpr = SCHEME.bits == 4 or SCHEME.kind == "float" or SIZE % 32 == 0
    else:
        SEQUENCE: tl.constexpr = SCHEME.bits == 8 or SCHEME.kind == "int" or SCHEME.kind == "codebook"
    FAST_PATH: tl.constexpr = SCHEME.fast_values and SEQUENCE
    if FAST_PATH:
        code = block
    elif OP.packed:
        code = load_packed(codes, block, exists, SIZE, SCHEME.bits)
    else:
        code = read(codes + at, inside).to(tl.int32) & ((1 << SCHEME.bits) - 1)
    if SCHEME.two_level:
        s = double_scale(scale, outer, zero, block, exists, SCHEME, PRECISION)
    else:
        s = loaded_scale(read(scale + block, exists), SCHEME.level)
    z = s
    if SCHEME.zero != "":
        z = loaded_zero(read(zero + block, exists), SCHEME)
    o = tl.full((), 1.0, tl.float32)
    if SCHEME.has_outer:
        o = loaded_scale(tl.load(outer), SCHEME.outer)
    if FAST_PATH:
        c = combined(s, o, SCHEME, "float32")
        value = load_values(codes, at, inside, block, exists, z, SCHEME, OP.packed, SIZE)
        tl.store(y + at, finished(value * c, c, OP.output), mask=inside)
    else:
        value = values(code, combined(s, o, SCHEME, PRECISION), z, SCHEME, PRECISION)
        tl.store(y + at, narrow(value, OP.output, SCHEME.dequantize == "float32"), mask=inside)


@triton.jit
def column_places(
    program, columns, rows, length, limit, chunks, lead_stride, row_stride, inner_row,
    CHUNKED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr, INNER: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    """`kernel.block_places` for the shape "columns"."""
    tiles = tl.cdiv(columns, P)
    strip = program // tiles
    column = tl.arange(0, P)[:, None] + program % tiles * P
    exists = column < columns
    block, chunk = strip, 0
    if CHUNKED:
        block, chunk = strip // chunks, strip % chunks
    i = tl.arange(0, SIZE)[None, :]
    if MASKED:
        row, lead = block % rows, block // rows
        i += chunk * SIZE
        base = _wide(lead, WIDE) * lead_stride + _wide(row, WIDE) * row_stride
        inside = tl.max_constancy(exists & (row * length + i < limit) & (i < length), [INNER, 1])
    else:
        # Strips follow each other without a gap.
        base = _wide(strip, WIDE) * SIZE * inner_row
        inside = tl.full((P, SIZE), 1, tl.int1)
    at = base + _wide(i, WIDE) * inner_row + column
    at = tl.multiple_of(tl.max_contiguous(at, [INNER, 1]), [INNER, 1])
    return at, inside, block * columns + column, exists, chunk == 0


@triton.jit
def _wide(index, WIDE: tl.constexpr):
    """An index of enough bits for offsets."""
    return index.to(tl.int64) if WIDE else index
