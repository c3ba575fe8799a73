"""Codes of elements under a scale, decoded values (the second half of `reference.quantize.dequantize`), and what saturated."""

from __future__ import annotations

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
    canonical,
    float_of,
    is_nan,
    narrow,
    normalized,
    rounded,
    widened,
)
from fast.kernels.rules.elements import (
    MARK,
    clamp_integer,
    decode,
    encode,
    encode_parts,
    nearest_by_difference,
    shifted_integer,
    to_integer,
)

# Elements divided by their scale, and rounded: `reference.quantize.quantize` as device functions. See `elements` for the
# arguments.


@triton.jit
def element_codes(v, scale, outer, zero, random_bits, SCHEME: tl.constexpr):
    """int32 codes of a tile (blocks, elements): v float32, scale (blocks, 1) float32, zero (blocks, 1) or None."""
    if SCHEME.power_of_two:
        codes = _shifted(v, scale, random_bits, SCHEME)
    else:
        codes = _scaled(v, scale, outer, zero, random_bits, SCHEME)
    if SCHEME.nan == "ieee":
        return codes
    else:
        poisoned = is_nan(scale)
        if SCHEME.nan == "element":
            b = bits_of(v)
            sign = tl.where(b < 0, SCHEME.element.sign_mask, 0)
            special = tl.where((b & MAGNITUDE) > INFINITY, SCHEME.poison_code, 0) | sign
            special = tl.where((b & MAGNITUDE) == INFINITY, SCHEME.poison_code, special)
            return tl.where(poisoned, special, codes)
        elif SCHEME.poison_by_product:
            # The scale's NaN has reached every element through the product, and the element's NaN code is the poison code.
            return codes
        else:
            return tl.where(poisoned, SCHEME.poison_code, codes)


@triton.jit
def power_multiplier(scale, SCHEME: tl.constexpr):
    """2**-e of an e8m0 scale 2**e as float32. 2**127 for the smallest scale, unless the record says else.

    NaN for NaN, but where arithmetic decides: there its exponent is shifted by, like any other.
    """
    exponent = bits_of(scale) >> 23
    if SCHEME.smallest_exponent is not None:
        exponent = tl.where(exponent == 0, SCHEME.smallest_exponent + 127, exponent)
    reciprocal_rn = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    nan: tl.constexpr = 0x00200000 if SCHEME.nan == "ieee" else 0x7FC00000
    return float_of(tl.where(exponent == 255, nan, reciprocal_rn))


@triton.jit
def _shifted(v, scale, random_bits, SCHEME: tl.constexpr):
    """v * 2**-e, rounded once."""
    if SCHEME.rounding == "nearest_even" and SCHEME.overflow == "saturate":
        if SCHEME.block_nan and SCHEME.kind == "float":
            # Under a scale from outside an infinity counts as the largest float32.
            largest = float_of(tl.full((), LARGEST, tl.int32))
            v = tl.clamp(v, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        # Exact, or below 2**-126, where every format rounds to zero.
        return encode(v * power_multiplier(scale, SCHEME), random_bits, SCHEME.element)
    else:
        exponent = tl.maximum(bits_of(scale) >> 23, 0) - 127
        if SCHEME.smallest_exponent is not None:
            exponent = tl.where(exponent == -127, SCHEME.smallest_exponent, exponent)
        b = bits_of(v)
        magnitude = b & MAGNITUDE
        if SCHEME.kind == "int":
            own = tl.maximum(magnitude >> 23, 1) - 127 + (SCHEME.fraction_bits - exponent)
            significand = (magnitude & MANTISSA) | tl.where(magnitude < HIDDEN, 0, HIDDEN)
            result = clamp_integer(
                shifted_integer(b, own, significand, random_bits, SCHEME.element), SCHEME.element
            )
            return tl.where(magnitude > INFINITY, 0, result)
        else:
            own, significand = normalized(magnitude)
            significand = tl.where(magnitude == 0, 0, significand)
            # A zero has the smallest exponent: any above it would show in the code.
            own = tl.where(magnitude >= INFINITY, 128, own - exponent)
            own = tl.where(magnitude == 0, SCHEME.element.emin, own)
            return encode_parts(b, own, significand, random_bits, SCHEME.element)


@triton.jit
def _scaled(v, scale, outer, zero, random_bits, SCHEME: tl.constexpr):
    """v divided by its scale in the order of the record, and rounded."""
    if SCHEME.zero == "value":
        return _from_minimum(v, scale, zero, random_bits, SCHEME)
    else:
        if SCHEME.apply == "encode":
            scaled = rounded(v * scale, SCHEME.arithmetic)
        elif SCHEME.apply == "divide":
            divisor = scale
            if SCHEME.has_outer:
                divisor = rounded(tl.div_rn(scale, outer), SCHEME.arithmetic)
            scaled = rounded(tl.div_rn(v, divisor), SCHEME.arithmetic)
        else:
            scaled = rounded(v * reciprocal(scale, outer, SCHEME), SCHEME.arithmetic)
        if SCHEME.kind == "codebook" and SCHEME.by_difference:
            return nearest_by_difference(scaled, SCHEME.element, SCHEME.arithmetic)
        elif SCHEME.kind != "int":
            return _special_codes(encode(scaled, random_bits, SCHEME.element), scaled, SCHEME)
        else:
            integer = to_integer(scaled, random_bits, SCHEME.element)
            if SCHEME.zero == "code":
                integer = integer + zero
            return tl.where(is_nan(scaled), 0, clamp_integer(integer, SCHEME.element))


@triton.jit
def _special_codes(codes, scaled, SCHEME: tl.constexpr):
    """A NaN that arithmetic made, and a scaled -0, where the convention writes a code of its own for them."""
    if not SCHEME.negative_zero:
        codes = tl.where(bits_of(scaled) == SIGN, 0, codes)
    if SCHEME.nan_code is not None:
        codes = tl.where(is_nan(scaled), SCHEME.nan_code, codes)
    return codes


@triton.jit
def reciprocal(scale, outer, SCHEME: tl.constexpr):
    """One correctly rounded reciprocal per block, with the outer scale in the record's order."""
    if not SCHEME.has_outer:
        return rounded(tl.div_rn(1.0, scale), SCHEME.arithmetic)
    elif SCHEME.outer_order == "reciprocal_first":
        first = rounded(tl.div_rn(1.0, outer), SCHEME.arithmetic)
        return rounded(tl.div_rn(first, scale), SCHEME.arithmetic)
    elif SCHEME.outer_order == "folded":
        inner = rounded(scale * rounded(tl.div_rn(1.0, outer), SCHEME.arithmetic), SCHEME.arithmetic)
        result = rounded(tl.div_rn(1.0, inner), SCHEME.arithmetic)
        return tl.where(bits_of(result) == INFINITY, float_of(tl.full((), LARGEST, tl.int32)), result)
    else:
        product = rounded(outer * scale, SCHEME.arithmetic)
        result = rounded(tl.div_rn(1.0, product), SCHEME.arithmetic)
        if SCHEME.finite_reciprocal:
            result = bounded(result)
        return result


@triton.jit
def bounded(v):
    """Infinity of either sign as the largest float32."""
    b = bits_of(v)
    return float_of(tl.where((b & MAGNITUDE) == INFINITY, b - 1, b))


@triton.jit
def _from_minimum(v, scale, zero, random_bits, SCHEME: tl.constexpr):
    """tinygemm: round((v - (z - s * mid)) / s), every operation rounded to the input's dtype."""
    step = rounded(scale * SCHEME.middle_input, SCHEME.arithmetic)
    minimum = rounded(zero - step, SCHEME.arithmetic)
    scaled = rounded(tl.div_rn(rounded(v - minimum, SCHEME.arithmetic), scale), SCHEME.arithmetic)
    integer = to_integer(scaled, random_bits, SCHEME.element)
    return tl.where(is_nan(scaled), 0, clamp_integer(integer, SCHEME.element))


@triton.jit
def combined(scale, outer, SCHEME: tl.constexpr, DTYPE: tl.constexpr):
    """Block scale and outer scale as one decoding scale; DTYPE: precision of the arithmetic."""
    scale = rounded(scale, DTYPE)
    if SCHEME.has_outer:
        if SCHEME.outer_order == "encode":
            scale = rounded(tl.div_rn(scale, outer), DTYPE)
        elif SCHEME.outer_order == "folded":
            scale = rounded(scale * rounded(tl.div_rn(1.0, outer), DTYPE), DTYPE)
        else:
            scale = rounded(scale * outer, DTYPE)
    return scale


@triton.jit
def unscaled(codes, zero, SCHEME: tl.constexpr):
    """Decoded elements before scaling, float32."""
    if SCHEME.zero == "":
        return decode(codes, SCHEME.element)
    elif SCHEME.zero == "code":
        signed = tl.where(codes > SCHEME.element.max_code, codes - (1 << SCHEME.bits), codes)
        return (signed - zero).to(tl.float32)
    else:
        return (codes - SCHEME.middle_code).to(tl.float32)


@triton.jit
def values(codes, scale, zero, SCHEME: tl.constexpr, DTYPE: tl.constexpr):
    """float32 values of a tile; scale is the combined one (blocks, 1)."""
    value = unscaled(codes, zero, SCHEME)
    if SCHEME.stored == "encode":
        return rounded(tl.div_rn(value, scale), DTYPE)
    else:
        product = rounded(rounded(value, DTYPE) * scale, DTYPE)
        if SCHEME.dequantize == "float32" and SCHEME.element.specials == "ieee":
            product = _stay_finite(product, value, scale)
        elif SCHEME.dequantize == "float32":
            # Without infinities among the values only the scale decides.
            limit = tl.where((bits_of(scale) & MAGNITUDE) < INFINITY, LARGEST, INFINITY)
            product = tl.clamp(product, -float_of(limit), float_of(limit), propagate_nan=tl.PropagateNan.ALL)
        if SCHEME.zero == "value":
            product = rounded(product + zero, DTYPE)
        return product


@triton.jit
def _stay_finite(product, value, scale):
    """Finite times finite stops at the largest finite float32."""
    finite = ((bits_of(value) & MAGNITUDE) < INFINITY) & ((bits_of(scale) & MAGNITUDE) < INFINITY)
    b = bits_of(product)
    over = ((b & MAGNITUDE) == INFINITY) & finite
    return float_of(tl.where(over, (b & SIGN) | LARGEST, b))


@triton.jit
def loaded_zero(stored, SCHEME: tl.constexpr):
    """A stored zero point as int32 code or float32."""
    if SCHEME.zero == "code":
        return stored.to(tl.int32)
    elif SCHEME.zero_storage == "float32":
        return canonical(stored)
    else:
        v = float_of(stored.to(tl.int32) << 16)
        return float_of(tl.where(is_nan(v), 0x7FC00000, bits_of(v)))


@triton.jit
def saturated(v, marked, scale, outer, SCHEME: tl.constexpr):
    """Whether saturation changed the rounded element; `marked` are codes made under the overflow policy "mark"."""
    if SCHEME.kind != "codebook":
        return (marked & MARK) != 0
    else:
        units = in_units(v, scale, outer, scale, SCHEME)
        return (bits_of(canonical(units)) & MAGNITUDE) > SCHEME.max_bits


@triton.jit
def in_units(v, scale, outer, zero, SCHEME: tl.constexpr):
    """v / s in float32 (v * S for an encoding scale), for tinygemm (v - z) / s."""
    if SCHEME.zero == "value":
        v = v - zero
    if SCHEME.stored == "encode":
        return v * scale
    else:
        return (
            tl.div_rn(tl.div_rn(v, scale), decoding(outer, SCHEME))
            if SCHEME.has_outer
            else tl.div_rn(v, scale)
        )


@triton.jit
def decoding(outer, SCHEME: tl.constexpr):
    """The outer scale as a factor of values."""
    if SCHEME.outer.stored == "encode":
        return tl.div_rn(1.0, outer)
    else:
        return outer


@triton.jit
def passed_on(g, lost, DTYPE: tl.constexpr):
    """The gradient g where the element was not lost to saturation, +0 where it was; a float32 NaN keeps its payload."""
    dx = tl.where(lost, 0.0, widened(g))
    if DTYPE == "float32":
        return dx
    else:
        return narrow(dx, DTYPE, False)
