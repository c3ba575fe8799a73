"""Maxima and minima of tiles, exactly, on bit patterns; see `reference.quantize.scales`.

A magnitude orders like its pattern, NaN above infinity, so an integer maximum is exact and reports NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, MAGNITUDE, NAN, bits_of, float_of, order_key, read, read_once, widened
from fast.kernels.sm90.bf16x2 import floats, narrowed
from fast.kernels.sm90.integers import range_of_tile

# Sums in the order of `reference.quantize.scales.tree_sum`, and what RMSNorm sums up.

# Levels of a tree over a tile, or over the parts of the longest row.
MOST_LEVELS = tl.constexpr(14)


@triton.jit
def tree_sum(v):
    """Sums of the rows of (P, S), S a power of two, (P, 1): neighbours first, as `reference.quantize.scales.tree_sum`."""
    COUNT: tl.constexpr = v.shape[0]
    for _ in tl.static_range(MOST_LEVELS):
        if v.shape[1] > 1:
            v = tl.sum(tl.reshape(v, (COUNT, v.shape[1] // 2, 2)), axis=2)
    return v


@triton.jit
def summed(x, residual, at, inside, DTYPE: tl.constexpr, HAS_PTX: tl.constexpr, EVICT: tl.constexpr):
    """x, or x + residual rounded to their dtype, in that dtype. EVICT: how the L2 cache keeps x."""
    v = read_once(x + at, inside, EVICT)
    if residual is not None:
        v = narrowed(floats(v, HAS_PTX) + floats(read(residual + at, inside), HAS_PTX), DTYPE, HAS_PTX)
    return v


# Blocks of so many elements are in all lanes of a warp, which have so many neighbours.
LONG, NEIGHBOURS = tl.constexpr(1024), tl.constexpr(8)


@triton.jit
def larger(a, b):
    """The larger of two floats; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    """The smaller of two floats; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax(v, FINITE_ONLY: tl.constexpr, HAS_PTX: tl.constexpr):
    """Pattern of the largest magnitude of each row of a tile, (blocks, 1); elements that do not exist are 0.

    HAS_PTX: by float maxima that keep NaN, which have a free absolute value on the GPU.
    """
    if HAS_PTX and not FINITE_ONLY:
        return bits_of(tl.reduce(tl.abs(v), 1, larger, keep_dims=True)) & MAGNITUDE
    else:
        magnitude = bits_of(v) & MAGNITUDE
        if FINITE_ONLY:
            magnitude = tl.where(magnitude < INFINITY, magnitude, 0)
        return tl.max(magnitude, axis=1, keep_dims=True)


@triton.jit
def block_absmax(v, HAS_PTX: tl.constexpr):
    """`absmax` of blocks that may be long: one instruction finds an integer maximum over a warp, ten find that of floats."""
    if HAS_PTX and v.shape[1] >= LONG:
        parts = tl.reshape(tl.abs(v), (v.shape[0], v.shape[1] // NEIGHBOURS, NEIGHBOURS))
        return tl.max(bits_of(tl.reduce(parts, 2, larger)) & MAGNITUDE, axis=1, keep_dims=True)
    else:
        return absmax(v, False, HAS_PTX)


@triton.jit
def value_range(tile, inside, SIGNS_NAN: tl.constexpr, WITH_ZERO: tl.constexpr, HAS_PTX: tl.constexpr):
    """Patterns of the largest magnitude, the minimum and the maximum of each row, (blocks, 1).

    Where a row has a NaN the first is one, and the others are anything. Elements that do not exist are 0, which a range
    that is widened to hold it does not mind. A tile of 16-bit floats has neighbours of a row in one register.
    """
    below, above = tile, tile
    # Floats take the fillers in any case: without them the assembler keeps so many at a time that masked tiles spill.
    if not WITH_ZERO or tile.dtype == tl.float32:
        below, above = _without(tile, inside, "inf"), _without(tile, inside, "-inf")
    if HAS_PTX and tile.dtype != tl.float32 and tile.shape[1] > 1:
        largest, low, high = range_of_tile(below, above)
    else:
        if HAS_PTX:
            low = bits_of(tl.reduce(widened(below), 1, _smaller, keep_dims=True))
            high = bits_of(tl.reduce(widened(above), 1, larger, keep_dims=True))
        else:
            key = order_key(bits_of(widened(below, SIGNS_NAN)))
            low = order_key(tl.min(key, axis=1, keep_dims=True))
            key = order_key(bits_of(widened(above, SIGNS_NAN)))
            high = order_key(tl.max(key, axis=1, keep_dims=True))
        largest = tl.maximum(low & MAGNITUDE, high & MAGNITUDE)
    return largest, low, high


@triton.jit
def _without(tile, inside, FILLER: tl.constexpr):
    """A tile, with a filler where an element does not exist."""
    return tl.where(inside, tile, tl.full((), float(FILLER), tl.float32).to(tile.dtype))


@triton.jit
def bound(b, largest, WITH_ZERO: tl.constexpr, LOW: tl.constexpr):
    """float32 minimum (LOW) or maximum of a block; NaN where it holds one; WITH_ZERO widens the range to hold zero.

    A minimum of -0 stays, for nothing that is made of it tells the two zeros apart: the range is high - low, where high is no
    -0; bounds over a target count by magnitude; codes of zero points are integers; and a zero point that is a number is low +
    scale * middle, whose second term is no -0 (`middle` is not negative).
    """
    if WITH_ZERO and LOW:
        b = tl.where(b < 0, b, 0)
    elif WITH_ZERO:
        b = tl.where(b < 0, 0, b)
    return float_of(tl.where(largest > INFINITY, NAN, b))
