"""From blocks and their scales to codes: the second half of the quantizer."""

from __future__ import annotations

import numpy as np

from reference.arrays.namespace import Array, Namespace
from reference.arrays.softfloat import INFINITY, LARGEST, MAGNITUDE, SIGN, SMALLEST_NORMAL, is_nan, normalized
from reference.formats.arithmetic import Arithmetic
from reference.formats.encode_bits import (
    clamp_integer,
    encode_bits,
    encode_parts,
    nearest_even_codes,
    round_to_integer,
)
from reference.formats.formats import Format
from reference.quantize.scales import Chosen
from reference.schemes.schemes import Scheme

E8M0_BIAS = 127
# An exponent above every element format's.
BEYOND = 128


def element_codes(
    ns: Namespace, split: Array, chosen: Chosen, scheme: Scheme, dtype: str, random_bits: Array | None
) -> Array:
    """int32 codes of blocks (..., blocks, size)."""
    if scheme.scale.power_of_two:
        codes = _shifted(ns, split, chosen.scale, scheme, random_bits)
    else:
        codes = _scaled(ns, split, chosen, scheme, dtype, random_bits)
    if scheme.nan == "ieee":
        return codes
    poisoned = is_nan(chosen.scale)
    if scheme.nan == "element":
        return ns.where(poisoned, _signed_nan(ns, split, scheme), codes)
    return ns.where(poisoned, scheme.poison_code, codes)


def _signed_nan(ns: Namespace, split: Array, scheme: Scheme) -> Array:
    """Codes of a block divided by infinity: zeros and NaNs with their signs, infinities a NaN without."""
    sign = ns.where(split < 0, scheme.format.sign_mask, 0)
    codes = ns.where(is_nan(split), scheme.poison_code, 0) | sign
    return ns.where((split & MAGNITUDE) == INFINITY, scheme.poison_code, codes)


def _shifted(ns: Namespace, split: Array, scale: Array, scheme: Scheme, random_bits: Array | None) -> Array:
    """x * 2**-e rounded once: the exponent moves, no bit is lost before the rounding."""
    fmt = scheme.format
    # The e8m0 scale as a float32: 2**-127 is subnormal, its exponent field is 0.
    exponent = ns.maximum(scale >> 23, 0) - E8M0_BIAS
    if scheme.smallest_exponent is not None:
        exponent = ns.where(exponent == -E8M0_BIAS, scheme.smallest_exponent, exponent)
    if fmt.kind == "int":
        return _shifted_integer(ns, split, exponent, scheme, random_bits)
    if fmt.kind == "codebook":
        # Exact, or below 2**-126.
        inverse = ns.where(exponent == E8M0_BIAS, SMALLEST_NORMAL >> 1, (E8M0_BIAS - exponent) << 23)
        return encode_bits(
            ns, Arithmetic(ns, "float32").multiply(split, inverse), fmt, "nearest_even", "saturate"
        )
    if scheme.rounding == "nearest_even":
        shifted = _shifted_magnitude(ns, split & MAGNITUDE, exponent, infinite=scheme.nan != "block")
        return nearest_even_codes(ns, split, shifted, fmt, scheme.overflow)
    exponents, significand = normalized(ns, split & MAGNITUDE)
    # Infinity divided by any scale is infinity.
    exponents = ns.where((split & MAGNITUDE) >= INFINITY, BEYOND, exponents - exponent)
    return encode_parts(ns, split, exponents, significand, fmt, scheme.rounding, scheme.overflow, random_bits)


def _shifted_magnitude(ns: Namespace, magnitude: Array, exponent: Array, *, infinite: bool) -> Array:
    """Float32 pattern of |x| * 2**-e, below 2**21 and 0 below 2**-126: all that rounding to nearest sees of it."""
    # A subnormal is an integer count of 2**-149, which its exact conversion to float normalises; zero goes below zero.
    counted = ns.bitcast(ns.astype(magnitude, "float32"), "int32") - (149 << 23)
    # Zero stays where subtracting the largest exponent does not wrap.
    wide = ns.where(magnitude < SMALLEST_NORMAL, ns.maximum(counted, -(128 << 23)), magnitude)
    # The cap keeps given scales that are far too small from wrapping; for e >= 107 it is the largest finite float32.
    largest = ((ns.minimum(exponent, 107) + 148) << 23) - 1
    shifted = ns.maximum(ns.minimum(wide, largest) - (exponent << 23), 0)
    return ns.where(magnitude >= INFINITY, 147 << 23, shifted) if infinite else shifted


def _shifted_integer(
    ns: Namespace, split: Array, exponent: Array, scheme: Scheme, random_bits: Array | None
) -> Array:
    fmt = scheme.format
    integer = round_to_integer(ns, split, fmt.fraction_bits - exponent, scheme.rounding, random_bits)
    # A NaN under a given scale; integers have no code for it.
    return ns.where(is_nan(split), 0, clamp_integer(ns, integer, fmt, scheme.overflow))


def _scaled(
    ns: Namespace, split: Array, chosen: Chosen, scheme: Scheme, dtype: str, random_bits: Array | None
) -> Array:
    unit = Arithmetic(ns, dtype if scheme.arithmetic == "input" else "float32")
    scale = chosen.exact if scheme.codes_from == "exact" else chosen.scale
    if scheme.zero is not None and scheme.zero.rule == "value":
        return _from_minimum(ns, split, scale, chosen.zero, scheme, unit, random_bits)
    scaled = _apply(ns, unit, split, scale, chosen.outer, scheme)
    fmt = scheme.format
    if fmt.kind == "codebook" and scheme.arithmetic == "input":
        return _nearest_by_difference(ns, scaled, fmt, unit)
    if fmt.kind != "int":
        codes = encode_bits(ns, scaled, fmt, scheme.rounding, scheme.overflow, random_bits)
        return _special_codes(ns, codes, scaled, scheme)
    integer = round_to_integer(ns, scaled, fmt.fraction_bits, scheme.rounding, random_bits)
    if chosen.zero is not None:
        integer = integer + chosen.zero
    return ns.where(is_nan(scaled), 0, clamp_integer(ns, integer, fmt, scheme.overflow))


def _special_codes(ns: Namespace, codes: Array, scaled: Array, scheme: Scheme) -> Array:
    """NaN from the arithmetic, and a scaled -0, where the convention has a code for them."""
    if not scheme.negative_zero:
        codes = ns.where(scaled == SIGN, 0, codes)
    return codes if scheme.nan_code is None else ns.where(is_nan(scaled), scheme.nan_code, codes)


def _apply(
    ns: Namespace, unit: Arithmetic, x: Array, scale: Array, outer: Array | None, scheme: Scheme
) -> Array:
    """Elements divided by their scale, in the order of the record."""
    factor = element_factor(ns, unit, scale, outer, scheme)
    return unit.divide(x, factor) if scheme.apply == "divide" else unit.multiply(x, factor)


def element_factor(
    ns: Namespace, unit: Arithmetic, scale: Array, outer: Array | None, scheme: Scheme
) -> Array:
    """What elements are multiplied by, or divided by where the record's `apply` is "divide"; one for each scale."""
    if scheme.apply == "encode":
        return scale
    if scheme.apply == "divide":
        return scale if outer is None else unit.divide(scale, outer)
    return _reciprocal(ns, unit, scale, outer, scheme)


def _reciprocal(ns: Namespace, unit: Arithmetic, scale: Array, outer: Array | None, scheme: Scheme) -> Array:
    """One reciprocal per block."""
    if outer is None:
        return unit.reciprocal(scale)
    if scheme.outer_order == "reciprocal_first":
        return unit.divide(unit.reciprocal(outer), scale)
    if scheme.outer_order == "folded":
        bits = unit.reciprocal(unit.multiply(scale, unit.reciprocal(outer)))
        return ns.where(bits == INFINITY, LARGEST, bits)
    bits = unit.reciprocal(unit.multiply(outer, scale))
    # A given outer scale may be so small that its reciprocal overflows; then zero would become NaN.
    if scheme.nan != "block":
        return bits
    # Of either sign: a given outer scale may be negative, and zero times infinity is NaN.
    return ns.where((bits & MAGNITUDE) == INFINITY, bits - 1, bits)


def _from_minimum(
    ns: Namespace,
    split: Array,
    scale: Array,
    zero: Array | None,
    scheme: Scheme,
    unit: Arithmetic,
    random_bits: Array | None,
) -> Array:
    """tinygemm: round((x - (z - s * mid)) / s), every operation rounded to the input's dtype."""
    low, high = scheme.format.integer_range
    middle = unit.constant((low + high + 1) / 2, scale)
    minimum = unit.subtract(zero, unit.multiply(scale, middle))
    scaled = unit.divide(unit.subtract(split, minimum), scale)
    integer = round_to_integer(ns, scaled, 0, scheme.rounding, random_bits)
    return ns.where(is_nan(scaled), 0, clamp_integer(ns, integer, scheme.format, scheme.overflow))


def _nearest_by_difference(ns: Namespace, scaled: Array, fmt: Format, unit: Arithmetic) -> Array:
    """Index of the smallest rounded |x - value|, the first of equals (NaN: 0), as an argmin over the table finds it."""
    best = index = None
    for code, value in enumerate(np.asarray(fmt.table, np.float32)):
        distance = unit.subtract(scaled, unit.constant(float(value), scaled)) & MAGNITUDE
        if best is None or index is None:
            best, index = distance, distance * 0
            continue
        closer = distance < best
        best, index = ns.where(closer, distance, best), ns.where(closer, code, index)
    return ns.where(is_nan(scaled), 0, index)


__all__ = ["element_codes", "element_factor"]
