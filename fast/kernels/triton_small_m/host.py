"""The host side of `linear_small`: what it takes, its tiles, and its launches.

Tiles are the least of an estimate over candidates, which are timed against it. What limits a product of few rows:

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
from typing import Any

import torch

from fast.cost import Coefficients, Time, first_row
from fast.kernels.triton_small_m.layout import arrange
from fast.kernels.triton_small_m.product import sum_splits_kernel, triton_small_m_kernel
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div, interpreted, same_device
from fast.scale_factors import ArrangedWeight, check_row_scales, filled

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


#: The most rows of X; beyond, a product with the dense weight is no slower.
MOST_ROWS = 128
INPUTS = (torch.bfloat16, torch.float16)
#: Columns of a row of parts that a program adds.
PART = 512
#: Warps of such a program.
PART_WARPS = 4

Launches = tuple[CompiledLaunch, CompiledLaunch | None]


def linear_small(
    x: torch.Tensor,
    w: ArrangedWeight,
    bias: torch.Tensor | None = None,
    *,
    x_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    key: Any = None,
    record: Any = None,
) -> torch.Tensor | None:
    """x (..., K) times the transpose of an arranged weight (N, K), plus bias (N): (..., N) in `dtype`, by default x's.

    x_scale: float32, one for each row of x, by which its sums are multiplied in float32: x is then the rows' codes, which are
    exact in its dtype.

    None where the kernel does not take it, and another one has to: inputs that are not bfloat16 or float16, no rows or more
    than MOST_ROWS, more than 2**31 elements, a dtype that is no float of 16 or 32 bits. The result is within
    `reference.linear_error_bound` of the exact product, the same bits every time for the same tiles. tiling: other tiles than
    the rule's; key, record: see `dispatch`, of a call without x_scale. ValueError for shapes and devices that do not go
    together and for a tiling that is not for the weight.
    """
    n, length = w.shape
    dtype = x.dtype if dtype is None else dtype
    check_operands(x, w, bias)
    count = x.numel() // length
    check_row_scales(x_scale, x, count)
    if x.dtype not in INPUTS or dtype not in FLOAT_NAMES or not 0 < count <= MOST_ROWS:
        return None
    if bias is not None and bias.dtype not in FLOAT_NAMES:
        return None
    chosen = launches_for(w, count, x.dtype, dtype, tiling)
    if chosen is None:
        return None
    scales = {} if x_scale is None else {"x_scale": x_scale}
    call = Call({"x": x, "codes": w.words, "scale": w.scale, "zero": w.zero, **scales, "bias": bias})
    add_product(call, chosen, (*x.shape[:-1], n), dtype, "x")
    y: torch.Tensor = call.result("y", key, record)
    return y


def launches_for(
    w: ArrangedWeight, count: int, inputs: torch.dtype, dtype: torch.dtype, tiling: Tiling | None = None
) -> Launches | None:
    """The launches that multiply `count` rows of inputs by a weight, by the rule's tiles or others; None for more parts of a
    result than 2**31. ValueError for a tiling that is not for the weight."""
    given = tiling or tiling_of(w.rows, w.columns, w.element, w.group, count)
    if not given.fits(w.rows, w.columns, w.element, w.group):
        raise ValueError(
            f"{given} is not for a weight {w.shape}, {w.element} in groups of {w.group}: tiles are whole ones of "
            f"{(w.rows, w.columns)} and a program's stages fit a multiprocessor; take one of `candidates`"
        )
    n, length = w.shape
    if given.splits * count * n > INT32:
        return None
    return _launch(n, length, w.element, w.group, count, FLOAT_NAMES[inputs], FLOAT_NAMES[dtype], given)


def add_product(call: Call, launches: Launches, shape: tuple[int, ...], dtype: torch.dtype, x: str) -> None:
    """Launch a product in a call and allocate its result "y" of this shape and dtype.

    The call has the inputs under the name `x`, and as "codes", "scale", "zero", "x_scale" and "bias" what there is of them.
    """
    first, second = launches
    given = (x, "codes", "scale", "zero")
    if second is None:
        call.allocate("y", shape, dtype)
        call.launch(first, (*given, "x_scale", "bias", "y"))
        return
    call.allocate("parts", (first.grid[1], *first.tail[:2]), torch.float32)
    call.launch(first, (*given, None, None, "parts"))
    call.allocate("y", shape, dtype)
    call.launch(second, ("parts", "x_scale", "bias", "y"))


def check_operands(x: torch.Tensor, w: ArrangedWeight, bias: torch.Tensor | None) -> None:
    """ValueError where shapes or devices of inputs, weight and bias do not go together."""
    n, length = w.shape
    if not x.ndim or x.shape[-1] != length:
        raise ValueError(
            f"linear_small of inputs {tuple(x.shape)} and a weight {w.shape}: the last axes must be the same"
        )
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"linear_small: bias has shape {tuple(bias.shape)}, the weight asks for {(n,)}")
    if not same_device(x, w.words, bias):
        raise ValueError(
            f"linear_small: inputs on {x.device}, the weight on {w.words.device}"
            + ("" if bias is None else f", bias on {bias.device}")
            + "; move them to one device"
        )


@lru_cache(maxsize=4096)
def _launch(
    n: int, length: int, element: str, group: int, count: int, dtype: str, out: str, tiling: Tiling
) -> Launches:
    """The product, and where K is in parts the sum of them."""
    rows, columns, pdl = filled(n), filled(length), not interpreted()
    tail = (
        count, n, length, rows, columns, group, element, dtype, out, tiling.block_m, tiling.block_n, tiling.block_k,
        tiling.splits, tiling.stages, tiling.early, pdl,
    )  # fmt: skip
    grid = (ceil_div(n, tiling.block_n), tiling.splits, ceil_div(count, tiling.block_m))
    first = CompiledLaunch(
        triton_small_m_kernel, grid, tail, tiling.warps, enable_fp_fusion=True, launch_pdl=True
    )
    if tiling.splits == 1:
        return first, None
    tail = (count, n, tiling.splits, out, PART, pdl)
    return first, CompiledLaunch(
        sum_splits_kernel, (ceil_div(n, PART), count, 1), tail, PART_WARPS, launch_pdl=True
    )


__all__ = [
    "MOST_ROWS",
    "Tiling",
    "add_product",
    "arrange",
    "block_m_of",
    "candidates",
    "check_operands",
    "estimate",
    "launches_for",
    "linear_small",
    "microseconds",
    "tiling_of",
]
