"""Tiles of a matrix whose rows are normalized, gated and quantized: device side and host side of where they lie.

A program takes ROWS rows of SIZE columns as a tile of shape (ROWS * SIZE / GROUP, GROUP): the blocks of the quantizer, each a
row of the tile. A matrix wider than SIZE has several column tiles; neighbouring programs take neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from fast.kernels.quantize.geometry import INT32, LARGEST_TILE, ceil_div, power_above
from fast.kernels.tile.quantize import quantize_tile


@triton.jit
def tile_of(
    rows, length, per_row, column_tiles, MASKED: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """(row, column, which elements exist, block index, which blocks exist); rows and blocks are (P, 1)."""
    PER: tl.constexpr = SIZE // GROUP
    program = tl.program_id(0)
    first, start = program // column_tiles * ROWS, program % column_tiles * SIZE
    if WIDE:
        first, start = first.to(tl.int64), start.to(tl.int64)
    p = tl.arange(0, ROWS * PER)[:, None]
    i = tl.arange(0, GROUP)[None, :]
    row = first + p // PER
    group = start // GROUP + p % PER
    column = group * GROUP + i
    inside = tl.full((ROWS * PER, GROUP), 1, tl.int1)
    exists = tl.full((ROWS * PER, 1), 1, tl.int1)
    if MASKED:
        exists = (row < rows) & (group * GROUP < length)
        inside = exists & (column < length)
    return row, column, inside, row * per_row + group, exists


@triton.jit
def quantize_rows(v, codes, scale, zero, at, inside, block, exists, SCHEME: tl.constexpr, OP: tl.constexpr):
    """Codes and scales of a tile of float32 values that have the precision of the rule's dtype."""
    quantize_tile(
        v,
        None,
        None,
        codes,
        scale,
        None,
        zero,
        None,
        None,
        None,
        at,
        inside,
        block,
        exists,
        True,
        0,
        SCHEME,
        OP,
    )


WARP_PAIRS = 64


@dataclass(frozen=True)
class Tiles:
    """A matrix of `rows` x `length` as tiles, with `per_row` blocks of the quantizer in a row; see `tile_of`."""

    rows: int
    length: int
    per_row: int
    column_tiles: int
    masked: bool
    wide: bool
    tile_rows: int
    size: int
    group: int
    warps: int

    @property
    def programs(self) -> int:
        """How many programs a launch has."""
        return ceil_div(self.rows, self.tile_rows) * self.column_tiles

    @property
    def elements_per_thread(self) -> int:
        """Elements of a tile for each thread."""
        return self.tile_rows * self.size // (32 * self.warps)

    @property
    def integers(self) -> tuple[int, ...]:
        """What `tile_of` takes first."""
        return (self.rows, self.length, self.per_row, self.column_tiles)

    @property
    def arguments(self) -> dict[str, Any]:
        """All of these by name."""
        return (
            dict(zip(("rows", "length", "per_row", "column_tiles"), self.integers, strict=True))
            | self.constants
        )

    @property
    def constants(self) -> dict[str, Any]:
        """What `tile_of` takes at compile time."""
        return {
            "MASKED": self.masked, "WIDE": self.wide, "ROWS": self.tile_rows, "SIZE": self.size, "GROUP": self.group
        }  # fmt: skip


def tiles(
    rows: int, length: int, block: int | None, *, size: int, elements: int, stride: int, per_thread: int
) -> Tiles:
    """Tiles of `size` columns and about `elements` elements, `per_thread` of them in a thread.

    block: elements of a quantizer's block, None for none. stride: the largest distance of rows.
    """
    # Instructions that take elements in pairs want two in each lane.
    tile_rows = max(1, WARP_PAIRS // size, min(elements // size, power_above(rows)))
    group, per_row = (size, 1) if block is None or block == length else (block, length // block)
    masked = rows % tile_rows != 0 or length % size != 0
    wide = rows * max(stride, length) > INT32 - 2 * LARGEST_TILE
    warps = max(1, min(16, tile_rows * size // (32 * per_thread)))
    return Tiles(rows, length, per_row, ceil_div(length, size), masked, wide, tile_rows, size, group, warps)
