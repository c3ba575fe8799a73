"""Correctly rounded float32 multiplication, division, addition and square root on bit patterns, the same in every library.

NumPy and torch on CPU compute IEEE 754 binary32, so their own operators are used. XLA does not (it flushes subnormals,
replaces division by reciprocal multiplication and contracts a*b+c into one rounding), so under JAX the same results come from
int32 arithmetic: products and quotients of the 24-bit significands with a sticky bit, rounded once. The square root is
computed in integers everywhere: not every library's own is correctly rounded.

All functions take and return float32 bit patterns as int32 and broadcast. A NaN result is always 0x7fc00000: hardware
differs in sign and payload of the NaN results, so the specification fixes one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from reference.arrays.namespace import Array, Namespace
from reference.arrays.widen import INFINITY, MAGNITUDE, MANTISSA, NAN, SIGN

DIGIT_BITS = 13  # twice that and the leading digit: 24 significant bits and two to round; the remainder is the sticky bit
ROOT_DIGITS = 25  # 24 significant bits and one to round; no root lies halfway between two floats


def multiply(ns: Namespace, a: Array, b: Array) -> Array:
    """a * b."""
    return _native(ns, a, b, lambda x, y: x * y) if ns.ieee else _multiply(ns, a, b)


def divide(ns: Namespace, a: Array, b: Array) -> Array:
    """a / b; x/0 is infinity, 0/0 and inf/inf are NaN."""
    return _native(ns, a, b, lambda x, y: x / y) if ns.ieee else _divide(ns, a, b)


def add(ns: Namespace, a: Array, b: Array) -> Array:
    """a + b."""
    return _native(ns, a, b, lambda x, y: x + y) if ns.ieee else _add(ns, a, b)


def subtract(ns: Namespace, a: Array, b: Array) -> Array:
    """a - b."""
    return add(ns, a, b ^ SIGN)


def square_root(ns: Namespace, a: Array) -> Array:
    """sqrt(a); -0 stays, infinity stays, negative values give NaN."""
    exponent, significand = normalized(ns, a & MAGNITUDE)
    # An even exponent halves exactly; the significand, 25 or 26 bits with a last 0, is read in pairs.
    odd = exponent & 1
    root, remainder = _root_digits(ns, significand << (odd + 1))
    rounded = _compose(ns, a < 0, (exponent - odd) >> 1, (root << 2) | ns.where(remainder != 0, 1, 0))
    result = ns.where((a & MAGNITUDE) == 0, a, rounded)
    return _patch(ns, result, a < 0, a == INFINITY, is_nan(a) | ((a < 0) & (a != SIGN)))


def _root_digits(ns: Namespace, radicand: Array) -> tuple[Array, Array]:
    """25 binary digits of the root of radicand * 2**24, an integer below 2**50, and the remainder, digit by digit."""
    root = remainder = radicand & 0
    for place in range(ROOT_DIGITS):
        # Two digits of the radicand make one of the root: 13 pairs, then zeros.
        shift = 24 - 2 * place
        pair = (radicand >> shift) & 3 if shift >= 0 else 0
        remainder = (remainder << 2) | pair
        trial = (root << 2) | 1
        fits = remainder >= trial
        remainder = ns.where(fits, remainder - trial, remainder)
        root = (root << 1) | ns.where(fits, 1, 0)
    return root, remainder


def bits_of(value: float) -> int:
    """float32 bit pattern of a Python number as a signed int, for constants."""
    return int(np.float32(value).view(np.int32))


def is_nan(bits: Array) -> Array:
    """Whether the bit pattern is a NaN."""
    return (bits & MAGNITUDE) > INFINITY


def order_key(ns: Namespace, bits: Array) -> Array:
    """int32 that sorts as the float does (-0 just under +0); its own inverse."""
    return ns.where(bits < 0, bits ^ MAGNITUDE, bits)


def _native(ns: Namespace, a: Array, b: Array, operation: Callable[[Array, Array], Array]) -> Array:
    with np.errstate(all="ignore"):
        result = ns.bitcast(operation(ns.bitcast(a, "float32"), ns.bitcast(b, "float32")), "int32")
    return ns.where(is_nan(result), NAN, result)


def normalized(ns: Namespace, magnitude: Array) -> tuple[Array, Array]:
    """(exponent, 24-bit significand): |value| = significand * 2**(exponent - 23), zero has significand 0."""
    # A subnormal is an integer below 2**23; its float conversion is exact and normalises it.
    subnormal = magnitude < 0x00800000
    shifted = ns.bitcast(ns.astype(magnitude & MANTISSA, "float32"), "int32")
    bits = ns.where(subnormal, shifted, magnitude)
    exponent = (bits >> 23) - ns.where(subnormal, 127 + 149, 127)
    significand = ns.where(magnitude == 0, 0, (bits & MANTISSA) | 0x00800000)
    return exponent, significand


def _compose(ns: Namespace, negative: Array, exponent: Array, significand: Array) -> Array:
    """Round significand * 2**(exponent - 26), with 2**26 <= significand < 2**27 and a sticky last bit, or 0."""
    # Below the smallest normal exponent more bits are dropped; 27 of them leave nothing but the sticky bit.
    drop = 3 + ns.minimum(ns.maximum(-126 - exponent, 0), 25)
    odd = (significand >> drop) & 1
    rounded = (significand + (1 << (drop - 1)) - 1 + odd) >> drop
    # A carry out of the significand moves into the exponent field by itself.
    magnitude = rounded + (ns.maximum(ns.minimum(exponent, 127) + 126, 0) << 23)
    magnitude = ns.where(exponent > 127, INFINITY, magnitude)
    magnitude = ns.where(significand == 0, 0, magnitude)
    return ns.where(negative, magnitude | SIGN, magnitude)


def _specials(ns: Namespace, a: Array, b: Array) -> tuple[Array, Array, Array, Array]:
    return a & MAGNITUDE, b & MAGNITUDE, (a ^ b) < 0, is_nan(a) | is_nan(b)


def _multiply(ns: Namespace, a: Array, b: Array) -> Array:
    magnitude_a, magnitude_b, negative, nan = _specials(ns, a, b)
    exponent_a, x = normalized(ns, magnitude_a)
    exponent_b, y = normalized(ns, magnitude_b)
    # 24 x 24 bits in halves of 12: every partial sum stays below 2**27.
    x1, x0, y1, y0 = x >> 12, x & 0xFFF, y >> 12, y & 0xFFF
    cross = x1 * y0 + x0 * y1
    low = x0 * y0 + ((cross & 0xFFF) << 12)
    high = x1 * y1 + (cross >> 12) + (low >> 24)
    low = low & 0xFFFFFF
    # The product is high * 2**24 + low in [2**46, 2**48): take 27 bits and a sticky one.
    big = high >= 0x800000
    top = ns.where(big, (high << 3) | (low >> 21), (high << 4) | (low >> 20))
    rest = ns.where(big, low & 0x1FFFFF, low & 0xFFFFF)
    significand = top | ns.where(rest != 0, 1, 0)
    exponent = exponent_a + exponent_b + ns.where(big, 1, 0)
    result = _compose(ns, negative, exponent, significand)
    infinite = (magnitude_a == INFINITY) | (magnitude_b == INFINITY)
    nan = nan | infinite & ((magnitude_a == 0) | (magnitude_b == 0))
    return _patch(ns, result, negative, infinite, nan)


def _divide(ns: Namespace, a: Array, b: Array) -> Array:
    magnitude_a, magnitude_b, negative, nan = _specials(ns, a, b)
    exponent_a, dividend = normalized(ns, magnitude_a)
    exponent_b, divisor = normalized(ns, magnitude_b)
    divisor = ns.where(divisor == 0, 1, divisor)
    small = dividend < divisor
    exponent = exponent_a - exponent_b - ns.where(small, 1, 0)
    # The leading digit of the normalised quotient is 1.
    remainder = ns.where(small, dividend << 1, dividend) - divisor
    high, remainder = _digits(ns, remainder, divisor)
    low, remainder = _digits(ns, remainder, divisor)
    quotient = (1 << (2 * DIGIT_BITS)) | (high << DIGIT_BITS) | low
    significand = ns.where(magnitude_a == 0, 0, quotient | ns.where(remainder != 0, 1, 0))
    result = _compose(ns, negative, exponent, significand)
    result = ns.where(magnitude_b == INFINITY, ns.where(negative, SIGN, 0), result)
    infinite = (magnitude_a == INFINITY) | (magnitude_b == 0)
    nan = nan | ((magnitude_a == 0) & (magnitude_b == 0))
    nan = nan | ((magnitude_a == INFINITY) & (magnitude_b == INFINITY))
    return _patch(ns, result, negative, infinite, nan)


def _digits(ns: Namespace, remainder: Array, divisor: Array) -> tuple[Array, Array]:
    """The next DIGIT_BITS binary digits of remainder / divisor < 1, exactly, and the new remainder.

    A float quotient, however the library divides, is only a guess. Its error is far below 1, so the digits are off by at
    most one, which the remainder shows; int32 wraps, but the remainder's true value lies in [-divisor, 2 * divisor).
    """
    guess = ns.astype(remainder, "float32") / ns.astype(divisor, "float32") * (1 << DIGIT_BITS)
    digits = ns.astype(guess, "int32")
    remainder = (remainder << DIGIT_BITS) - digits * divisor
    step = ns.where(remainder < 0, -1, ns.where(remainder >= divisor, 1, 0))
    return digits + step, remainder - step * divisor


def _add(ns: Namespace, a: Array, b: Array) -> Array:
    swap = (a & MAGNITUDE) < (b & MAGNITUDE)
    big, small = ns.where(swap, b, a), ns.where(swap, a, b)
    exponent, x = normalized(ns, big & MAGNITUDE)
    exponent_small, y = normalized(ns, small & MAGNITUDE)
    # Three guard bits; what is shifted out of them leaves a sticky bit, which keeps the rounding correct.
    shift = ns.minimum(ns.maximum(exponent - exponent_small, 0), 27)
    wide = y << 3
    aligned = (wide >> shift) | ns.where((wide & ((1 << shift) - 1)) != 0, 1, 0)
    total = (x << 3) + ns.where((a ^ b) < 0, -aligned, aligned)
    result = _compose(ns, big < 0, *_renormalize(ns, exponent, total))
    both_negative_zero = (a == SIGN) & (b == SIGN)
    result = ns.where(total == 0, ns.where(both_negative_zero, SIGN, 0), result)
    infinite = (big & MAGNITUDE) == INFINITY
    nan = is_nan(a) | is_nan(b) | (infinite & ((small & MAGNITUDE) == INFINITY) & ((a ^ b) < 0))
    return _patch(ns, result, big < 0, infinite, nan)


def _renormalize(ns: Namespace, exponent: Array, total: Array) -> tuple[Array, Array]:
    """Shift a sum below 2**28, in units of 2**(exponent - 26), into [2**26, 2**27) with its sticky bit."""
    carry = total >= 1 << 27
    total = ns.where(carry, (total >> 1) | (total & 1), total)
    exponent = exponent + ns.where(carry, 1, 0)
    # Leading zeros in five steps; a sum that lost more than one leading bit was exact, so no sticky bit moves up.
    for step in (16, 8, 4, 2, 1):
        low = total < (1 << (27 - step))
        total = ns.where(low, total << step, total)
        exponent = exponent - ns.where(low, step, 0)
    return exponent, total


def _patch(ns: Namespace, result: Array, negative: Array, infinite: Array, nan: Array) -> Array:
    result = ns.where(infinite, ns.where(negative, INFINITY | SIGN, INFINITY), result)
    return ns.where(nan, NAN, result)
