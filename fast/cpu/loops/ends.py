"""What stands before and behind the products of layers on a CPU, compiled by Numba: a weight's scales looked at, and sums of
codes scaled. Kernels are compiled, kept and named as those of `fast.cpu.loops.gemv` are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
from numba import njit, types

from fast.cpu.loops.gemv import compile_once
from fast.cpu.loops.rounding import bfloat16_rounded

#: No `fastmath`: a product and a sum contracted would round once.
OPTIONS = {"nogil": True, "error_model": "numpy"}
SOURCE = b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("ends", "rounding"))
VECTOR = types.float32[::1]


@lru_cache(maxsize=2)
def compiled_scales(rounds: bool) -> Callable[..., None]:
    """`kernel(scale, result, ends)`: scales (n,) float32, rounded to bfloat16 where it `rounds`, and the least and the largest
    of them (2,), -infinity and infinity where one is NaN."""
    signature = types.void(VECTOR, VECTOR, VECTOR)
    return compile_once(_scales(rounds), "ends", SOURCE + str(rounds).encode(), signature, OPTIONS)


def _scales(rounds: bool) -> Callable[..., None]:
    infinity = np.float32(np.inf)

    def kernel(scale, result, ends):  # type: ignore[no-untyped-def]
        low, high, is_number = infinity, -infinity, True
        for at in range(len(scale)):
            s = scale[at]
            is_number &= s == s
            s = bfloat16_rounded(s) if rounds else s
            result[at] = s
            low, high = min(low, s), max(high, s)
        ends[0] = low if is_number else -infinity
        ends[1] = high if is_number else infinity

    return kernel


@lru_cache(maxsize=2)
def compiled_look(scale_codes: bool) -> Callable[..., None]:
    """`kernel(x, scale, table, zero, ends)`: the largest magnitude of x, the largest and the least of scale, the largest of
    zero, float32 (4,), NaN where one is NaN, 0 of none. All are vectors of float32; scale is where `scale_codes` uint8, and
    counts as all entries of the table up to its largest code."""
    scale = types.uint8[::1] if scale_codes else VECTOR
    signature = types.void(VECTOR, scale, VECTOR, VECTOR, VECTOR)
    return compile_once(_look(scale_codes), "look", SOURCE + str(scale_codes).encode(), signature, OPTIONS)


def _look(scale_codes: bool) -> Callable[..., None]:
    def kernel(x, scale, table, zero, ends):  # type: ignore[no-untyped-def]
        found = ends.view(np.int32)
        found[0], found[3] = largest(x), largest(zero)
        if scale_codes:
            most = np.uint8(0)
            for at in range(len(scale)):
                most = max(most, scale[at])
            scale = table[: np.intp(most) + 1]
        found[1], found[2] = largest(scale), least(scale)

    return kernel


@njit(**OPTIONS)
def largest(x):  # type: ignore[no-untyped-def]
    """The largest magnitude as its bits, in which NaN is larger than infinity."""
    bits, most = x.view(np.int32), np.int32(0)
    for at in range(len(bits)):
        most = max(most, np.int32(bits[at] & 0x7FFFFFFF))
    return most


@njit(**OPTIONS)
def least(x):  # type: ignore[no-untyped-def]
    """The smallest magnitude as its bits; the largest int32 of none."""
    bits, fewest = x.view(np.int32), np.int32(0x7FFFFFFF)
    for at in range(len(bits)):
        fewest = min(fewest, np.int32(bits[at] & 0x7FFFFFFF))
    return fewest


@lru_cache(maxsize=2)
def compiled_sums(has_zero: bool) -> Callable[..., None]:
    """`kernel(sums, scale, zero, whole, weight_scale, bias, out)`: what integer sums (M, N) int32 stand for, float32 (M, N).

    scale, zero: float32 and int8 (M,), of the rows; weight_scale: float32 (N or 1,); whole: int32 (N,), sums of the weight's
    codes, read with zero where `has_zero`; bias: float32 (N,), or of no element. The sum less zero * whole as float32, times
    scale, times weight_scale, plus bias, each rounded to float32: `reference.linear` with accumulation "blocked", one block.
    """
    byte, word = types.int8[::1], types.int32[::1]
    signature = types.void(types.int32[:, ::1], VECTOR, byte, word, VECTOR, VECTOR, types.float32[:, ::1])
    return compile_once(_sums(has_zero), "sums", SOURCE + str(has_zero).encode(), signature, OPTIONS)


def _sums(has_zero: bool) -> Callable[..., None]:
    def kernel(sums, scale, zero, whole, weight_scale, bias, out):  # type: ignore[no-untyped-def]
        for m in range(sums.shape[0]):
            s = scale[m]
            for n in range(sums.shape[1]):
                total = sums[m, n]
                if has_zero:
                    total = np.int32(total - np.int32(np.int32(zero[m]) * whole[n]))
                y = np.float32(np.float32(total) * s)
                y = np.float32(y * weight_scale[n if len(weight_scale) > 1 else 0])
                if len(bias):
                    y = np.float32(y + bias[n])
                out[m, n] = y

    return kernel


__all__ = ["compiled_look", "compiled_scales", "compiled_sums"]
