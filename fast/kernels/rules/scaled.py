"""Elements divided by their scale, and rounded: `reference.quantize.elements` as device functions. See `elements` for the
arguments."""

import triton
import triton.language as tl

from fast.kernels.bits import (
    HIDDEN,
    INFINITY,
    LARGEST,
    MAGNITUDE,
    MANTISSA,
    SIGN,
    bits_of,
    float_of,
    is_nan,
    normalized,
    rounded,
)
from fast.kernels.rules.elements import (
    clamp_integer,
    encode,
    encode_parts,
    nearest_by_difference,
    shifted_integer,
    to_integer,
)


@triton.jit
def element_codes(v, scale, outer, zero, random_bits, RULE: tl.constexpr):
    """int32 codes of a tile (blocks, elements): v float32, scale (blocks, 1) float32, zero (blocks, 1) or None."""
    if RULE.power_of_two:
        codes = _shifted(v, scale, random_bits, RULE)
    else:
        codes = _scaled(v, scale, outer, zero, random_bits, RULE)
    if RULE.nan == "ieee":
        return codes
    else:
        poisoned = is_nan(scale)
        if RULE.nan == "element":
            b = bits_of(v)
            sign = tl.where(b < 0, RULE.element.sign_mask, 0)
            special = tl.where((b & MAGNITUDE) > INFINITY, RULE.poison_code, 0) | sign
            special = tl.where((b & MAGNITUDE) == INFINITY, RULE.poison_code, special)
            return tl.where(poisoned, special, codes)
        elif RULE.poison_by_product:
            # The scale's NaN has reached every element through the product, and the element's NaN code is the poison code.
            return codes
        else:
            return tl.where(poisoned, RULE.poison_code, codes)


@triton.jit
def power_multiplier(scale, RULE: tl.constexpr):
    """2**-e of an e8m0 scale 2**e as float32. 2**127 for the smallest scale, unless the record says else.

    NaN for NaN, but where arithmetic decides: there its exponent is shifted by, like any other.
    """
    exponent = bits_of(scale) >> 23
    if RULE.smallest_exponent is not None:
        exponent = tl.where(exponent == 0, RULE.smallest_exponent + 127, exponent)
    reciprocal_rn = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    nan: tl.constexpr = 0x00200000 if RULE.nan == "ieee" else 0x7FC00000
    return float_of(tl.where(exponent == 255, nan, reciprocal_rn))


@triton.jit
def _shifted(v, scale, random_bits, RULE: tl.constexpr):
    """v * 2**-e, rounded once."""
    if RULE.rounding == "nearest_even" and RULE.overflow == "saturate":
        if RULE.house and RULE.kind == "float":
            # Under a scale from outside an infinity counts as the largest float32.
            largest = float_of(tl.full((), LARGEST, tl.int32))
            v = tl.clamp(v, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        # Exact, or below 2**-126, where every format rounds to zero.
        return encode(v * power_multiplier(scale, RULE), random_bits, RULE.element)
    else:
        exponent = tl.maximum(bits_of(scale) >> 23, 0) - 127
        if RULE.smallest_exponent is not None:
            exponent = tl.where(exponent == -127, RULE.smallest_exponent, exponent)
        b = bits_of(v)
        magnitude = b & MAGNITUDE
        if RULE.kind == "int":
            own = tl.maximum(magnitude >> 23, 1) - 127 + (RULE.fraction_bits - exponent)
            significand = (magnitude & MANTISSA) | tl.where(magnitude < HIDDEN, 0, HIDDEN)
            made = clamp_integer(
                shifted_integer(b, own, significand, random_bits, RULE.element), RULE.element
            )
            return tl.where(magnitude > INFINITY, 0, made)
        else:
            own, significand = normalized(magnitude)
            significand = tl.where(magnitude == 0, 0, significand)
            # A zero has the smallest exponent: any above it would show in the code.
            own = tl.where(magnitude >= INFINITY, 128, own - exponent)
            own = tl.where(magnitude == 0, RULE.element.emin, own)
            return encode_parts(b, own, significand, random_bits, RULE.element)


@triton.jit
def _scaled(v, scale, outer, zero, random_bits, RULE: tl.constexpr):
    """v divided by its scale in the order of the record, and rounded."""
    if RULE.zero == "value":
        return _from_minimum(v, scale, zero, random_bits, RULE)
    else:
        if RULE.apply == "encode":
            scaled = rounded(v * scale, RULE.arithmetic)
        elif RULE.apply == "divide":
            divisor = scale
            if RULE.has_outer:
                divisor = rounded(tl.div_rn(scale, outer), RULE.arithmetic)
            scaled = rounded(tl.div_rn(v, divisor), RULE.arithmetic)
        else:
            scaled = rounded(v * reciprocal(scale, outer, RULE), RULE.arithmetic)
        if RULE.kind == "codebook" and RULE.by_difference:
            return nearest_by_difference(scaled, RULE.element, RULE.arithmetic)
        elif RULE.kind != "int":
            return _special_codes(encode(scaled, random_bits, RULE.element), scaled, RULE)
        else:
            integer = to_integer(scaled, random_bits, RULE.element)
            if RULE.zero == "code":
                integer = integer + zero
            return tl.where(is_nan(scaled), 0, clamp_integer(integer, RULE.element))


@triton.jit
def _special_codes(codes, scaled, RULE: tl.constexpr):
    """A NaN that arithmetic made, and a scaled -0, where the convention writes a code of its own for them."""
    if not RULE.negative_zero:
        codes = tl.where(bits_of(scaled) == SIGN, 0, codes)
    if RULE.nan_code is not None:
        codes = tl.where(is_nan(scaled), RULE.nan_code, codes)
    return codes


@triton.jit
def reciprocal(scale, outer, RULE: tl.constexpr):
    """One correctly rounded reciprocal per block, with the outer scale in the record's order."""
    if not RULE.has_outer:
        return rounded(tl.div_rn(1.0, scale), RULE.arithmetic)
    elif RULE.outer_order == "reciprocal_first":
        first = rounded(tl.div_rn(1.0, outer), RULE.arithmetic)
        return rounded(tl.div_rn(first, scale), RULE.arithmetic)
    elif RULE.outer_order == "folded":
        inner = rounded(scale * rounded(tl.div_rn(1.0, outer), RULE.arithmetic), RULE.arithmetic)
        made = rounded(tl.div_rn(1.0, inner), RULE.arithmetic)
        return tl.where(bits_of(made) == INFINITY, float_of(tl.full((), LARGEST, tl.int32)), made)
    else:
        product = rounded(outer * scale, RULE.arithmetic)
        made = rounded(tl.div_rn(1.0, product), RULE.arithmetic)
        if RULE.finite_reciprocal:
            made = bounded(made)
        return made


@triton.jit
def bounded(v):
    """Infinity of either sign as the largest float32."""
    b = bits_of(v)
    return float_of(tl.where((b & MAGNITUDE) == INFINITY, b - 1, b))


@triton.jit
def _from_minimum(v, scale, zero, random_bits, RULE: tl.constexpr):
    """tinygemm: round((v - (z - s * mid)) / s), every operation rounded to the input's dtype."""
    step = rounded(scale * RULE.middle_input, RULE.arithmetic)
    minimum = rounded(zero - step, RULE.arithmetic)
    scaled = rounded(tl.div_rn(rounded(v - minimum, RULE.arithmetic), scale), RULE.arithmetic)
    integer = to_integer(scaled, random_bits, RULE.element)
    return tl.where(is_nan(scaled), 0, clamp_integer(integer, RULE.element))
