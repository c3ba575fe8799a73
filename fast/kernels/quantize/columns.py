"""Where a program's elements lie when blocks run along an axis that is not the last.

A tile has P neighbouring columns and SIZE rows of a block. Triton hands out lanes along columns first, then along rows, and
warps last; a thread has INNER neighbouring columns, since `at` is said to have no more neighbours than that (and INNER divides
the number of columns, so that they are in one place of memory, there or not there together). So

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
