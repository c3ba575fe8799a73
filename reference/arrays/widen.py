"""Every input becomes float32 bit patterns (int32), exactly, without floating-point arithmetic where that could flush.

bfloat16 and float16 widen exactly. float64 does not fit: `encode` reduces it by rounding to odd, which keeps every later
rounding to at most 22 significand bits correct (Boldo and Melquiond, IEEE Trans. Computers 57(4), 2008), and `quantize`,
which is defined on float32, rounds it to nearest even first, finite values saturating at the largest float32.
"""

from __future__ import annotations

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
