"""float32 bit patterns: what every input becomes, and correctly rounded arithmetic on them, the same in every library.

**Inputs** become float32 bit patterns (int32), exactly, without floating-point arithmetic where that could flush. bfloat16 and
float16 widen exactly. float64 does not fit: `encode` reduces it by rounding to odd, which keeps every later rounding to at most
22 significand bits correct (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008), and `quantize`, which is defined on
float32, rounds it to nearest even first, finite values saturating at the largest float32.

**Arithmetic**: multiplication, division, addition and square root, all of bit patterns as int32, which broadcast. NumPy and
torch on CPU compute IEEE 754 binary32, so their own operators are used. XLA does not (it flushes subnormals, replaces
division by reciprocal multiplication and contracts a*b+c into one rounding), so under JAX the same results come from int32
arithmetic: products and quotients of the 24-bit significands with a sticky bit, rounded once. The square root is computed in
integers everywhere: not every library's own is correctly rounded. A NaN result is always 0x7fc00000: hardware differs in sign
and payload of the NaN results, so the specification fixes one.

**torchao's powers of two** through a float32 logarithm, reproduced with integers. torchao 0.18 computes exp2(floor(log2(s)))
and ceil(log2(s)) in float32. The rounded logarithm of a value just below 2**k is k itself, and so is that of one just above:
the floor is one too high there, the ceiling one too low. How close is "just" follows from the spacing of float32 around k:
log2(2**k (1 + f)) rounds to k when log2(1 + f) is at most half that spacing. The tables below hold, for each k, how many
float32 steps that is. They assume a correctly rounded log2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import expm1, floor, log, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import Array, Namespace, int32_of

SIGN = -0x80000000
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
NAN = 0x7FC00000
MANTISSA = 0x7FFFFF
LARGEST = 0x7F7FFFFF
SMALLEST_NORMAL = 0x00800000


def float32_bits(ns: Namespace, x: Array, name: str, *, to_odd: bool = False) -> Array:
    """float32 bit patterns of x as int32, shape of x. `to_odd` chooses the reduction of float64."""
    if name == "float32":
        return ns.bitcast(x, "int32")
    if name == "bfloat16":
        return _bits16(ns, x) << 16
    if name == "float16":
        return widen_float16(ns, _bits16(ns, x))
    return _narrow_float64(ns, x, to_odd)


def _bits16(ns: Namespace, x: Array) -> Array:
    return int32_of(ns, ns.bitcast(x, "uint16"))


def widen_float16(ns: Namespace, bits: Array) -> Array:
    """Patterns of float16 (int32) as those of float32, NaN with its payload."""
    sign, magnitude = (bits & 0x8000) << 16, bits & 0x7FFF
    normal = (magnitude << 13) + ((127 - 15) << 23)
    special = (magnitude << 13) | INFINITY
    # A subnormal is an integer count of 2**-24: converting the integer is exact and normalises it.
    subnormal = ns.bitcast(ns.astype(magnitude, "float32"), "int32") - (24 << 23)
    subnormal = ns.where(magnitude == 0, 0, subnormal)
    wide = ns.where(magnitude >= 0x7C00, special, ns.where(magnitude < 0x400, subnormal, normal))
    return wide | sign


def _narrow_float64(ns: Namespace, x: Array, to_odd: bool) -> Array:
    if not ns.ieee:
        return _narrow_in_integers(ns, x, to_odd)
    narrow = ns.astype(x, "float32")
    bits = ns.bitcast(narrow, "int32")
    wide = ns.astype(narrow, "float64")
    overflow = ((bits & MAGNITUDE) == INFINITY) & (wide != x)
    bits = ns.where(overflow, (bits & SIGN) | LARGEST, bits)
    if not to_odd:
        return bits
    # |narrow| > |x| means that it was rounded away: step back, then set the last bit of what is inexact.
    away = ns.astype((abs(wide) > abs(x)) & ~overflow, "int32")
    inexact = ns.astype((wide != x) & (x == x), "int32")
    return (bits - away) | inexact


def _narrow_in_integers(ns: Namespace, x: Array, to_odd: bool) -> Array:
    """The same on bit patterns, where casts flush subnormals: 26 leading bits and a sticky one, then one rounding."""
    halves = ns.bitcast(x, "int32")
    low, high = halves[..., 0], halves[..., 1]
    field = (high >> 20) & 0x7FF
    lost = ns.where((low & 0x03FFFFFF) != 0, 1, 0)
    leading = ((high & 0xFFFFF) << 6) | ((low >> 26) & 0x3F) | lost
    exponent = field - 1023
    # 27 bits of 2**exponent; whatever has the exponent field 0 is so small that only its stickiness counts.
    significand = leading | ns.where(field == 0, 0, 1 << 26)
    drop = 3 + ns.minimum(ns.maximum(-126 - exponent, 0), 25)
    floor = significand >> drop
    rest = significand - (floor << drop)
    odd = floor | ns.where(rest != 0, 1, 0)
    nearest = (significand + (1 << (drop - 1)) - 1 + (floor & 1)) >> drop
    magnitude = (odd if to_odd else nearest) + (ns.maximum(ns.minimum(exponent, 127) + 126, 0) << 23)
    # Beyond the largest float32 only infinities are infinite.
    magnitude = ns.where(exponent > 127, LARGEST, ns.minimum(magnitude, LARGEST))
    magnitude = ns.where(field == 0x7FF, ns.where(leading != 0, NAN, INFINITY), magnitude)
    return magnitude | (high & SIGN)


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


LOWEST = -149
HIGHEST = 128


def fused_multiply_add(a: Any, b: Any, c: Any) -> npt.NDArray[np.float32]:
    """a b + c of float32 NumPy arrays that broadcast, rounded once.

    The product is exact in float64. The sum is rounded to odd there, which leaves its rounding to 24 bits correct (Boldo and
    Melquiond, IEEE Trans. Computers 57(4), 2008).
    """
    with np.errstate(all="ignore"):
        product, other = np.asarray(a, np.float64) * b, np.asarray(c, np.float64)
        total = np.asarray(product + other)
        part = total - product
        rest = (product - (total - part)) + (other - part)
        bits = total.view(np.int64)
        # The neighbour of an inexact even sum on the side of what was lost; infinite sums are exact.
        odd = bits + np.where((rest > 0) == (total > 0), 1, -1)
        inexact = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
        return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


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
