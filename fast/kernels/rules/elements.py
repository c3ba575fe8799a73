"""Codes of values, and values of codes: `reference.encode` and `reference.decode` as device functions.

Everything takes float32 and gives int32 codes (or float32 values). `E` is an `Element`, `SCHEME` a `SchemeConstants` (see
`scheme.constants`). The two 8-bit float formats have conversion instructions; the other floats round by one float32 addition
whose unit is the last kept bit; modes other than nearest even go through integers.

`store_packed` and `load_packed`: tiles of codes to little-endian bytes and back, as `reference.pack` lays them out. A tile is
(blocks, elements) with the elements of a block contiguous in memory and whole bytes per block. Neighbours are combined in
pairs, so that codes that lie in one thread stay there. Odd widths in blocks of 32 or more go by `sm90.integers`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import (
    HIDDEN,
    INFINITY,
    MAGNITUDE,
    MANTISSA,
    SIGN,
    bits_of,
    float_of,
    is_nan,
    normalized,
    rounded,
)
from fast.kernels.sm90.bit_tricks import combined_digits
from fast.kernels.sm90.codebooks import codebook_values
from fast.kernels.sm90.fp4_fp6 import e2m1_codes
from fast.kernels.sm90.integers import load_quads, store_quads

# The rounding rule of `reference.formats.encode` on int32 significands, and random bits for its stochastic mode.

STOCHASTIC_BITS = tl.constexpr(24)
LARGEST_SHIFT = tl.constexpr(25)


@triton.jit
def round_shift(significand, shift, negative, random_bits, MODE: tl.constexpr):
    """Integer nearest to significand / 2**shift; 0 <= significand < 2**24, shift >= 1."""
    if MODE == "stochastic":
        excess = tl.minimum(tl.maximum(shift - STOCHASTIC_BITS, 0), 31)
        lost = tl.minimum(shift, STOCHASTIC_BITS)
        word = (random_bits.to(tl.int32, bitcast=True) >> 8) & 0xFFFFFF
        return ((significand >> excess) + (word >> (STOCHASTIC_BITS - lost))) >> lost
    else:
        shift = tl.minimum(shift, LARGEST_SHIFT)
        floor = significand >> shift
        if MODE == "nearest_even":
            return (significand + ((1 << (shift - 1)) - 1) + (floor & 1)) >> shift
        elif MODE == "nearest_away":
            return (significand + (1 << (shift - 1))) >> shift
        elif MODE == "toward_zero":
            return floor
        else:
            inexact = ((floor << shift) != significand).to(tl.int32)
            if MODE == "to_odd":
                return floor | inexact
            elif MODE == "down":
                return floor + (inexact & negative.to(tl.int32))
            else:
                return floor + (inexact & (negative == 0).to(tl.int32))


# Beyond every integer format with any zero point.
LARGEST_INTEGER = tl.constexpr(16384.0)
LARGEST_INTEGER_EXPONENT = tl.constexpr(14)
# What the overflow policy "mark" puts in place of a saturated code.
MARK = tl.constexpr(1 << 20)
# 1.5 * 2**23: adding it rounds to integers, to nearest even.
TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def encode(v, random_bits, E: tl.constexpr):
    """int32 codes of float32 values by the format's rule."""
    if E.hardware == "e4m3":
        return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    elif E.hardware == "e5m2":
        return v.to(tl.float8e5).to(tl.uint8, bitcast=True).to(tl.int32)
    elif E.hardware == "e2m1":
        return e2m1_codes(v).to(tl.int32)
    elif E.kind == "float":
        return _encode_float(v, random_bits, E)
    elif E.kind == "int":
        integer = to_integer(v, random_bits, E)
        return tl.where(is_nan(v), E.nan_code, clamp_integer(integer, E))
    elif E.kind == "codebook":
        return _encode_codebook(v, E)
    else:
        return _encode_scale(v, random_bits, E)


@triton.jit
def _encode_float(v, random_bits, E: tl.constexpr):
    b = bits_of(v)
    # The largest values of some formats are so large that float32 has no constant to round them by.
    has_constants: tl.constexpr = E.emin > -126 and (E.max_bits >> 23) + 23 - E.mantissa < 255
    if E.rounding == "nearest_even" and E.overflow == "saturate" and has_constants:
        return _finish(nonnegative_code(tl.abs(v), E), b, E)
    else:
        magnitude = b & MAGNITUDE
        exponent = tl.maximum(magnitude >> 23, 1) - 127
        significand = (magnitude & MANTISSA) | tl.where(magnitude < HIDDEN, 0, HIDDEN)
        return encode_parts(b, exponent, significand, random_bits, E)


@triton.jit
def nonnegative_code(magnitude, E: tl.constexpr):
    """Codes of non-negative values, saturating: adding 2**(e + 23 - mantissa) leaves the stored bits at the low end."""
    a = tl.minimum(magnitude, float_of(tl.full((), E.max_bits, tl.int32)))
    least = float_of(tl.full((), (E.emin + 127) << 23, tl.int32))
    unit = (bits_of(tl.maximum(a, least)) & INFINITY) + ((23 - E.mantissa) << 23)
    b = bits_of(a + float_of(unit))
    exponent = ((b >> 23) << E.mantissa) - ((E.emin + 150 - E.mantissa) << E.mantissa)
    return (b & MANTISSA) + exponent


@triton.jit
def encode_parts(b, exponent, significand, random_bits, E: tl.constexpr):
    """Codes of +-significand * 2**(exponent - 23) in a float format; b gives sign, infinity and NaN."""
    below = tl.maximum(E.emin - exponent, 0)
    shifted = round_shift(significand, below + (23 - E.mantissa), b < 0, random_bits, E.rounding)
    code = shifted + (tl.maximum(exponent - E.emin, 0) << E.mantissa)
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
def to_integer(v, random_bits, E: tl.constexpr):
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
        return shifted_integer(b, exponent, significand, random_bits, E)


@triton.jit
def nearest_integer(v):
    """Nearest int32, ties to even, of values clamped to +-2**14."""
    v = tl.minimum(tl.maximum(v, -LARGEST_INTEGER), LARGEST_INTEGER)
    return bits_of(v + TO_INTEGER) - 0x4B400000


@triton.jit
def shifted_integer(b, exponent, significand, random_bits, E: tl.constexpr):
    """Signed integer nearest to +-significand * 2**(exponent - 23) in any mode."""
    shift = 23 - tl.minimum(exponent, LARGEST_INTEGER_EXPONENT)
    shifted = round_shift(significand, shift, b < 0, random_bits, E.rounding)
    return tl.where(b < 0, -shifted, shifted)


@triton.jit
def clamp_integer(integer, E: tl.constexpr):
    """int32 saturated to the format's range and masked to its bits."""
    if E.overflow == "mark":
        return tl.where((integer < E.low) | (integer > E.high), MARK, 0)
    else:
        return tl.minimum(tl.maximum(integer, E.low), E.high) & ((1 << E.bits) - 1)


@triton.jit
def _encode_scale(v, random_bits, E: tl.constexpr):
    b = bits_of(v)
    exponent, significand = normalized(b & MAGNITUDE)
    zero = (b & MAGNITUDE) == 0
    exponent = tl.where(zero, -127, exponent)
    significand = tl.where(zero, 0, significand)
    shifted = round_shift(significand, 23 + zero.to(tl.int32), b < 0, random_bits, E.rounding)
    code = tl.maximum(exponent + E.bias + shifted - 1, 0)
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
        return codebook_values(code, E)
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
def pairs(codes, BITS: tl.constexpr):
    """Neighbouring codes of BITS bits as one of twice the width: (P, S) -> (P, S / 2), the even index in the low bits."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return low | (high << BITS)


@triton.jit
def store_packed(out, codes, block, inside, BITS: tl.constexpr):
    """Write a tile's codes behind out; block: (P, 1) block indices, inside: which of them exist."""
    SIZE: tl.constexpr = codes.shape[1]
    if BITS == 4:
        byte = pairs(codes, 4)
        at = block * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        tl.store(out + at, byte.to(tl.uint8), mask=inside)
    elif BITS == 2:
        byte = pairs(pairs(codes, 2), 4)
        at = block * (SIZE // 4) + tl.arange(0, SIZE // 4)[None, :]
        tl.store(out + at, byte.to(tl.uint8), mask=inside)
    elif BITS == 6:
        _store_six(out, pairs(pairs(codes, 6), 12), block, inside)
    elif SIZE % 32 == 0:
        store_quads(out, combined_digits(codes, BITS, 4), block, inside, BITS)
    else:
        _store_bytes(
            out, pairs(pairs(pairs(codes.to(tl.int64), BITS), 2 * BITS), 4 * BITS), block, inside, BITS
        )


@triton.jit
def _store_six(out, triples, block, inside):
    """Sixteen 6-bit codes, four times 24 bits, as three words."""
    COUNT: tl.constexpr = triples.shape[1] // 4
    even, odd = tl.split(tl.reshape(triples, (triples.shape[0], 2 * COUNT, 2)))
    first, third = tl.split(tl.reshape(even, (even.shape[0], COUNT, 2)))
    second, fourth = tl.split(tl.reshape(odd, (odd.shape[0], COUNT, 2)))
    word = (
        out.to(tl.pointer_type(tl.int32), bitcast=True)
        + block * (3 * COUNT)
        + 3 * tl.arange(0, COUNT)[None, :]
    )
    tl.store(word, first | (second << 24), mask=inside)
    tl.store(word + 1, ((second >> 8) & 0xFFFF) | (third << 16), mask=inside)
    tl.store(word + 2, ((third >> 16) & 0xFF) | (fourth << 8), mask=inside)


@triton.jit
def _store_bytes(out, octets, block, inside, BITS: tl.constexpr):
    """Eight codes, BITS bytes."""
    COUNT: tl.constexpr = octets.shape[1]
    at = out + block * (COUNT * BITS) + BITS * tl.arange(0, COUNT)[None, :]
    for byte in tl.static_range(BITS):
        tl.store(at + byte, ((octets >> (8 * byte)) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def load_packed(source, block, inside, SIZE: tl.constexpr, BITS: tl.constexpr):
    """int32 codes (P, SIZE) of blocks packed behind `source`."""
    if BITS == 4:
        at = block * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        byte = tl.load(source + at, mask=inside, other=0).to(tl.int32)
        return tl.reshape(tl.join(byte & 15, byte >> 4), (byte.shape[0], SIZE))
    elif BITS == 2:
        at = block * (SIZE // 4) + tl.arange(0, SIZE // 4)[None, :]
        byte = tl.load(source + at, mask=inside, other=0).to(tl.int32)
        half = tl.reshape(tl.join(byte & 15, byte >> 4), (byte.shape[0], SIZE // 2))
        return tl.reshape(tl.join(half & 3, half >> 2), (byte.shape[0], SIZE))
    elif BITS == 6:
        return _load_six(source, block, inside, SIZE)
    elif SIZE % 32 == 0:
        quad = load_quads(source, block, inside, SIZE, BITS) & ((1 << (4 * BITS)) - 1)
        return _halves(_halves(quad, 2 * BITS), BITS)
    else:
        return _load_bytes(source, block, inside, SIZE, BITS)


@triton.jit
def _load_bytes(source, block, inside, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Eight codes from BITS bytes, as one integer."""
    COUNT: tl.constexpr = SIZE // 8
    at = source + block * (COUNT * BITS) + BITS * tl.arange(0, COUNT)[None, :]
    octet = tl.zeros((block.shape[0], COUNT), tl.int64)
    for byte in tl.static_range(BITS):
        octet |= tl.load(at + byte, mask=inside, other=0).to(tl.int64) << (8 * byte)
    quad = _halves(octet, 4 * BITS)
    return _halves(_halves(quad, 2 * BITS).to(tl.int32), BITS)


@triton.jit
def _halves(codes, BITS: tl.constexpr):
    """Elements (P, S) as two of BITS bits each, (P, 2 S), the low bits first: the inverse of `pairs`."""
    low, high = codes & ((1 << BITS) - 1), codes >> BITS
    return tl.reshape(tl.join(low, high), (codes.shape[0], 2 * codes.shape[1]))


@triton.jit
def _load_six(source, block, inside, SIZE: tl.constexpr):
    """Three words hold sixteen codes."""
    COUNT: tl.constexpr = SIZE // 16
    word = (
        source.to(tl.pointer_type(tl.int32), bitcast=True)
        + block * (3 * COUNT)
        + 3 * tl.arange(0, COUNT)[None, :]
    )
    a = tl.load(word, mask=inside, other=0)
    b = tl.load(word + 1, mask=inside, other=0)
    c = tl.load(word + 2, mask=inside, other=0)
    first, second = a & 0xFFFFFF, ((a >> 24) & 0xFF) | ((b & 0xFFFF) << 8)
    third, fourth = ((b >> 16) & 0xFFFF) | ((c & 0xFF) << 16), (c >> 8) & 0xFFFFFF
    even = tl.reshape(tl.join(first, third), (first.shape[0], 2 * COUNT))
    odd = tl.reshape(tl.join(second, fourth), (first.shape[0], 2 * COUNT))
    triple = tl.reshape(tl.join(even, odd), (first.shape[0], 4 * COUNT))
    half = tl.reshape(tl.join(triple & 0xFFF, triple >> 12), (first.shape[0], 8 * COUNT))
    return tl.reshape(tl.join(half & 63, half >> 6), (first.shape[0], SIZE))
