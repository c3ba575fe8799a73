"""Zeros where grouped products write nothing: rows of no group, and weight gradients of groups without rows.

How much that is stands in `ends` on the GPU alone, so programs are started for everything and leave at once where there is
nothing to do.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from fast.launch.launcher import CompiledLaunch

#: Rows of a program, and elements that it writes at a time.
ROWS, TILE = 32, 1024
#: Programs of a group.
PARTS = 16
WARPS = 4


@triton.jit
def zero_tail_kernel(ends, y, experts, rows, width, ROWS: tl.constexpr, TILE: tl.constexpr):
    """y[r] = 0 for r >= ends[experts - 1], a few rows a program."""
    end = tl.load(ends + experts - 1)
    first = tl.program_id(0) * ROWS
    for r in range(tl.maximum(first, end), tl.minimum(first + ROWS, rows)):
        for c in range(0, width, TILE):
            at = c + tl.arange(0, TILE)
            row = tl.zeros((TILE,), tl.int64) + r
            tl.store(y + row * width + at, tl.zeros((TILE,), y.dtype.element_ty), mask=at < width)


@triton.jit
def zero_empty_kernel(ends, y, size, PARTS: tl.constexpr, TILE: tl.constexpr):
    """y[e] = 0, `size` elements, for every e with ends[e] == ends[e - 1]."""
    expert = tl.program_id(0)
    end = tl.load(ends + expert)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if start == end:
        for c in range(tl.program_id(1) * TILE, size, PARTS * TILE):
            at = c + tl.arange(0, TILE)
            nothing = tl.zeros((TILE,), y.dtype.element_ty)
            tl.store(y + expert.to(tl.int64) * size + at, nothing, mask=at < size)


def zero_tail_(y: torch.Tensor, ends: torch.Tensor) -> None:
    """y (T, N), contiguous: rows from ends[-1] on become zero. ends: (E,) int32."""
    if y.numel():
        _tail(ends.shape[0], *y.shape).run((ends, y), y.get_device())


def zero_empty_(y: torch.Tensor, ends: torch.Tensor) -> None:
    """y (E, ...), contiguous: entries of groups without rows become zero. ends: (E,) int32."""
    if y.numel():
        _empty(y.shape[0], y.numel() // y.shape[0]).run((ends, y), y.get_device())


@lru_cache(maxsize=4096)
def _tail(experts: int, rows: int, width: int) -> CompiledLaunch:
    return CompiledLaunch(zero_tail_kernel, -(-rows // ROWS), (experts, rows, width, ROWS, TILE), WARPS)


@lru_cache(maxsize=4096)
def _empty(experts: int, size: int) -> CompiledLaunch:
    return CompiledLaunch(zero_empty_kernel, (experts, PARTS, 1), (size, PARTS, TILE), WARPS)


__all__ = ["zero_empty_", "zero_tail_"]
