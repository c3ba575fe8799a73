"""SignRound's elementwise steps, a pass over memory each: the moved weight, the gradient of V and a step of V, in one pass or
in two, and the state that a loop keeps.

`reference.calibration.signround` states the rules; every operation is rounded by itself in float32, in its order. An element's
scale is at (row // R, column // C) of an array of NB columns. What V = 1 moves a weight by is that scale times a step of the
format: a constant for integers; for floats and codebooks of few values one of a table, by the thresholds that w / scale passes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from fast.kernels.bits import read, widened
from fast.kernels.rules.statistics import tree_sum
from fast.launch.launcher import UNFUSED, interpreted
from reference.formats.formats import Format
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import flat_size

#: Elements of a program at least, and of the longest block whose sum a program makes.
LEAST, LONGEST = 2048, 4096
#: Values of a format at most whose steps a kernel looks up.
VALUES = 16


class Unit(NamedTuple):
    """What V = 1 moves weights by. scale: contiguous float32, `columns` in a row, of blocks of (rows, length) elements.

    table: float32, thresholds and then steps; empty for integers, whose step is `step`.
    """

    scale: torch.Tensor
    rows: int
    length: int
    columns: int
    table: torch.Tensor
    step: float

    def run(self, w: torch.Tensor) -> int:
        """How many elements of w in a row have a scale, where scales follow each other so, by a power of two; else 0."""
        length = max(self.length, 1)
        whole = w.shape[1] % length == 0 and length & (length - 1) == 0
        return length if self.rows == 1 and whole else 0


@triton.jit
def unit_of(
    w, scale, table, at, inside, K, NB, R, C, STEP: tl.constexpr, STEPS: tl.constexpr, RUN: tl.constexpr
):
    """The unit of elements `at`, of weights w in float32. RUN: so many in a row, a power of two, have the next scale; or 0."""
    if RUN > 0:
        s = tl.load(scale + at // RUN, mask=inside, other=1.0)
    else:
        s = tl.load(scale + (at // K // R) * NB + at % K // C, mask=inside, other=1.0)
    if STEPS == 0:
        return s * STEP
    else:
        good = (s > 0) & (s < float("inf"))
        ratio = tl.div_rn(w, tl.where(good, s, 1.0))
        step = tl.load(table + STEPS - 1)
        for i in tl.static_range(STEPS - 1):
            step = tl.where(ratio >= tl.load(table + i), tl.load(table + STEPS + i), step)
        return step * s


@triton.jit
def moved_kernel(
    w, v, scale, table, result, count, K, NB, R, C,
    STEP: tl.constexpr, STEPS: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """w + v * unit in float32; w itself where there is no such number."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    x = widened(read(w + at, inside))
    moved = x + tl.load(v + at, mask=inside, other=0) * unit_of(
        x, scale, table, at, inside, K, NB, R, C, STEP, STEPS, RUN
    )
    finite = tl.abs(moved) < float("inf")
    tl.store(result + at, tl.where(finite, moved, x), mask=inside)


@triton.jit
def against(v, gradient, rate):
    """v - rate * sign(gradient), within [-1/2, 1/2]."""
    by = tl.where(gradient > 0, rate, tl.where(gradient < 0, -rate, 0.0))
    return tl.minimum(tl.maximum(v - by, -0.5), 0.5)


@triton.jit(do_not_specialize=["rate"])
def gradient_kernel(
    dx, w, v, scale, table, dv, through, count, K, NB, R, C, STEP: tl.constexpr, STEPS: tl.constexpr, RUN: tl.constexpr,
    TILE: tl.constexpr, SUMS: tl.constexpr, rate, MOVES: tl.constexpr,
):  # fmt: skip
    """dv = dx * unit, or with MOVES v moved against it; with SUMS those of dv * v, of each RUN elements."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    x = widened(read(w + at, inside))
    gradient = tl.load(dx + at, mask=inside, other=0) * unit_of(
        x, scale, table, at, inside, K, NB, R, C, STEP, STEPS, RUN
    )
    if MOVES or SUMS:
        before = tl.load(v + at, mask=inside, other=0)
    if SUMS:
        P: tl.constexpr = TILE // RUN
        block = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)[:, None]
        sums = tree_sum(tl.reshape(gradient * before, (P, RUN)))
        tl.store(through + block, sums, mask=block * RUN < count)
    result = against(before, gradient, rate) if MOVES else gradient
    tl.store(dv + at, result, mask=inside)


@triton.jit(do_not_specialize=["rate"])
def sign_step_kernel(v, gradient, result, count, rate, TILE: tl.constexpr):
    """v moved against the signs of its gradient."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < count
    g = tl.load(gradient + at, mask=inside, other=0)
    moved = against(tl.load(v + at, mask=inside, other=0), g, rate)
    tl.store(result + at, moved, mask=inside)


@triton.jit
def keep_better_kernel(better, new, kept, count, TILE: tl.constexpr):
    """new in the place of kept where `better` is not 0; else nothing of either is read."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    wanted = (at < count) & (tl.load(better) != 0)
    tl.store(kept + at, tl.load(new + at, mask=wanted, other=0), mask=wanted)


def unit(scale: torch.Tensor, fmt: Format, blocks: Blocks) -> Unit | None:
    """The unit of weights of these blocks; None where no kernel knows the steps of the format or the place of a scale.

    scale: float32 (..., blocks, 1), what a step of 1 is worth.
    """
    n, k = blocks.shape
    block = blocks.block
    if block == "tensor":
        rows, length = n, k
    elif isinstance(block, tuple):
        rows, length = block
    elif isinstance(block, int) and blocks.axis == 1:
        rows, length = 1, k if block == -1 else block
    elif (flat := flat_size(block)) and k % flat == 0:
        rows, length = 1, flat
    else:
        return None
    table = np.zeros(0, np.float32)
    if fmt.kind != "int":
        found = np.unique(fmt.values[np.isfinite(fmt.values)]).astype(np.float32)
        if len(found) > VALUES:
            return None
        # The first step is that below all thresholds.
        table = np.concatenate([found[1:-1], np.diff(found)])
    step = 2.0**-fmt.fraction_bits if fmt.kind == "int" else 0.0
    stored = torch.from_numpy(table).to(scale.device, non_blocking=True)
    return Unit(scale.contiguous(), rows, length, max(-(-k // max(length, 1)), 1), stored, step)


def moved(w: torch.Tensor, v: torch.Tensor, by: Unit) -> torch.Tensor:
    """`w + v * unit` (N, K) in float32."""
    result = torch.empty(w.shape, dtype=torch.float32, device=w.device)
    _run(moved_kernel, w, (w.contiguous(), v.contiguous(), by.scale, by.table, result), by, LEAST)
    return result


def gradient(
    dx: torch.Tensor, w: torch.Tensor, v: torch.Tensor, by: Unit, sums: bool, rate: float | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx * unit (N, K), and the sums of that times v over blocks, (N, K / length); None where a block is none of a kernel's.

    rate: what a step of v is, and the first result is v after it, not its gradient.
    """
    dv, through, run = torch.empty_like(dx), None, by.run(w)
    sums = sums and sums_blocks(w, by)
    if sums:
        through = torch.empty(w.shape[0], by.columns, dtype=torch.float32, device=w.device)
    pointers = (dx.contiguous(), w.contiguous(), v.contiguous(), by.scale, by.table, dv, through)
    moves = 0.0 if rate is None else rate, rate is not None
    _run(gradient_kernel, w, pointers, by, max(LEAST, run) if sums else LEAST, sums, *moves)
    return dv, through


def sums_blocks(w: torch.Tensor, by: Unit) -> bool:
    """Whether `gradient` sums over the blocks of w: not over those of no elements, for which nothing is launched."""
    return w.numel() > 0 and 0 < by.run(w) <= LONGEST


def step(v: torch.Tensor, gradient: torch.Tensor, rate: float) -> torch.Tensor:
    """v moved against the signs of its gradient."""
    result = torch.empty_like(v)
    options = {} if interpreted() else {"num_warps": 4, **UNFUSED}
    if v.numel():
        grid, pointers = (triton.cdiv(v.numel(), LEAST),), (v.contiguous(), gradient.contiguous(), result)
        with torch.cuda.device(v.get_device()):
            sign_step_kernel[grid](*pointers, v.numel(), rate, LEAST, **options)
    return result


def keep(better: torch.Tensor, new: torch.Tensor, kept: torch.Tensor) -> None:
    """Copy new into kept, contiguous tensors of one shape and dtype, where `better` (uint8, 1 element) is not 0."""
    options = {} if interpreted() else {"num_warps": 4}
    if kept.numel():
        grid, pointers = (triton.cdiv(kept.numel(), LEAST),), (better, new.contiguous(), kept)
        with torch.cuda.device(kept.get_device()):
            keep_better_kernel[grid](*pointers, kept.numel(), LEAST, **options)


def _run(kernel: Any, w: torch.Tensor, pointers: tuple[Any, ...], by: Unit, size: int, *more: Any) -> None:
    options = {} if interpreted() else {"num_warps": 4, **UNFUSED}
    steps, grid = (len(by.table) + 1) // 2, (triton.cdiv(w.numel(), size),)
    sizes = w.numel(), w.shape[1], by.columns, by.rows, by.length, by.step, steps, by.run(w), size
    if w.numel():
        with torch.cuda.device(w.get_device()):
            kernel[grid](*pointers, *sizes, *more, **options)


__all__ = ["Unit", "gradient", "keep", "moved", "step", "sums_blocks", "unit"]
