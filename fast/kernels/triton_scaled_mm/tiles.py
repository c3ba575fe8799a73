"""Which tiles `scaled_mm` and `int_scaled_mm` take for a shape, and for which shapes the first was measured to beat
`torch._scaled_mm`.

A weight that few rows are multiplied by is read once, at the speed of the memory if enough of it is under way on
every multiprocessor: tiles have 64 of its rows where these are many, and parts of K besides (split K) where they are
few. torch's products with a scale for each row make tiles of 128 x 128, one for a multiprocessor, along all of K:
what leaves half of the multiprocessors without one is slow, however many rows it has. Of int8, from as many rows on
as give most multiprocessors a tile of 256 x 128, that is the tile: a byte that is read into shared memory serves 171
products there, 128 in squares of 128 (times: reports/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fast.cost import Coefficients, holds
from fast.launch.cuda import MULTIPROCESSORS
from fast.launch.launcher import ceil_div

C = Coefficients("triton_scaled_mm")


@dataclass(frozen=True)
class Tile:
    """(rows, columns) of the result, and how it is made.

    length: elements along K in a step. splits: parts of K. stages: steps in flight. swap: whether the weight is the tensor
    core's first operand, which has at least 64 rows.
    """

    rows: int
    columns: int
    length: int
    splits: int
    stages: int
    warps: int
    swap: bool


def tile_of(m: int, n: int, k: int, fast_sums: bool) -> Tile:
    """The tile for M, N and K. Sums that are not fast end after 128 elements, and so do steps."""
    tile = _of_few_rows(m, n, k) if m <= C.few_rows else _of_many_rows(m, n, k)
    if not fast_sums and tile.length > 128:
        tile = replace(tile, length=128, stages=8)
    return tile


def _of_few_rows(m: int, n: int, k: int) -> Tile:
    """Two programs on a multiprocessor where there are enough, else one with twice as much in flight."""
    rows = next(rows for rows in (16, 32, 64, 128) if m <= rows)
    tiles = -(-n // 64)
    if tiles > MULTIPROCESSORS:
        return Tile(rows, 64, 128, 1, 5, 4, True)
    if rows == 64 and -(-n // 32) <= MULTIPROCESSORS and (tiles >= 32 or k < C.long):
        return Tile(rows, 32, 256, 1, 6, 4, False)
    return Tile(rows, 64, 256, _splits(tiles, k), 4, 4, True)


def _of_many_rows(m: int, n: int, k: int) -> Tile:
    """Squares where these leave less than half of the multiprocessors without one: a quarter fewer bytes are read."""
    if 2 * -(-m // 128) * -(-n // 128) > MULTIPROCESSORS:
        return Tile(128, 128, 128, 1, 5, 8, False)
    return Tile(128, 64, 128, _splits(-(-m // 128) * -(-n // 64), k), 6, 4, False)


def _splits(tiles: int, k: int) -> int:
    """Parts of K, a power of two, so that there is work for every multiprocessor."""
    splits = 1
    while k >= C.long and splits < C.most_splits and 2 * splits * tiles <= MULTIPROCESSORS:
        splits *= 2
    return splits


def is_faster(m: int, n: int, k: int, *, rowwise: bool, fast_sums: bool) -> bool:
    """Whether products of this shape were measured to beat torch's, with a graph of launches and launched one by one.

    rowwise: each row has a scale, of one of the operands at least. With one scale for each matrix torch takes cuBLAS, which
    makes smaller tiles and parts of K of its own, and no shape is known that gains for all rows.
    """
    facts = {
        "rows": m, "n": n, "k": k, "fast_sums": fast_sums, "whole": m % 128 == 0,
        "tiles": ceil_div(m, 128) * ceil_div(n, 128),
    }  # fmt: skip
    measured = k % 256 == 0 and n % 64 == 0 and any(holds(row, facts) for row in C.measured)
    return bool(rowwise) and measured and any(holds(row, facts) for row in C.faster)


#: The tile of many rows.
MANY = Tile(256, 128, 128, 1, 4, 8, False)


#: Tiles along M that programs at work at a time have (`_tile_of` of the kernel).
TOGETHER = 8


def int_tile_of(m: int, n: int, k: int) -> Tile:
    """The tile for M, N and K."""
    if m > C.few_rows and ceil_div(m, MANY.rows) * ceil_div(n, MANY.columns) >= C.many * MULTIPROCESSORS:
        return MANY
    return tile_of(m, n, k, fast_sums=True)
