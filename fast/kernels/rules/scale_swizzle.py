"""Where scales of a matrix lie: row by row, or in the tiles of 128 rows by 4 columns of `reference.quantize.stored`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_place(row, block, blocks, TILED: tl.constexpr):
    """Index of the scale of a block of a row, of `blocks` in each row."""
    if TILED:
        tile = (row >> 7) * ((blocks + 3) >> 2) + (block >> 2)
        return tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (block & 3)
    else:
        return row * blocks + block
