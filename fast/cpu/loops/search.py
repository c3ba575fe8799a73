"""The error of each block under a candidate's scales, and which candidate has the least so far, compiled by Numba.

Elements are rounded by the float32 operations of `reference.calibration.nearest`, each rounded once; errors are float64, their
sums in any order. Kernels are compiled, kept and named as those of `fast.cpu.loops.gemv` are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numba import types

from fast.cpu.loops.gemv import compile_once

OPTIONS = {"fastmath": {"reassoc"}, "nogil": True, "error_model": "numpy"}
SOURCE = Path(__file__).read_bytes()


class Rule(NamedTuple):
    """What a kernel holds as constants. low, high: of integers, None for float elements, which a table rounds. unit: of an
    integer. has_zero: zero points are codes. divides, encodes: whether elements, and values, are divided by their factor.
    cubes: whether errors are |d|^3, not d^2."""

    low: float | None
    high: float
    unit: float
    has_zero: bool
    divides: bool
    encodes: bool
    cubes: bool


@lru_cache(maxsize=64)
def compiled(rule: Rule) -> Callable[..., None]:
    """`kernel(x, weights, factor, scale, zero, table, number, least, index, first, last)`, rows first to last.

    All arrays are contiguous. x: float32 (N, blocks, block); weights: float64 (blocks, block); factor, scale: float32
    (N, blocks); zero: the same, or of no rows; table: float32 (65536,), the values of float elements by their upper half
    rounded to odd, or of no entries; least: float64 (N, blocks), index: int32 of its shape: both are replaced, index by
    `number`, where this candidate's error is smaller.
    """
    plane, row = types.float32[:, ::1], types.float32[::1]
    signature = types.void(
        types.float32[:, :, ::1], types.float64[:, ::1], plane, plane, plane, row, types.int32, types.float64[:, ::1],
        types.int32[:, ::1], types.int64, types.int64,
    )  # fmt: skip
    return compile_once(_kernel(rule), "search", SOURCE + repr(rule).encode(), signature, OPTIONS)


def _kernel(rule: Rule) -> Callable[..., None]:
    is_integer, has_zero, cubes = rule.low is not None, rule.has_zero, rule.cubes
    divides, encodes, has_unit = rule.divides, rule.encodes, rule.unit != 1.0
    low, high = np.float32(rule.low or 0.0), np.float32(rule.high)
    unit, inverse = np.float32(rule.unit), np.float32(1.0 / rule.unit)

    def kernel(x, weights, factor, scale, zero, table, number, least, index, first, last):  # type: ignore[no-untyped-def]
        for n in range(first, last):
            for b in range(x.shape[1]):
                f, s = factor[n, b], scale[n, b]
                z = zero[n, b] if has_zero else np.float32(0)
                total = 0.0
                for j in range(x.shape[2]):
                    scaled = np.float32(x[n, b, j] / f) if divides else np.float32(x[n, b, j] * f)
                    if is_integer:
                        if has_unit:
                            scaled = np.float32(scaled * inverse)
                        value = np.float32(np.rint(scaled))
                        if has_zero:
                            value = np.float32(value + z)
                        value = value if value > low else low
                        value = value if value < high else high
                        if has_zero:
                            value = np.float32(value - z)
                        if has_unit:
                            value = np.float32(value * unit)
                    else:
                        bits = np.float32(scaled).view(np.uint32)
                        odd = (bits | ((bits & np.uint32(0xFFFF)) + np.uint32(0xFFFF))) >> np.uint32(16)
                        value = table[odd]
                    value = np.float32(value / s) if encodes else np.float32(value * s)
                    off = abs(np.float64(value) - np.float64(x[n, b, j]))
                    total += (off * off * off if cubes else off * off) * weights[b, j]
                if total < least[n, b]:
                    least[n, b], index[n, b] = total, number

    return kernel


__all__ = ["Rule", "compiled"]
