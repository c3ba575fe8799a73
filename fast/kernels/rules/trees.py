"""Sums in the order of `reference.quantize.statistics.tree_sum`, and what RMSNorm sums up."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import read
from fast.kernels.sm90.bf16x2 import floats, narrowed

# Levels of a tree over a tile, or over the parts of the longest row.
MOST_LEVELS = tl.constexpr(14)


@triton.jit
def tree_sum(v):
    """Sums of the rows of (P, S), S a power of two, (P, 1): neighbours first, as `reference.quantize.statistics.tree_sum`."""
    COUNT: tl.constexpr = v.shape[0]
    for _ in tl.static_range(MOST_LEVELS):
        if v.shape[1] > 1:
            v = tl.sum(tl.reshape(v, (COUNT, v.shape[1] // 2, 2)), axis=2)
    return v


@triton.jit
def summed(x, residual, at, inside, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr):
    """x, or x + residual rounded to their dtype, in that dtype."""
    v = read(x + at, inside)
    if residual is not None:
        v = narrowed(floats(v, HAS_PTX) + floats(read(residual + at, inside), HAS_PTX), DTYPE, HAS_PTX)
    return v
