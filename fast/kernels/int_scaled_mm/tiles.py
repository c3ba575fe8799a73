"""Which tiles `int_scaled_mm` takes for a shape.

Few rows are those of 8-bit floats (`scaled_mm.tiles`): reading the weight is all. From as many rows on as give most
multiprocessors a tile of 256 x 128, that is the tile: a byte that is read into shared memory serves 171 products there, 128 in
squares of 128 (times: reports/LOG.md).
"""

from __future__ import annotations

from fast.kernels.quantize.geometry import ceil_div
from fast.kernels.scaled_mm import tiles
from fast.kernels.scaled_mm.tiles import FEW_ROWS, PROCESSORS, Tile

#: The tile of many rows.
MANY = Tile(256, 128, 128, 1, 4, 8, False)
#: Tiles along M that programs at work at a time have (`_tile_of` of the kernel).
TOGETHER = 8


def tile_of(m: int, n: int, k: int) -> Tile:
    """The tile for M, N and K."""
    if m > FEW_ROWS and 4 * ceil_div(m, MANY.rows) * ceil_div(n, MANY.columns) >= 3 * PROCESSORS:
        return MANY
    return tiles.tile_of(m, n, k, fast_sums=True)


__all__ = ["MANY", "TOGETHER", "Tile", "tile_of"]
