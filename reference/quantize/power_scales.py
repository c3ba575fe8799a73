"""Power-of-two scales (e8m0) from a block's largest magnitude, by its exponent field and never by a logarithm.

floor(log2(x)) computed in float32 is wrong one unit below most powers of two; the exponent field is exact.
"""

from __future__ import annotations

from reference.arrays.namespace import Array, Namespace
from reference.arrays.softfloat import (
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    bits_of,
    ceil_log2_float32,
    divide,
    floor_log2_float32,
    is_nan,
    normalized,
)
from reference.formats.formats import Format
from reference.schemes.schemes import Scale

BIAS = 127
NAN_CODE = 255
LARGEST_CODE = 254


def power_codes(ns: Namespace, absmax: Array, record: Scale, element: Format, poison_infinity: bool) -> Array:
    """e8m0 codes (int32) of float32 bit patterns of block maxima.

    A NaN maximum gives 255, so does infinity where the scheme says so; otherwise infinity counts as 2**128. A maximum of zero
    and whatever is too small give 0, that is 2**-127.
    """
    if record.rule == "rceil_log2":
        ratio = divide(ns, absmax, ns.full((1,), bits_of(record.target), "int32", absmax))
        exponent = ceil_log2_float32(ns, ratio)
        exponent = ns.where(absmax == INFINITY, BIAS, exponent)
    else:
        exponent = _exponent(ns, absmax, record, element)
    codes = ns.minimum(ns.maximum(exponent + BIAS, 0), LARGEST_CODE)
    codes = ns.where((absmax & MAGNITUDE) == 0, 0, codes)
    poisoned = absmax >= INFINITY if poison_infinity else is_nan(absmax)
    return ns.where(poisoned, NAN_CODE, codes)


def _exponent(ns: Namespace, absmax: Array, record: Scale, element: Format) -> Array:
    target = bits_of(record.target)
    target_exponent, target_fraction = (target >> 23) - 127, target & 0x7FFFFF
    if record.rule == "even":
        # Rounding to the element's mantissa bits, ties away, as the carry of one addition.
        absmax = ns.minimum(absmax + even_carry(record, element), INFINITY)
    exponent, significand = normalized(ns, absmax)
    fraction = significand & 0x7FFFFF
    if record.rule == "ceil":
        exponent = exponent + ns.astype(fraction > 0, "int32")
    if record.rule == "rceil":
        exponent = exponent + ns.astype(fraction > target_fraction, "int32")
    return exponent - target_exponent


def even_carry(record: Scale, element: Format) -> int:
    """What rule "even" adds to a float32 pattern before it drops the mantissa: half of the last bit that remains."""
    bits = element_mantissa(element) if record.even_bits is None else record.even_bits
    return 1 << (22 - bits)


def element_mantissa(element: Format) -> int:
    """Fraction bits of the element's largest binade: mantissa bits, or the bits below an integer's first."""
    return element.mantissa_bits if element.kind == "float" else element.bits - 2


def ratio_to_power_of_two(ns: Namespace, bits: Array, record: Scale) -> Array:
    """The power-of-two rounding of a non-negative ratio (float32 bit patterns) that the record's rule states.

    ``ratio_pow2`` rounds up, or down where the scale is stored for encoding; ``ratio_pow2_log2`` is torchao's. Zero, infinity,
    NaN and ratios under other rules pass through.
    """
    if record.rule == "ratio_pow2":
        # One below the next power of two carries into the exponent; an encoding scale drops its mantissa instead.
        raised = bits if record.stored == "encode" else bits + MANTISSA
        return ns.where(bits < INFINITY, raised & INFINITY, bits)
    return floor_log2_float32(ns, bits) if record.rule == "ratio_pow2_log2" else bits
