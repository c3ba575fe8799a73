"""Blocks of rows are quantized and, unless codes are wanted, dequantized at once, compiled by Numba: amax, scale, element.
Scales may be given.

Every step is the operation of float32 that the record names, rounded once, so results have the reference's bits. Where they
might not (NaN, infinities, scales near the ends of float32) the loop says so of the row, and what it wrote there counts for
nothing. Kernels are compiled, kept and named as those of `fast.cpu.loops.gemv` are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numba import njit, types

from fast.cpu.loops.gemv import compile_once

#: How a block's scale is found: amax over a target; from a table by amax; amax over a target and an outer scale, then stored.
RATIO, TABLE, OUTER = 0, 1, 2
#: No `fastmath`: sums that round to a multiple would be taken away.
OPTIONS = {"nogil": True, "error_model": "numpy"}
SOURCE = Path(__file__).read_bytes()


@dataclass(frozen=True)
class Floats:
    """The numbers of a float format: mantissa bits, exponent of the smallest normal one, the largest."""

    mantissa: int
    exponent: int
    largest: float


@dataclass(frozen=True)
class Rounding:
    """What a kernel is compiled for.

    half: of bfloat16, else of float32; scale: RATIO, TABLE or OUTER; target, floor: of block scales, a floor of 0 is none;
    floors_zero: the floor stands for a scale of 0 alone; is_tensor: one amax is of all blocks; given: scales and zero points
    are read; short_scale: each step of a RATIO is rounded to bfloat16; short: each step of an element is; divides: elements by
    their scale, else they are multiplied by its reciprocal; positive: a quotient of -0 is 0; floats: of elements, or None, and
    integers from low to high; has_zero: with zero points, the range is widened to hold 0; codes: codes, scales and zero points
    are written, else numbers; stored: of OUTER, what block scales are stored in.
    """

    half: bool
    scale: int
    target: float
    floor: float = 0.0
    floors_zero: bool = False
    is_tensor: bool = False
    given: bool = False
    short_scale: bool = False
    short: bool = False
    divides: bool = False
    positive: bool = False
    floats: Floats | None = None
    low: int = 0
    high: int = 0
    has_zero: bool = False
    codes: bool = False
    stored: Floats | None = None


@lru_cache(maxsize=256)
def compiled(rule: Rounding) -> Callable[..., None]:
    """`kernel(x, made, scale, zero, table, whole, plain, first, last)`, rows first to last.

    All arrays are contiguous. x: int16 or int32 (rows, blocks, size), the bits of numbers; made: of the same shape, such bits
    or, for codes, int8; scale, zero: float32 and int8, (rows, blocks) for codes, of given ones (rows or 1, blocks or 1), else
    neither read nor written; table: float32 (2**15,), of TABLE scales by amax rounded to odd in bfloat16; whole: float32, amax
    of all rows where `is_tensor`, of OUTER the outer scale; plain: uint8 (rows,), 1 where a row's results have the reference's
    bits.
    """
    bits = types.int16 if rule.half else types.int32
    result = types.int8 if rule.codes else bits
    single, ends = types.float32, (types.intp, types.intp)
    return _njit(
        _kernel(rule),
        repr(rule),
        types.void(
            bits[:, :, ::1], result[:, :, ::1], single[:, ::1], types.int8[:, ::1], single[::1], single, types.uint8[::1], *ends
        ),
    )  # fmt: skip


@lru_cache(maxsize=2)
def compiled_largest(half: bool) -> Callable[..., None]:
    """`kernel(x, largest, first, last)`: the largest magnitude of each row of x (rows, K), as its bits (rows,)."""
    bits = types.int16 if half else types.int32
    signature = types.void(bits[:, ::1], bits[::1], types.intp, types.intp)
    return _njit(_largest_kernel(half), f"largest {half}", signature)


def _njit(kernel: Callable[..., None], name: str, signature: types.Type) -> Callable[..., None]:
    return compile_once(kernel, "rounding", SOURCE + name.encode(), signature, OPTIONS)


def _largest_kernel(half: bool) -> Callable[..., None]:
    word, mask = (np.int16, 0x7FFF) if half else (np.int32, 0x7FFFFFFF)

    def kernel(x, largest, first, last):  # type: ignore[no-untyped-def]
        for n in range(first, last):
            top = word(0)
            for j in range(x.shape[1]):
                top = max(top, word(x[n, j] & mask))
            largest[n] = top

    return kernel


@njit(inline="always", **OPTIONS)
def _nearest(magnitude, mantissa, exponent, largest):  # type: ignore[no-untyped-def]
    """A number of a float format: adding what has the wanted unit in its last place rounds to nearest, ties to even."""
    bits = np.float32(magnitude).view(np.int32)
    unit = np.int32(
        max(np.int32(bits & 0x7F800000), np.int32((exponent + 127) << 23)) + ((23 - mantissa) << 23)
    )
    constant = unit.view(np.float32)
    rounded = np.float32(np.float32(magnitude + constant) - constant)
    return rounded if rounded < largest else largest


@njit(inline="always", **OPTIONS)
def _integer(number):  # type: ignore[no-untyped-def]
    """The nearest integer, ties to even; beyond 2**14 any integer beyond it."""
    limit, constant = np.float32(16384), np.float32(12582912)
    number = number if number < limit else limit
    number = number if number > -limit else -limit
    return np.float32(np.float32(number + constant) - constant)


@njit(inline="always", **OPTIONS)
def bfloat16_rounded(number):  # type: ignore[no-untyped-def]
    """The nearest bfloat16, ties to even."""
    bits = np.float32(number).view(np.int32)
    bits = np.int32(bits + np.int32(0x7FFF) + np.int32((bits >> 16) & 1))
    return np.int32(bits & np.int32(-0x10000)).view(np.float32)


def _kernel(rule: Rounding) -> Callable[..., None]:
    """All that a kernel closes over are numbers: they tell Numba's files on disk apart, and become constants."""
    half, way, is_tensor, has_zero, codes = rule.half, rule.scale, rule.is_tensor, rule.has_zero, rule.codes
    is_float, one, short_scale, short = rule.floats is not None, np.float32(1), rule.short_scale, rule.short
    given, divides, positive, floors_zero = rule.given, rule.divides, rule.positive, rule.floors_zero
    e, s = rule.floats or Floats(0, 0, 0.0), rule.stored or Floats(0, 0, 0.0)
    mantissa, exponent, most = e.mantissa, e.exponent, np.float32(e.largest)
    beyond = np.float32(min(2 * e.largest, 2.0**127))
    s_mantissa, s_exponent, s_most = s.mantissa, s.exponent, np.float32(s.largest)
    target, floor = np.float32(rule.target), np.float32(rule.floor)
    low, high = np.float32(rule.low), np.float32(rule.high)
    word, shift, mask = (np.int16, 16, 0x7FFF) if half else (np.int32, 0, 0x7FFFFFFF)
    far, tiny, widest = np.float32(2.0**120), np.float32(2.0**-126), np.float32(2.0**100)

    def kernel(x, made, scale, zero, table, whole, plain, first, last):  # type: ignore[no-untyped-def]
        for n in range(first, last):
            is_plain = np.uint8(1)
            for b in range(x.shape[1]):
                row, column = (n if scale.shape[0] > 1 else 0), (b if scale.shape[1] > 1 else 0)
                least, top = word(0), word(0)
                if has_zero and not given:
                    # As integers that order as numbers do.
                    for j in range(x.shape[2]):
                        key = word(x[n, b, j] ^ (word(x[n, b, j] >> (31 - shift)) & mask))
                        least, top = min(least, key), max(top, key)
                elif not is_tensor:
                    for j in range(x.shape[2]):
                        top = max(top, word(x[n, b, j] & mask))
                amax = whole if is_tensor else np.int32(np.int32(top) << shift).view(np.float32)
                begin = np.float32(0)
                if has_zero and not given:
                    least = word(least ^ (word(least >> (31 - shift)) & mask))
                    begin = np.int32(np.int32(least) << shift).view(np.float32)
                if given:
                    s = scale[row, column]
                    if not (s >= floor and s < widest):
                        is_plain = np.uint8(0)
                elif way == TABLE:
                    index = top if half else (top >> 16) | np.int32((top & 0xFFFF) != 0)
                    s = table[index]
                elif way == OUTER:
                    s = _nearest(
                        np.float32(np.float32(amax / target) / whole), s_mantissa, s_exponent, s_most
                    )
                    s = np.float32(whole * (s if s > floor else floor))
                else:
                    s = np.float32(amax - begin)
                    s = bfloat16_rounded(s) if short_scale else s
                    s = np.float32(s / target)
                    s = bfloat16_rounded(s) if short_scale else s
                    is_low = s == 0 if floors_zero else not s > floor
                    s = floor if is_low else s
                if not (amax < far and begin > -far and s >= tiny):
                    is_plain = np.uint8(0)
                inverse, offset = np.float32(one / s), np.float32(0)
                inverse = bfloat16_rounded(inverse) if short else inverse
                if has_zero and given:
                    offset = np.float32(zero[row, column])
                elif has_zero:
                    steps = np.float32(begin / s)
                    offset = np.float32(low - _integer(bfloat16_rounded(steps) if short_scale else steps))
                    offset = offset if offset > low else low
                    offset = offset if offset < high else high
                if codes and not given:
                    scale[n, b] = s
                    if has_zero:
                        zero[n, b] = np.int8(offset)
                for j in range(x.shape[2]):
                    number = np.int32(np.int32(x[n, b, j]) << shift).view(np.float32)
                    number = np.float32(number / s) if divides else np.float32(number * inverse)
                    number = bfloat16_rounded(number) if short else number
                    if is_float:
                        bits = np.float32(number).view(np.int32)
                        if positive:
                            bits = bits if number != 0 else np.int32(0)
                        magnitude = np.int32(bits & 0x7FFFFFFF).view(np.float32)
                        magnitude = magnitude if magnitude < beyond else beyond
                        number = np.float32(_nearest(magnitude, mantissa, exponent, most) * s)
                        result = np.int32(number.view(np.int32) | np.int32(bits & np.int32(-0x80000000)))
                    else:
                        number = np.float32(_integer(number) + offset)
                        number = number if number > low else low
                        number = number if number < high else high
                        value = np.float32(np.float32(number - offset) * s)
                        result = np.int32(number) if codes else value.view(np.int32)
                    if half and not codes:
                        result = np.int32(np.int32(result + 0x7FFF) + np.int32((result >> 16) & 1)) >> 16
                    made[n, b, j] = result
            plain[n] = is_plain

    return kernel


__all__ = ["OUTER", "RATIO", "TABLE", "Floats", "Rounding", "compiled", "compiled_largest"]
