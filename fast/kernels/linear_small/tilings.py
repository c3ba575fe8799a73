"""Tiles of `linear_small`: what a rule chooses, and candidates to be timed against it.

What limits a product of few rows, in the order in which it does as rows grow:

* the memory: the weight once. It is busy when enough bytes are under way: programs at once, times stages, times a stage's
  weight. Programs that are few get parts of K (SPLITS), which cost the writing and reading of float32 sums.
* the second-level cache: each program along N reads all of X. X in all programs and the weight go through the same wires, which
  carry WIRES times what the memory does: with more rows tiles are of 128 rows of the weight, which halves X.
* the tensor core and decoding, at 128 rows.

None of this is measured yet: it is counted (bytes, registers, instructions), and the candidates are there to correct it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fast.kernels.quantize.geometry import ceil_div

#: Multiprocessors; bytes of shared memory of one, of a program; registers of one.
FULL, SHARED, MOST_SHARED, REGISTERS = 132, 228 * 1024, 227 * 1024, 65536
#: Bytes under way that keep the memory busy: 4.2 TB/s for a microsecond and a half.
UNDER_WAY = 6 << 20
#: How much more the second-level cache delivers than the memory.
WIRES = 1.4
#: Most parts of K, and the fewest steps of one.
MOST_SPLITS, FEWEST_STEPS = 8, 4
BITS = {"int4": 4, "int8": 8, "e4m3": 8}


@dataclass(frozen=True)
class Tiling:
    """Rows of X, rows of the weight and columns of a step; parts of K; stages; warps; whether the first words of the weight
    are asked for before the kernel in front has ended."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    stages: int
    warps: int
    early: bool = False

    def stage(self, element: str) -> int:
        """Bytes of a stage: the weight's part and X's."""
        return self.block_k * (self.block_n * BITS[element] // 8 + 2 * self.block_m)

    def shared(self, element: str, group: int) -> int:
        """Bytes of shared memory of a program, at most: stages with scales."""
        scales = 4 * self.block_n * (ceil_div(self.block_k, group) if group else 0)
        return self.stages * (self.stage(element) + scales)

    def programs(self, rows: int, count: int) -> int:
        """Programs in all."""
        return ceil_div(rows, self.block_n) * ceil_div(count, self.block_m) * self.splits

    def fits(self, rows: int, columns: int, element: str, group: int) -> bool:
        """Whether the weight's filled rows and columns are whole tiles of it, and a program's stages fit."""
        whole = rows % self.block_n == 0 and columns % self.block_k == 0
        return whole and self.splits <= columns // self.block_k and self.shared(element, group) <= MOST_SHARED


def block_m_of(count: int) -> int:
    """Rows of X of a tile."""
    return next(size for size in (16, 32, 64, 128) if count <= size)


def tiling_of(rows: int, columns: int, element: str, group: int, count: int) -> Tiling:
    """The rule. rows, columns: of the arranged weight; count: rows of X."""
    weight = rows * columns * BITS[element] / 8
    block_m = block_m_of(count)
    # X as often as there are tiles of 64 rows.
    wires = weight + 2.0 * count * columns * (rows // 64)
    block_n = 128 if wires > WIRES * weight and rows // 128 >= FULL // 4 else 64
    made = Tiling(block_m, block_n, 128, 1, 4, 4 if block_n == 64 else 8)
    stages = next(n for n in (6, 5, 4, 3, 2) if n * made.shared(element, group) <= 4 * MOST_SHARED // 2)
    splits = _splits(made, rows, columns, element, count, stages)
    return Tiling(block_m, block_n, 128, splits, stages, made.warps)


def _splits(made: Tiling, rows: int, columns: int, element: str, count: int, stages: int) -> int:
    """The fewest parts of K by which there is a program for each multiprocessor, and enough bytes are under way."""
    tiles, steps = made.programs(rows, count), columns // made.block_k
    each = (stages - 1) * made.block_k * made.block_n * BITS[element] // 8
    for splits in range(1, MOST_SPLITS + 1):
        enough = tiles * splits * each >= min(UNDER_WAY, rows * columns * BITS[element] // 16)
        if steps // (splits + 1) < FEWEST_STEPS or (tiles * splits >= FULL * 5 // 6 and enough):
            return splits
    return MOST_SPLITS


def candidates(rows: int, columns: int, element: str, group: int, count: int) -> list[Tiling]:
    """Tiles worth timing, the rule's first."""
    block_m = block_m_of(count)
    splits = (1, 2, 3, 4) if rows >= 8192 else (2, 4, 7, 8) if rows >= 2048 else (4, 8, 14, 16)
    made = [tiling_of(rows, columns, element, group, count)]
    shapes = ((64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 64, 8))
    if count > 32:
        shapes = (*shapes, (256, 64, 8))
    for (block_n, block_k, warps), parts in product(shapes, splits):
        each = Tiling(block_m, block_n, block_k, parts, 2, warps)
        # As many stages as leave room for two programs of 4 warps, one of 8.
        room = MOST_SHARED // (2 if warps == 4 else 1)
        stages = min(6 if block_k < 256 else 4, room * 2 // max(1, each.shared(element, group)))
        made.append(Tiling(block_m, block_n, block_k, parts, max(2, stages), warps))
    least = FULL // 2
    useful = [t for t in made[1:] if least <= t.programs(rows, count) <= 10 * FULL]
    return [*dict.fromkeys(t for t in (made[0], *useful) if t.fits(rows, columns, element, group))]


__all__ = ["Tiling", "block_m_of", "candidates", "tiling_of"]
