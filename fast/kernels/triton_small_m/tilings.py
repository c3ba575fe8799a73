"""Tiles of `linear_small`: the least of an estimate over candidates, and the candidates, to be timed against it.

What limits a product of few rows:

* the memory: the weight once. It is busy when enough bytes are under way: programs at once, times stages, times a stage's part
  of the weight. So weights of few rows get programs for parts of K.
* the second-level cache: every program along N reads all of X, so that many rows of X want tiles of many rows of the weight;
  parts of K are written and read as float32, and a second kernel adds them.
* instructions: decoding, once for each tile of X's rows.

`tiling_of` is a rule of what was fastest (`reports/gpu/family_times.csv`, to which the tests hold it; 4-bit codes in
groups of 128, 8-bit codes by rows): 128 rows of the weight by 128 columns a step, K in parts until each multiprocessor has two
programs, or one where 8-bit codes meet more than 8 rows. Tiles of 8 rows of X are never taken. `estimate` is
the sum above in microseconds; it puts the other candidates, which `tests/gpu/validate.py` times, in an order.
NF4, whose tiles were not timed, has sums of two terms and registers for 64 rows of X at most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from fast.cost import Coefficients, Time, first_row
from fast.launch.launcher import ceil_div

C = Coefficients("triton_small_m")
#: Multiprocessors.
FULL = 132
#: Bytes of shared memory of a multiprocessor.
SHARED = 228 * 1024
#: Bytes of shared memory that a program may have.
MOST_SHARED = 227 * 1024
#: Registers of a multiprocessor.
REGISTERS = 65536
#: Registers of a lane by the count of `Tiling.registers` with which none is spilled.
MOST_REGISTERS = 208
#: Bits of a stored code.
BITS = {"int4": 4, "int8": 8, "e4m3": 8, "e2m1": 4, "e4m3_mx": 8, "nf4": 4}


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

    def weight(self, element: str) -> int:
        """Bytes of the weight of a stage."""
        return self.block_k * self.block_n * BITS[element] // 8

    def shared(self, element: str, group: int) -> int:
        """Bytes of shared memory of a program: stages of the weight, of X and of scales."""
        scales = 4 * self.block_n * ceil_div(self.block_k, group) if group else 0
        return self.stages * (self.weight(element) + 2 * self.block_k * self.block_m + scales)

    def registers(self, element: str) -> int:
        """Of a program, about: 40 a lane, sums twice, and the elements of up to 128 columns, two in a register. NF4 has two
        terms of 64 columns and sums of either."""
        elements = self.block_n * min(self.block_k, 128) // 2
        sums = 3 if element == "nf4" else 2
        return 32 * self.warps * 40 + sums * self.block_m * self.block_n + elements

    def at_once(self, element: str, group: int) -> int:
        """Programs on a multiprocessor."""
        return max(
            1, min(SHARED // (self.shared(element, group) + 1024), REGISTERS // self.registers(element))
        )

    def programs(self, rows: int, count: int) -> int:
        """Programs in all."""
        return ceil_div(rows, self.block_n) * ceil_div(count, self.block_m) * self.splits

    def fits(self, rows: int, columns: int, element: str, group: int) -> bool:
        """Whether the weight's filled rows and columns are whole tiles of it, no part of K is empty, and stages fit."""
        if rows % self.block_n or columns % self.block_k:
            return False
        steps = columns // self.block_k
        taken = ceil_div(steps, ceil_div(steps, self.splits))
        return taken == self.splits and self.shared(element, group) <= MOST_SHARED


def block_m_of(count: int) -> int:
    """Rows of X of a tile."""
    return next(size for size in (16, 32, 64, 128) if count <= size)


def estimate(tiling: Tiling, rows: int, columns: int, element: str, group: int, count: int) -> float:
    """Microseconds, see the module text."""
    weight = rows * columns * BITS[element] / 8
    programs, each = tiling.programs(rows, count), tiling.at_once(element, group)
    # Programs of the fullest multiprocessor over those of the average one.
    uneven = ceil_div(programs, FULL) * FULL / programs
    flight = min(programs, FULL * each) * (tiling.stages - 1) * tiling.weight(element)
    memory = weight / (C.memory * min(1.0, flight / C.under_way))
    read = ceil_div(count, tiling.block_m) * weight + 2.0 * count * columns * (rows // tiling.block_n)
    cache = uneven * read / C.cache
    steps = ceil_div(columns // tiling.block_k, tiling.splits)
    warps = tiling.warps * programs / FULL
    issue = uneven * warps * steps * (_instructions(tiling, element)) / C.issued
    waits = ceil_div(programs, FULL * each) * steps * C.step
    return Time(1, 1, max(memory, cache, issue, waits), once=_once(tiling, rows, count)).total


def _once(tiling: Tiling, rows: int, count: int) -> float:
    """Microseconds of the launch, and of the second one, which adds parts of K."""
    parts = C.second + 8.0 * tiling.splits * count * rows / C.cache if tiling.splits > 1 else 0.0
    return float(C.launch + parts)


def microseconds(
    count: int, rows: int, columns: int, element: str, zero: bool, parts: int, multiprocessors: int = FULL
) -> float:
    """Of 33 to 128 rows of X by the tiles of the rule, fitted to measured times. zero: whether there are zero points; parts: of
    64 columns that have a scale each."""
    tiling = tiling_of(rows, columns, element, 0, count)
    steps = ceil_div(columns // tiling.block_k, tiling.splits)
    fullest = ceil_div(tiling.programs(rows, count), multiprocessors)
    timed = first_row(C.steps, element=element, zero=zero, parts=parts)
    step = timed["whole" if tiling.block_m > 64 else "half" if count <= 64 else "halves"]
    return Time(fullest, steps, step, once=_once(tiling, rows, count)).total


def _instructions(tiling: Tiling, element: str) -> float:
    """Instructions of a warp for a step."""
    return C.decoding[element] * tiling.block_k * tiling.block_n / 16 / tiling.warps + C.others


@lru_cache(maxsize=4096)
def tiling_of(rows: int, columns: int, element: str, group: int, count: int) -> Tiling:
    """The rule, see the module text. rows, columns: of the arranged weight; count: rows of X."""
    halves = ceil_div(rows, 128) * ceil_div(count, 64)
    row = first_row(C.tiles, rows=count, element=element, bits=BITS[element], halves=halves)
    block_n, block_k, stages, warps = row["tile"]
    tiling = Tiling(row.get("block_m", block_m_of(count)), block_n, block_k, 1, stages, warps)
    return _in_parts(tiling, rows, columns, count, row["programs"])


def _in_parts(tiling: Tiling, rows: int, columns: int, count: int, each: int) -> Tiling:
    """A tiling with as many parts of K as give every multiprocessor at most `each` programs, and a part two steps or more."""
    most = each * FULL // tiling.programs(rows, count)
    steps = columns // tiling.block_k
    splits = max(1, min(most, steps // 2, C.most_splits))
    # Parts of as many steps as there are then, without an empty one.
    return replace(tiling, splits=ceil_div(steps, ceil_div(steps, splits)))


def candidates(rows: int, columns: int, element: str, group: int, count: int, most: int = 16) -> list[Tiling]:
    """The rule's tiles first; then others by the estimate, and of the best ones variants that it does not see."""
    rule = tiling_of(rows, columns, element, group, count)
    result = _fitting(rows, columns, element, group, count)
    result.sort(key=lambda tiling: estimate(tiling, rows, columns, element, group, count))
    variants = [replace(rule, early=True), replace(result[0], early=True)]
    return [*dict.fromkeys([rule, *variants, *_varied(result)])][:most]


def _varied(found: list[Tiling]) -> list[Tiling]:
    """The best two of every shape of tiles, in the order of the estimate."""
    kept: dict[tuple[int, int, int], list[Tiling]] = {}
    for tiling in found:
        kept.setdefault((tiling.block_n, tiling.block_k, tiling.warps), []).append(tiling)
    best = {tiling for each in kept.values() for tiling in each[:3]}
    return [tiling for tiling in found if tiling in best]


def _fitting(rows: int, columns: int, element: str, group: int, count: int) -> list[Tiling]:
    """All tiles that serve."""
    shapes = ((64, 128, 4), (64, 256, 4), (128, 128, 4), (128, 128, 8), (128, 64, 8), (256, 64, 8))
    splits = (1, 2, 3, 4, 5, 7, 8, 14, 16)
    sizes = (block_m_of(count), 64) if count > 64 else (block_m_of(count),)
    result = (
        Tiling(block_m, *shape[:2], parts, stages, shape[2])
        for block_m, shape, parts, stages in product(sizes, shapes, splits, (2, 3, 4, 6))
    )
    results = [tiling for tiling in result if tiling.fits(rows, columns, element, group)]
    return [tiling for tiling in results if tiling.registers(element) <= 32 * tiling.warps * MOST_REGISTERS]


__all__ = ["Tiling", "block_m_of", "candidates", "estimate", "microseconds", "tiling_of"]
