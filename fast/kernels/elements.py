"""Codes of scaled elements, and values of codes: `reference.encode` and `reference.elements` as device functions.

Everything takes float32 and gives int32 codes (or float32 values). `E` is an `Element`, `RULE` a `Rule` (see `rule`). The two
8-bit float formats have conversion instructions; the other floats round by one float32 addition whose unit is the last kept
bit; modes other than nearest even go through integers.
"""

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
from fast.kernels.e2m1 import e2m1_codes
from fast.kernels.rounding import round_shift

# Beyond every integer format with any zero point.
LARGEST_INTEGER = tl.constexpr(16384.0)
LARGEST_INTEGER_EXPONENT = tl.constexpr(14)
# What the overflow policy "mark" puts in place of a saturated code.
MARK = tl.constexpr(1 << 20)
# 1.5 * 2**23: adding it rounds to integers, to nearest even.
TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def encode(v, words, E: tl.constexpr):
    """int32 codes of float32 values by the format's rule."""
    if E.hardware == "e4m3":
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif E.hardware == "e5m2":
        return v.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    elif E.hardware == "e2m1":
        return e2m1_codes(v).to(tl.int32)
    elif E.kind == "float":
        return _encode_float(v, words, E)
    elif E.kind == "int":
        integer = to_integer(v, words, E)
        return tl.where(is_nan(v), E.nan_code, clamp_integer(integer, E))
    elif E.kind == "codebook":
        return _encode_codebook(v, E)
    else:
        return _encode_scale(v, words, E)


@triton.jit
def _encode_float(v, words, E: tl.constexpr):
    b = bits_of(v)
    if E.rounding == "nearest_even" and E.overflow == "saturate" and E.emin > -126:
        return _finish(nonnegative_code(tl.abs(v), E), b, E)
    else:
        magnitude = b & MAGNITUDE
        exponent = tl.maximum(magnitude >> 23, 1) - 127
        significand = (magnitude & MANTISSA) | tl.where(magnitude < HIDDEN, 0, HIDDEN)
        return encode_parts(b, exponent, significand, words, E)


@triton.jit
def nonnegative_code(magnitude, E: tl.constexpr):
    """Codes of non-negative values, saturating: adding 2**(e + 23 - mantissa) leaves the kept bits at the low end."""
    a = tl.minimum(magnitude, float_of(tl.full((), E.max_bits, tl.int32)))
    least = float_of(tl.full((), (E.emin + 127) << 23, tl.int32))
    unit = (bits_of(tl.maximum(a, least)) & INFINITY) + ((23 - E.mantissa) << 23)
    b = bits_of(a + float_of(unit))
    exponent = ((b >> 23) << E.mantissa) - ((E.emin + 150 - E.mantissa) << E.mantissa)
    return (b & MANTISSA) + exponent


@triton.jit
def encode_parts(b, exponent, significand, words, E: tl.constexpr):
    """Codes of +-significand * 2**(exponent - 23) in a float format; b gives sign, infinity and NaN."""
    below = tl.maximum(E.emin - exponent, 0)
    kept = round_shift(significand, below + (23 - E.mantissa), b < 0, words, E.rounding)
    code = kept + (tl.maximum(exponent - E.emin, 0) << E.mantissa)
    return _finish(_limit(code, b, E), b, E)


@triton.jit
def _limit(code, b, E: tl.constexpr):
    """The largest finite code, or what the overflow policy and the direction of rounding put beyond it."""
    if E.overflow == "saturate":
        return tl.minimum(code, E.max_code)
    else:
        over = code > E.max_code
        if E.overflow == "mark":
            return tl.where(over, MARK, code)
        else:
            if (
                E.rounding == "toward_zero"
                or E.rounding == "to_odd"
                or E.rounding == "up"
                or E.rounding == "down"
            ):
                inward = (b & MAGNITUDE) < INFINITY
                if E.rounding == "up":
                    inward = inward & (b < 0)
                elif E.rounding == "down":
                    inward = inward & (b >= 0)
                code = tl.where(over & inward, E.max_code, code)
                over = over & (inward == 0)
            return tl.where(over, E.beyond, code)


@triton.jit
def _finish(code, b, E: tl.constexpr):
    """Sign and NaN of a magnitude's code."""
    if E.sign_mask != 0:
        if E.negative_zero:
            code = code | ((b >> (32 - E.bits)) & E.sign_mask)
        else:
            code = tl.where((b < 0) & (code != 0), code | E.sign_mask, code)
    return tl.where((b & MAGNITUDE) > INFINITY, E.nan_code, code)


@triton.jit
def to_integer(v, words, E: tl.constexpr):
    """Signed int32 nearest to v * 2**fraction_bits; beyond +-2**14 (and for NaN) any integer beyond the formats."""
    if E.rounding == "nearest_even":
        if E.fraction_bits != 0:
            v = v * (1 << E.fraction_bits)
        return nearest_integer(v)
    else:
        b = bits_of(v)
        magnitude = b & MAGNITUDE
        exponent = tl.maximum(magnitude >> 23, 1) - 127 + E.fraction_bits
        significand = (magnitude & MANTISSA) | tl.where(magnitude < HIDDEN, 0, HIDDEN)
        return shifted_integer(b, exponent, significand, words, E)


@triton.jit
def nearest_integer(v):
    """Nearest int32, ties to even, of values clamped to +-2**14."""
    v = tl.minimum(tl.maximum(v, -LARGEST_INTEGER), LARGEST_INTEGER)
    return bits_of(v + TO_INTEGER) - 0x4B400000


@triton.jit
def shifted_integer(b, exponent, significand, words, E: tl.constexpr):
    """Signed integer nearest to +-significand * 2**(exponent - 23) in any mode."""
    shift = 23 - tl.minimum(exponent, LARGEST_INTEGER_EXPONENT)
    kept = round_shift(significand, shift, b < 0, words, E.rounding)
    return tl.where(b < 0, -kept, kept)


@triton.jit
def clamp_integer(integer, E: tl.constexpr):
    """int32 saturated to the format's range and masked to its bits."""
    if E.overflow == "mark":
        return tl.where((integer < E.low) | (integer > E.high), MARK, 0)
    else:
        return tl.minimum(tl.maximum(integer, E.low), E.high) & ((1 << E.bits) - 1)


@triton.jit
def _encode_scale(v, words, E: tl.constexpr):
    b = bits_of(v)
    exponent, significand = normalized(b & MAGNITUDE)
    zero = (b & MAGNITUDE) == 0
    exponent = tl.where(zero, -127, exponent)
    significand = tl.where(zero, 0, significand)
    kept = round_shift(significand, 23 + zero.to(tl.int32), b < 0, words, E.rounding)
    code = tl.maximum(exponent + E.bias + kept - 1, 0)
    code = tl.where((b & MAGNITUDE) == INFINITY, E.max_code + 1, code)
    code = _limit(code, b, E)
    if E.overflow != "saturate":
        code = tl.where(zero, E.nan_code, code)
    return tl.where(((b & MAGNITUDE) > INFINITY) | ((b < 0) & (b != SIGN)), E.nan_code, code)


@triton.jit
def _encode_codebook(v, E: tl.constexpr):
    """How many midpoints lie below; NaN counts as zero."""
    code = (v > E.thresholds[0]).to(tl.int32)
    for i in tl.static_range(1, len(E.thresholds)):
        code += (v > E.thresholds[i]).to(tl.int32)
    return tl.where(is_nan(v), E.zero_code, code)


@triton.jit
def nearest_by_difference(v, E: tl.constexpr, DTYPE: tl.constexpr):
    """Index of the smallest rounded |v - value|, the first of equals (NaN: 0): torchao's NF4."""
    first = rounded(tl.full((), E.table[0], tl.float32), DTYPE)
    best = bits_of(rounded(v - first, DTYPE)) & MAGNITUDE
    index = tl.zeros_like(best)
    for i in tl.static_range(1, len(E.table)):
        value = rounded(tl.full((), E.table[i], tl.float32), DTYPE)
        distance = bits_of(rounded(v - value, DTYPE)) & MAGNITUDE
        closer = distance < best
        best = tl.where(closer, distance, best)
        index = tl.where(closer, i, index)
    return tl.where(is_nan(v), 0, index)


@triton.jit
def decode(code, E: tl.constexpr):
    """float32 values of int32 codes, exact; NaN codes give NaN."""
    if E.kind == "float":
        if E.loads == "e4m3":
            return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif E.loads == "e5m2":
            # The high byte of a float16.
            return (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            return _decode_float(code, E)
    elif E.kind == "int":
        integer = code & ((1 << E.bits) - 1)
        if E.signed:
            integer = tl.where(integer > E.max_code, integer - (1 << E.bits), integer)
        value = integer.to(tl.float32)
        if E.fraction_bits != 0:
            value = value * (1.0 / (1 << E.fraction_bits))
        if E.specials == "nan_minimum":
            value = tl.where((code & 0xFF) == E.nan_code, float("nan"), value)
        return value
    elif E.kind == "codebook":
        return _decode_codebook(code & ((1 << E.bits) - 1), E)
    else:
        power = tl.where(code == 0, 0x00400000, code << 23)
        return float_of(tl.where(code == 255, 0x7FC00000, power))


@triton.jit
def e4m3_value(code):
    """float32 of non-negative float8_e4m3fn codes (int32), NaN for 127, without the conversion instruction.

    Clamped codes that come from one conversion and go into another were compiled wrongly (triton 3.6.0, reports/LOG.md).
    """
    return tl.where(code == 127, float("nan"), finite_e4m3_value(code))


@triton.jit
def finite_e4m3_value(code):
    """The same for codes that are not 127."""
    return float_of(code << 20) * 1.329227995784916e36


@triton.jit
def _decode_float(code, E: tl.constexpr):
    """Fields moved into a float32 of the same fraction, times the power of two between the biases."""
    magnitude = code & ((1 << (E.bits - 1)) - 1)
    if E.bias == 127:
        value = magnitude << (23 - E.mantissa)
    else:
        factor = float_of(tl.full((), (127 - E.bias + 127) << 23, tl.int32))
        value = bits_of(float_of(magnitude << (23 - E.mantissa)) * factor)
    if E.specials == "ieee":
        value = tl.where(magnitude == E.max_code + 1, INFINITY, value)
        value = tl.where(magnitude > E.max_code + 1, 0x7FC00000, value)
    elif E.specials == "nan_ones":
        value = tl.where(magnitude > E.max_code, 0x7FC00000, value)
    sign = (code >> (E.bits - 1)) & 1
    if E.specials == "nan_negative_zero":
        value = tl.where(code == (1 << (E.bits - 1)), 0x7FC00000, value)
        sign = tl.where(magnitude == 0, 0, sign)
    nan = value == 0x7FC00000
    return float_of(tl.where(nan, value, value | (sign << 31)))


@triton.jit
def _decode_codebook(code, E: tl.constexpr):
    value = tl.full((), E.values[0], tl.float32) + tl.zeros_like(code).to(tl.float32)
    for i in tl.static_range(1, len(E.values)):
        value = tl.where(code == i, E.values[i], value)
    return value


@triton.jit
def element_codes(v, scale, outer, zero, words, RULE: tl.constexpr):
    """int32 codes of a tile (blocks, elements): v float32, scale (blocks, 1) float32, zero (blocks, 1) or None."""
    if RULE.power_of_two:
        codes = _shifted(v, scale, words, RULE)
    else:
        codes = _scaled(v, scale, outer, zero, words, RULE)
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
    """2**-e of an e8m0 scale 2**e as float32; NaN for NaN. 2**127 for the smallest scale, unless the record says else."""
    exponent = bits_of(scale) >> 23
    if RULE.smallest_exponent is not None:
        exponent = tl.where(exponent == 0, RULE.smallest_exponent + 127, exponent)
    inverse = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    return float_of(tl.where(exponent == 255, 0x7FC00000, inverse))


@triton.jit
def _shifted(v, scale, words, RULE: tl.constexpr):
    """v * 2**-e, rounded once."""
    if RULE.rounding == "nearest_even" and RULE.overflow == "saturate":
        if RULE.house and RULE.kind == "float":
            # Under a scale from outside an infinity counts as the largest float32.
            largest = float_of(tl.full((), LARGEST, tl.int32))
            v = tl.clamp(v, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        # Exact, or below 2**-126, where every format rounds to zero.
        return encode(v * power_multiplier(scale, RULE), words, RULE.element)
    else:
        exponent = tl.maximum(bits_of(scale) >> 23, 0) - 127
        if RULE.smallest_exponent is not None:
            exponent = tl.where(exponent == -127, RULE.smallest_exponent, exponent)
        b = bits_of(v)
        magnitude = b & MAGNITUDE
        if RULE.kind == "int":
            own = tl.maximum(magnitude >> 23, 1) - 127 + (RULE.fraction_bits - exponent)
            significand = (magnitude & MANTISSA) | tl.where(magnitude < HIDDEN, 0, HIDDEN)
            made = clamp_integer(shifted_integer(b, own, significand, words, RULE.element), RULE.element)
            return tl.where(magnitude > INFINITY, 0, made)
        else:
            own, significand = normalized(magnitude)
            significand = tl.where(magnitude == 0, 0, significand)
            # A zero has the smallest exponent: any above it would show in the code.
            own = tl.where(magnitude >= INFINITY, 128, own - exponent)
            own = tl.where(magnitude == 0, RULE.element.emin, own)
            return encode_parts(b, own, significand, words, RULE.element)


@triton.jit
def _scaled(v, scale, outer, zero, words, RULE: tl.constexpr):
    """v divided by its scale in the order of the record, and rounded."""
    if RULE.zero == "value":
        return _from_minimum(v, scale, zero, words, RULE)
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
            return _special_codes(encode(scaled, words, RULE.element), scaled, RULE)
        else:
            integer = to_integer(scaled, words, RULE.element)
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
def _from_minimum(v, scale, zero, words, RULE: tl.constexpr):
    """tinygemm: round((v - (z - s * mid)) / s), every operation rounded to the input's dtype."""
    step = rounded(scale * RULE.middle_input, RULE.arithmetic)
    minimum = rounded(zero - step, RULE.arithmetic)
    scaled = rounded(tl.div_rn(rounded(v - minimum, RULE.arithmetic), scale), RULE.arithmetic)
    integer = to_integer(scaled, words, RULE.element)
    return tl.where(is_nan(scaled), 0, clamp_integer(integer, RULE.element))
