"""torchao's powers of two through a float32 logarithm, reproduced with integers.

torchao 0.18 computes exp2(floor(log2(s))) and ceil(log2(s)) in float32. The rounded logarithm of a value just below 2**k is
k itself, and so is that of one just above: the floor is one too high there, the ceiling one too low. How close is "just"
follows from the spacing of float32 around k: log2(2**k (1 + f)) rounds to k when log2(1 + f) is at most half that spacing.
The tables below hold, for each k, how many float32 steps that is. They assume a correctly rounded log2.
"""

from __future__ import annotations

from functools import lru_cache
from math import expm1, floor, log, log2

import numpy as np

from reference.arrays.namespace import Array, Namespace
from reference.arrays.softfloat import normalized
from reference.arrays.widen import INFINITY, MANTISSA

LOWEST = -149
HIGHEST = 128


def floor_log2_float32(ns: Namespace, bits: Array) -> Array:
    """2**floor(log2(s)) as bit patterns of positive float32 s, with log2 rounded to float32; 0, inf and NaN pass."""
    exponent, significand = normalized(ns, bits)
    steps = ns.take(ns.constant(steps_below(), bits), exponent + 1 - LOWEST)
    near = (0x1000000 - significand) <= steps
    exponent = exponent + ns.astype(near, "int32")
    subnormal = 1 << ns.minimum(ns.maximum(exponent + 149, 0), 22)
    power = ns.where(exponent < -126, subnormal, (ns.maximum(exponent, -127) + 127) << 23)
    return ns.where((bits == 0) | (bits >= INFINITY), bits, power)


def ceil_log2_float32(ns: Namespace, bits: Array) -> Array:
    """ceil(log2(s)) as int32 for positive float32 s, with log2 rounded to float32; for 0 and NaN some integer."""
    exponent, significand = normalized(ns, bits & 0x7FFFFFFF)
    index = ns.minimum(ns.maximum(exponent, LOWEST), HIGHEST) - LOWEST
    steps = ns.take(ns.constant(steps_above(), bits), index)
    fraction = significand & MANTISSA
    return exponent + ns.astype(fraction > steps, "int32")


def _half_spacing(k: int, toward_zero: bool) -> float:
    """Half the distance from float32(k) to its neighbour in the given direction."""
    if k == 0:
        return 0.0
    magnitude = abs(k)
    spacing = 2.0 ** (floor(log2(magnitude)) - 23)
    return spacing / (4 if toward_zero and magnitude & (magnitude - 1) == 0 else 2)


@lru_cache
def steps_below() -> np.ndarray:
    """For 2**k: how many steps of 2**(k-24) below it the logarithm still rounds to k. Index k - LOWEST."""
    limits = [_half_spacing(k, k > 0) for k in range(LOWEST, HIGHEST + 2)]
    return _constant([floor(-expm1(-h * log(2)) * 2**24) for h in limits])


@lru_cache
def steps_above() -> np.ndarray:
    """For 2**k: how many steps of 2**(k-23) above it the logarithm still rounds to k. Index k - LOWEST."""
    limits = [_half_spacing(k, k < 0) for k in range(LOWEST, HIGHEST + 1)]
    return _constant([floor(expm1(h * log(2)) * 2**23) for h in limits])


def _constant(values: list[int]) -> np.ndarray:
    """A read-only table: namespaces may cache it on devices."""
    table = np.array(values, np.int32)
    table.setflags(write=False)
    return table
