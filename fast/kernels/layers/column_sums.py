"""Sums of a matrix's columns in float32: the gradient of a bias.

A program goes down a chunk of rows in steps of eight, of which six are on the way before the first is added: with WARPS warps
on every multiprocessor some 48 KB, as much as memory needs to be busy. What it has at the end is a row of a float32 matrix with
a row for each chunk, at most 512, which `add_pieces` adds up as a tree. The order of additions depends on the shape alone:
equal inputs have equal bits, on any GPU.

On the longest way to a column's sum of M rows in P chunks are 3 + ceil(M / P / 8) + ceil(log2 P) additions, each off by at most
2^-24 of its result: the sum before it is rounded is off by at most that many times 2^-24 (and a little, for its square) of the
sum of absolute values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from fast.kernels.bits import widened
from fast.kernels.layers.rms_norm import PARTS, add_pieces
from fast.launch.launcher import FLOAT_NAMES, INT32, Call, CompiledLaunch, ceil_div

#: Rows of a step.
STEP = 8
#: Columns of a warp: 16 bytes of a row of 16-bit elements are a thread's.
WARP = 256
#: Columns of a program, the widest that divides the rows.
WIDTHS = (1024, 512, 256)
#: Multiprocessors of Hopper, the same for all GPUs so that bits are.
PROCESSORS = 132
#: Warps on each.
WARPS = 16


class Plan(NamedTuple):
    """columns of a program, its warps, programs beside each other, chunks of rows below each other and the rows of one."""

    columns: int
    warps: int
    tiles: int
    parts: int
    chunk: int


@triton.jit(do_not_specialize=["rows", "chunk", "tiles"])
def column_sums_kernel(g, sums, rows, length, chunk, tiles, WIDE: tl.constexpr, COLUMNS: tl.constexpr):
    """A row of sums for each chunk of rows of g (rows, length); what lies outside counts as 0."""
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    first = part * chunk
    last = tl.minimum(first + chunk, rows)
    total = tl.zeros((COLUMNS,), tl.float32)
    for row in range(first, last, 8):
        a, b = _two(g, row, last, column, length, WIDE), _two(g, row + 2, last, column, length, WIDE)
        c, d = _two(g, row + 4, last, column, length, WIDE), _two(g, row + 6, last, column, length, WIDE)
        total += (_sum(a) + _sum(b)) + (_sum(c) + _sum(d))
    tl.store(sums + _at(part, length, WIDE) + column, total, mask=column < length)


@triton.jit
def _two(g, row, last, column, length, WIDE: tl.constexpr):
    """Two rows, before they are widened."""
    above = tl.load(g + _at(row, length, WIDE) + column, mask=(column < length) & (row < last), other=0)
    below = tl.load(
        g + _at(row + 1, length, WIDE) + column, mask=(column < length) & (row + 1 < last), other=0
    )
    return above, below


@triton.jit
def _sum(pair):
    return widened(pair[0]) + widened(pair[1])


@triton.jit
def _at(row, length, WIDE: tl.constexpr):
    """Where a row begins."""
    if WIDE:
        return row.to(tl.int64) * length
    else:
        return row * length


def plan_of(rows: int, length: int, width: int | None = None, beside: int = WARPS) -> Plan:
    """How programs cover a matrix. width, beside: columns of a program and warps on a multiprocessor, to measure others."""
    columns = width or next((one for one in WIDTHS if length % one == 0), WIDTHS[-1])
    warps, tiles = columns // WARP, ceil_div(length, columns)
    parts = min(PARTS, max(1, PROCESSORS * beside // (warps * tiles)))
    chunk = ceil_div(ceil_div(rows, parts), STEP) * STEP
    return Plan(columns, warps, tiles, ceil_div(rows, chunk), chunk)


def column_sums(
    g: torch.Tensor, dtype: torch.dtype, key: Any = None, plan: Plan | None = None
) -> torch.Tensor | None:
    """Sums (N) of g (..., N), which is not empty, over all axes but the last, rounded once to a dtype; None where torch has to
    answer. plan: `plan_of` where it is None.
    """
    if g.dtype not in FLOAT_NAMES or dtype not in FLOAT_NAMES:
        return None
    length = g.shape[-1]
    rows = g.numel() // length
    columns, warps, tiles, parts, chunk = plan or plan_of(rows, length)
    call, wide = Call({"g": g}), (rows + STEP) * length > INT32
    call.allocate("sums", (parts, length), torch.float32)
    tail = (rows, length, chunk, tiles, wide, columns)
    call.launch(CompiledLaunch(column_sums_kernel, parts * tiles, tail, warps), ("g", "sums"))
    add_pieces(call, parts, length, FLOAT_NAMES[dtype], wide, "made")
    result: torch.Tensor = call.result("made", key)
    return result


__all__ = ["Plan", "column_sums", "column_sums_kernel", "plan_of"]
