"""Maxima and minima of tiles, exactly, on bit patterns; see `reference.statistics`.

A magnitude orders like its pattern, NaN above infinity, so an integer maximum is exact and reports NaN.
"""

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, MAGNITUDE, NAN, SIGN, bits_of, float_of, order_key

# Identities of minimum and maximum over order keys.
HIGHEST_KEY = tl.constexpr(0x7FFFFFFF)
LOWEST_KEY = tl.constexpr(-0x80000000)
# Blocks of so many elements are in all lanes of a warp, which have so many neighbours.
LONG, NEIGHBOURS = tl.constexpr(1024), tl.constexpr(8)


@triton.jit
def larger(a, b):
    """The larger of two floats; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absmax(v, FINITE_ONLY: tl.constexpr, NATIVE: tl.constexpr):
    """Pattern of the largest magnitude of each row of a tile, (blocks, 1); elements that do not exist are 0.

    NATIVE: by float maxima that keep NaN, which have a free absolute value on the GPU.
    """
    if NATIVE and not FINITE_ONLY:
        return bits_of(tl.reduce(tl.abs(v), 1, larger, keep_dims=True)) & MAGNITUDE
    else:
        magnitude = bits_of(v) & MAGNITUDE
        if FINITE_ONLY:
            magnitude = tl.where(magnitude < INFINITY, magnitude, 0)
        return tl.max(magnitude, axis=1, keep_dims=True)


@triton.jit
def block_absmax(v, NATIVE: tl.constexpr):
    """`absmax` of blocks that may be long: one instruction finds an integer maximum over a warp, ten find that of floats."""
    if NATIVE and v.shape[1] >= LONG:
        parts = tl.reshape(tl.abs(v), (v.shape[0], v.shape[1] // NEIGHBOURS, NEIGHBOURS))
        return tl.max(bits_of(tl.reduce(parts, 2, larger)) & MAGNITUDE, axis=1, keep_dims=True)
    else:
        return absmax(v, False, NATIVE)


@triton.jit
def _smaller(a, b):
    """The smaller of two floats; NaN if either is."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(v, inside, NATIVE: tl.constexpr):
    """Order key of the smallest value of each row, (blocks, 1); any key where the row has a NaN."""
    if NATIVE:
        v = tl.where(inside, v, float("inf"))
        return order_key(bits_of(tl.reduce(v, 1, _smaller, keep_dims=True)))
    else:
        return lowest_key(v, inside)


@triton.jit
def maximum(v, inside, NATIVE: tl.constexpr):
    """Order key of the largest value of each row, (blocks, 1); any key where the row has a NaN."""
    if NATIVE:
        v = tl.where(inside, v, float("-inf"))
        return order_key(bits_of(tl.reduce(v, 1, larger, keep_dims=True)))
    else:
        return highest_key(v, inside)


@triton.jit
def lowest_key(v, inside):
    """Order key of the smallest value of each row, (blocks, 1)."""
    key = order_key(bits_of(v))
    if inside is not None:
        key = tl.where(inside, key, HIGHEST_KEY)
    return tl.min(key, axis=1, keep_dims=True)


@triton.jit
def highest_key(v, inside):
    """Order key of the largest value of each row, (blocks, 1)."""
    key = order_key(bits_of(v))
    if inside is not None:
        key = tl.where(inside, key, LOWEST_KEY)
    return tl.max(key, axis=1, keep_dims=True)


@triton.jit
def value_of_key(key, largest, WITH_ZERO: tl.constexpr, LOW: tl.constexpr):
    """float32 minimum (LOW) or maximum of a block; NaN where it holds one; WITH_ZERO widens the range to hold +0."""
    b = order_key(key)
    if WITH_ZERO and LOW:
        b = tl.where(b < 0, b, 0)
        # A lone -0 is no minimum below zero.
        b = tl.where(b == SIGN, 0, b)
    elif WITH_ZERO:
        b = tl.where(b < 0, 0, b)
    return float_of(tl.where(largest > INFINITY, NAN, b))
