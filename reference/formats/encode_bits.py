"""`encode_bits`: float32 bit patterns to the codes of a format, in int32 arithmetic; `reference.encode` is built on it.

The float rule. A float32 is significand * 2**(e - 23) with a 24-bit significand (a subnormal one keeps its leading zeros and
e = -126). In the target, values of exponent e are multiples of 2**(max(e, emin) - mantissa_bits), so the last
23 - mantissa_bits + max(emin - e, 0) bits are rounded away. Adding max(e - emin, 0) << mantissa_bits to the result gives the
code: the hidden bit carries into the exponent field, in subnormals as in a rounding that reaches the next power of two.

Edges and overflow policies are those of `reference.formats.encode`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.arrays.errors import choice
from reference.arrays.namespace import Array, Namespace
from reference.arrays.softfloat import INFINITY, MAGNITUDE, MANTISSA, SIGN, is_nan, normalized, order_key
from reference.formats.formats import Format
from reference.formats.rounding import round_shift

# Larger integers saturate every integer format, with any zero point: their shift below stays positive.
LARGEST_INTEGER_EXPONENT = 14
# What the internal overflow policy "mark" puts in place of a saturated code (`fake_quantize_vjp` needs to know them).
MARK = 1 << 20


def encode_bits(
    ns: Namespace, bits: Array, fmt: Format, rounding: str, overflow: str, random_bits: Array | None = None
) -> Array:
    """int32 codes of float32 bit patterns (int32, any shape) in a format of any kind.

    rounding: a mode of `reference.formats.rounding`; overflow: one of its policies, or "mark", which writes `MARK` in place of
    a saturated code. random_bits: uint32 or int32 of the shape of `bits`, for stochastic rounding. Arguments are not checked.
    """
    if fmt.kind == "float" and rounding == "nearest_even":
        return nearest_even_codes(ns, bits, bits & MAGNITUDE, fmt, overflow)
    if fmt.kind == "float":
        magnitude = bits & MAGNITUDE
        exponent = ns.maximum(magnitude >> 23, 1) - 127
        significand = (magnitude & MANTISSA) | ns.where(magnitude < 0x800000, 0, 0x800000)
        return encode_parts(ns, bits, exponent, significand, fmt, rounding, overflow, random_bits)
    if fmt.kind == "int":
        integer = round_to_integer(ns, bits, fmt.fraction_bits, rounding, random_bits)
        return ns.where(is_nan(bits), fmt.nan_code or 0, clamp_integer(ns, integer, fmt))
    if fmt.kind == "scale":
        return _encode_scale(ns, bits, fmt, rounding, overflow, random_bits)
    return _encode_codebook(ns, bits, fmt, rounding)


def encode_parts(
    ns: Namespace,
    bits: Array,
    exponent: Array,
    significand: Array,
    fmt: Format,
    rounding: str,
    overflow: str,
    random_bits: Array | None = None,
) -> Array:
    """Codes of +-significand * 2**(exponent - 23) in a float format; `bits` gives sign, infinity and NaN."""
    negative = bits < 0
    below = ns.maximum(fmt.emin - exponent, 0)
    rounded = round_shift(ns, significand, below + (23 - fmt.mantissa_bits), negative, rounding, random_bits)
    code = rounded + (ns.maximum(exponent - fmt.emin, 0) << fmt.mantissa_bits)
    return _finish(ns, code, bits, fmt, rounding, overflow)


def nearest_even_codes(ns: Namespace, bits: Array, magnitude: Array, fmt: Format, overflow: str) -> Array:
    """Codes in a float format, nearest_even, in fewer steps than `encode_parts`.

    `magnitude` is a float32 pattern; below 2**-126 it is zero or a subnormal of bfloat16. Normal results: half a unit in the
    last place less one, plus the last bit that remains, is added to the pattern and carries. Subnormal results: adding a
    constant whose unit in the last place is the format's smallest value rounds to nearest even in every library. XLA flushes
    an operand only where it is too small to change the sum.
    """
    drop = 23 - fmt.mantissa_bits
    carried = (magnitude + ((1 << (drop - 1)) - 1) + ((magnitude >> drop) & 1)) >> drop
    code = carried - ((fmt.emin + 126) << fmt.mantissa_bits)
    if fmt.emin > -126:
        # Where float32 has no such constant, both are smaller by a power of two, which rounds what comes to 0 alone.
        exponent = fmt.emin - fmt.mantissa_bits + 23
        less = max(exponent - 127, 0)
        constant = (exponent - less + 127) << 23
        unit = ns.bitcast(ns.full((1,) * magnitude.ndim, constant, "int32", magnitude), "float32")
        with np.errstate(all="ignore"):
            value = ns.bitcast(magnitude, "float32")
            small = ns.bitcast((value * 2.0**-less if less else value) + unit, "int32") - constant
        code = ns.where(magnitude < (fmt.emin + 127) << 23, small, code)
    return _finish(ns, code, bits, fmt, "nearest_even", overflow)


def _finish(ns: Namespace, code: Array, bits: Array, fmt: Format, rounding: str, overflow: str) -> Array:
    """Limit, sign and NaN of a magnitude's code."""
    code = _limit(ns, code, bits, fmt, rounding, overflow)
    if fmt.sign_mask and fmt.has_negative_zero:
        code = code | (bits >> (32 - fmt.bits) & fmt.sign_mask)
    elif fmt.sign_mask:
        code = ns.where((bits < 0) & (code != 0), code | fmt.sign_mask, code)
    # NaN last: no other step may touch it.
    return ns.where(is_nan(bits), fmt.nan_code or 0, code)


def _limit(ns: Namespace, code: Array, bits: Array, fmt: Format, rounding: str, overflow: str) -> Array:
    """Clamp at the largest finite code, or go beyond it as the overflow policy and the direction of rounding say."""
    if overflow == "saturate":
        return ns.minimum(code, fmt.max_code)
    if overflow == "mark":
        return ns.where(code > fmt.max_code, MARK, code)
    beyond = _overflow_code(fmt, overflow)
    over = code > fmt.max_code
    inward = {"toward_zero": bits == bits, "to_odd": bits == bits, "up": bits < 0, "down": bits >= 0}.get(
        rounding
    )
    if inward is not None:
        finite = (bits & MAGNITUDE) < INFINITY
        code = ns.where(over & inward & finite, fmt.max_code, code)
        over = over & ~(inward & finite)
    return ns.where(over, beyond, code)


def _overflow_code(fmt: Format, overflow: str) -> int:
    code = fmt.infinity_code if overflow in ("inf", "nonfinite") else fmt.nan_code
    return code if code is not None else fmt.nan_code or 0


def round_to_integer(
    ns: Namespace, bits: Array, fraction_bits: Any, rounding: str, random_bits: Array | None = None
) -> Array:
    """Signed int32 nearest to x * 2**fraction_bits; beyond +-2**14 (and for NaN) any such integer."""
    magnitude = bits & MAGNITUDE
    exponent = ns.maximum(magnitude >> 23, 1) - 127 + fraction_bits
    significand = (magnitude & MANTISSA) | ns.where(magnitude < 0x800000, 0, 0x800000)
    shift = 23 - ns.minimum(exponent, LARGEST_INTEGER_EXPONENT)
    rounded = round_shift(ns, significand, shift, bits < 0, rounding, random_bits)
    return ns.where(bits < 0, -rounded, rounded)


def clamp_integer(ns: Namespace, integer: Array, fmt: Format, overflow: str = "saturate") -> Array:
    """int32 saturated to the format's range and masked to its bits."""
    low, high = fmt.integer_range
    if overflow == "mark":
        return ns.where((integer < low) | (integer > high), MARK, 0)
    return ns.minimum(ns.maximum(integer, low), high) & ((1 << fmt.bits) - 1)


def _encode_scale(
    ns: Namespace, bits: Array, fmt: Format, rounding: str, overflow: str, random_bits: Array | None
) -> Array:
    exponent, significand = normalized(ns, bits & MAGNITUDE)
    # One significand bit: the fraction decides between 2**exponent and the next power of two. Zero counts as tiny.
    rounded = round_shift(
        ns, significand, 23 + ns.where(significand == 0, 1, 0), bits < 0, rounding, random_bits
    )
    code = exponent + fmt.bias + rounded - 1
    code = ns.where((bits & MAGNITUDE) == INFINITY, fmt.max_code + 1, code)
    # Nothing lies below 2**-bias, so that is the nearest code of every smaller positive value.
    code = _limit(ns, ns.maximum(code, 0), bits, fmt, rounding, overflow)
    if overflow != "saturate":
        code = ns.where((bits & MAGNITUDE) == 0, fmt.nan_code or 0, code)
    return ns.where(is_nan(bits) | ((bits < 0) & (bits != SIGN)), fmt.nan_code or 0, code)


def _encode_codebook(ns: Namespace, bits: Array, fmt: Format, rounding: str) -> Array:
    # A midpoint of two float32 values has 25 bits: x is above it iff x is above its truncation toward minus infinity.
    middle = _midpoints(fmt, rounding)
    floor = middle.astype(np.float32)
    floor = np.where(floor > middle, np.nextafter(floor, np.float32(-np.inf)), floor).view(np.int32)
    thresholds = [int(b) if b >= 0 else int(b ^ MAGNITUDE) for b in floor]
    return ns.where(is_nan(bits), _zero_code(fmt), _count_above(ns, order_key(ns, bits), thresholds))


def encode_codebook_float64(ns: Namespace, x: Array, fmt: Format, rounding: str) -> Array:
    """float64 meets the midpoints themselves: rounded to odd in float32 (24 bits), it could cross one of 25 bits."""
    code = _count_above(ns, x, [float(value) for value in _midpoints(fmt, rounding)])
    return ns.where(x == x, code, _zero_code(fmt))


def _midpoints(fmt: Format, rounding: str) -> Array:
    """float64 midpoints of the format's float32 values, exact."""
    choice(rounding, ("nearest_even",), f"rounding of codebook {fmt.name}")
    values = fmt.values.astype(np.float64)
    return (values[1:] + values[:-1]) / 2


def _count_above(ns: Namespace, x: Array, thresholds: list[Any]) -> Array:
    code = ns.astype(x > thresholds[0], "int32")
    for threshold in thresholds[1:]:
        code = code + ns.astype(x > threshold, "int32")
    return code


def _zero_code(fmt: Format) -> int:
    return int(np.argmin(np.abs(np.asarray(fmt.table))))


__all__ = [
    "MARK",
    "clamp_integer",
    "encode_bits",
    "encode_codebook_float64",
    "encode_parts",
    "nearest_even_codes",
    "round_to_integer",
]
