"""Codes and values of default schemes by the instruction sequences of `sm90`.

Only for scales that were computed from the tile: then a block with NaN or infinity has a NaN scale, every other element is
finite, and what must become the poison code is masked a word at a time. Everything else goes through `elements` and `values`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import NAN, bits_of, float_of, is_nan
from fast.kernels.rules.packing import store_packed
from fast.kernels.rules.scaled import power_multiplier
from fast.kernels.sm90.bf16x2 import rounded_once
from fast.kernels.sm90.bit_tricks import (
    TO_INTEGER,
    bytes_of,
    e2m1_floats,
    e2m1_words,
    e2m3_bytes,
    e3m2_bytes,
    int4_words,
    mask_unless_poisoned,
    nibble_words,
    six_words,
)
from fast.kernels.sm90.codebook16 import codebook_floats
from fast.kernels.sm90.division import (
    corrected_quotient,
    reciprocal_error,
    reciprocal_error_cut,
    reciprocal_rn,
    round_to_dtype,
)
from fast.kernels.sm90.pack_32 import integer_quads, store_quads
from fast.kernels.sm90.uniform_codebook import stretched_floats
from fast.kernels.tile.strips import store_elements, store_words_of


@triton.jit
def multiplier(scale, scale_code, prepared, SCHEME: tl.constexpr):
    """What an element is multiplied by, (blocks, 1); NaN in poisoned blocks.

    scale_code: the e8m0 code of a power of two. prepared: the multiplier, where `choose_scales` has computed it.
    """
    if SCHEME.power_of_two and SCHEME.level.target_exponent >= 2:
        # Codes end at 253 there, so 2**(127 - code) is a normal number.
        return float_of(tl.where(scale_code == 255, NAN, (254 - scale_code) << 23))
    elif SCHEME.power_of_two:
        return power_multiplier(scale, SCHEME)
    elif SCHEME.has_outer or SCHEME.ranged:
        return prepared
    elif SCHEME.on_ordinary:
        # Far from the ends of the exponent range. A product that replaces a quotient takes the reciprocal as it is.
        return (
            reciprocal_rn(scale)
            if SCHEME.apply == "divide"
            else round_to_dtype(reciprocal_rn(scale), SCHEME.arithmetic)
        )
    elif SCHEME.level.quick and SCHEME.level.target >= 4.0:
        # Then no scale is above 2**126, and its reciprocal is a normal number.
        return reciprocal_rn(scale)
    elif SCHEME.level.quick:
        return _reciprocals(scale)
    else:
        return tl.div_rn(1.0, scale)


@triton.jit
def _reciprocals(scale):
    """1 / scale, correctly rounded, of a tile of scales that are 2**-126 or more, or NaN; few tiles have one above 2**125."""
    if tl.max(tl.reshape(scale, (scale.numel,)), axis=0) <= 4.253529586511731e37:
        made = reciprocal_rn(scale)
    else:
        made = tl.div_rn(1.0, scale)
    return made


@triton.jit
def scaled(v, inv_scale, divisor, zero, SCHEME: tl.constexpr):
    """Elements in units of their scale before they are rounded to codes: v * m, or v / divisor, in the record's arithmetic.

    zero: of records with a float zero point, which they subtract. For codebooks always in float32: their thresholds know the
    arithmetic (`difference_thresholds`).
    """
    if SCHEME.zero == "value":
        # zero is min + mid * scale, rounded at each step, and the steps back are rounded as well.
        minimum = round_to_dtype(
            zero - round_to_dtype(divisor * SCHEME.middle_input, SCHEME.arithmetic), SCHEME.arithmetic
        )
        v = rounded_once(v - minimum, SCHEME.arithmetic, SCHEME.has_ptx)
    if SCHEME.corrected and SCHEME.has_outer:
        y = corrected_quotient(v, inv_scale, reciprocal_error_cut(inv_scale, divisor))
    elif SCHEME.corrected:
        y = corrected_quotient(v, inv_scale, reciprocal_error(inv_scale, divisor))
    else:
        y = v * inv_scale
    if SCHEME.arithmetic != "float32" and SCHEME.kind != "codebook":
        y = rounded_once(y, SCHEME.arithmetic, SCHEME.has_ptx)
    if SCHEME.on_ordinary and not SCHEME.negative_zero and SCHEME.kind == "float":
        # -0 becomes +0, any other value stays.
        y = y + 0.0
    return y


@triton.jit
def integers(v, inv_scale, scale, zero, SCHEME: tl.constexpr):
    """Rounded integers + 1.5 * 2**23, zero point included, inside the format's range.

    In poisoned blocks they are NaN, or 0 where elements are brought into the range.
    """
    y = scaled(v, inv_scale, scale, zero, SCHEME)
    if SCHEME.fraction_bits != 0:
        y = y * (1 << SCHEME.fraction_bits)
    t = y + TO_INTEGER
    if SCHEME.clamps:
        t = _in_range(t, scale, zero, SCHEME)
    return t


@triton.jit
def _in_range(t, scale, zero, SCHEME: tl.constexpr):
    """Integers n + 1.5 * 2**23 as min(max(n + zero, lowest), highest) + 1.5 * 2**23; 0 for NaN in poisoned blocks.

    The adder saturates to [0, 1] for nothing: with l = lowest - zero and B bits, (n - l) / 2**B stops at 0, then
    (highest - lowest) / 2**B less that, where NaN has become 0. All of these are exact.
    """
    UNIT: tl.constexpr = 1.0 / (1 << SCHEME.bits)
    SPAN: tl.constexpr = SCHEME.highest - SCHEME.lowest
    LEAST: tl.constexpr = -(SCHEME.lowest + TO_INTEGER) * UNIT
    if SCHEME.zero == "code":
        offset = zero.to(tl.float32) * UNIT + LEAST
    else:
        offset = tl.full((1, 1), LEAST, tl.float32)
    top = tl.where(is_nan(scale), TO_INTEGER + SPAN, TO_INTEGER + SCHEME.highest)
    return tl.inline_asm_elementwise(
        "{ .reg .f32 p; fma.rn.sat.f32 p, $1, $4, $2; fma.rn.sat.f32 p, p, 0fBF800000, $5; fma.rn.f32 $0, p, $6, $3; }",
        "=f,f,f,f,f,f,f", [t, offset, top, UNIT, SPAN * UNIT, -1.0 / UNIT],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def store_codes(
    codes, at, inside, block, exists, v, inv_scale, scale, zero, SCHEME: tl.constexpr, PACKED: tl.constexpr
):
    """Codes of a tile, packed where the operation asks for it."""
    if SCHEME.fast_path == "e4m3":
        y = scaled(v, inv_scale, scale, zero, SCHEME)
        store_elements(codes + at, y.to(tl.float8e4nv).to(tl.uint8, bitcast=True), inside)
    elif SCHEME.fast_path == "e5m2":
        y = scaled(v, inv_scale, scale, zero, SCHEME)
        store_elements(codes + at, y.to(tl.float8e5).to(tl.uint8, bitcast=True), inside)
    elif SCHEME.digits != "":
        _store_integers(codes, at, inside, block, exists, v, inv_scale, scale, zero, SCHEME, PACKED)
    elif SCHEME.fast_path == "codebook":
        y = scaled(v, inv_scale, scale, zero, SCHEME)
        # A multiplier is NaN where the scale is, and where a block of zeros has the scale 0.
        poison = inv_scale if SCHEME.on_ordinary else scale
        _store_nibbles(
            codes, at, inside, block, exists, bits_of(codebook_floats(y, SCHEME.element)), poison, PACKED
        )
    elif SCHEME.fast_path == "e2m1":
        _store_e2m1(codes, at, inside, block, exists, v, inv_scale, scale, SCHEME, PACKED)
    else:
        _store_six(codes, at, inside, block, exists, v, inv_scale, scale, SCHEME, PACKED)


@triton.jit
def _store_integers(
    codes, at, inside, block, exists, v, inv_scale, scale, zero, SCHEME: tl.constexpr, PACKED: tl.constexpr
):
    if SCHEME.fast_path == "stretched":
        t = bits_of(stretched_floats(v * inv_scale, SCHEME.element))
    else:
        t = bits_of(integers(v, inv_scale, scale, zero, SCHEME))
    if PACKED and SCHEME.bits == 4 and SCHEME.digits == "signed":
        store_words_of(codes, at, int4_words(t, mask_unless_poisoned(scale, -1)), block, exists)
    elif PACKED and v.shape[1] % 32 == 0:
        quads = integer_quads(t, mask_unless_poisoned(scale, -1), SCHEME.bits, SCHEME.digits == "signed")
        store_quads(codes, quads, block, exists, SCHEME.bits)
    elif PACKED:
        mask = mask_unless_poisoned(scale, (1 << SCHEME.bits) - 1)
        store_packed(codes, t & mask, block, exists, SCHEME.bits)
    else:
        if SCHEME.clamps and SCHEME.bits == 8:
            made = bytes_of(t)
        else:
            made = _masked_bytes(t, scale, (1 << SCHEME.bits) - 1)
        store_elements(codes + at, made.to(tl.uint8, bitcast=True), inside)


@triton.jit
def _store_nibbles(codes, at, inside, block, exists, numbers, scale, PACKED: tl.constexpr):
    """Codes in the low four bits of patterns above 0x4b400000."""
    if PACKED:
        store_words_of(codes, at, nibble_words(numbers, mask_unless_poisoned(scale, -1)), block, exists)
    else:
        made = bytes_of(numbers) & mask_unless_poisoned(scale, 0x0F).to(tl.int8)
        store_elements(codes + at, made.to(tl.uint8, bitcast=True), inside)


@triton.jit
def _masked_bytes(codes, scale, MASK: tl.constexpr):
    """The low bytes of codes, 0 in poisoned blocks."""
    return bytes_of(codes & mask_unless_poisoned(scale, MASK))


@triton.jit
def _store_e2m1(
    codes, at, inside, block, exists, v, inv_scale, scale, SCHEME: tl.constexpr, PACKED: tl.constexpr
):
    if SCHEME.power_of_two:
        signed = v
        numbers = bits_of(e2m1_floats(v, tl.broadcast_to(inv_scale * 0.5, v.shape)))
    else:
        # The scaled element is rounded first; a negative outer scale turns its sign.
        signed = scaled(v, inv_scale, scale, None, SCHEME)
        numbers = bits_of(e2m1_floats(signed, tl.full(v.shape, 0.5, tl.float32)))
    if PACKED:
        words = e2m1_words(numbers, bits_of(signed), mask_unless_poisoned(scale, -1))
        store_words_of(codes, at, words, block, exists)
    else:
        made = (numbers & 7) | ((bits_of(signed) >> 28) & 8)
        store_elements(codes + at, _masked_bytes(made, scale, 0x0F).to(tl.uint8, bitcast=True), inside)


@triton.jit
def _store_six(
    codes, at, inside, block, exists, v, inv_scale, scale, SCHEME: tl.constexpr, PACKED: tl.constexpr
):
    # The power of two is exact: y * 2**-k is below 2**-126 only where y rounds to zero.
    if SCHEME.fast_path == "e2m3":
        if SCHEME.power_of_two:
            y = v * (inv_scale * 0.015625)
        else:
            y = (v * inv_scale) * 0.015625
        made = e2m3_bytes(y)
    else:
        if SCHEME.power_of_two:
            y = v * (inv_scale * 0.000244140625)
        else:
            y = (v * inv_scale) * 0.000244140625
        made = e3m2_bytes(y)
    if PACKED:
        a, b, c = six_words(made, mask_unless_poisoned(scale, -1))
        COUNT: tl.constexpr = v.shape[1] // 16
        word = codes.to(tl.pointer_type(tl.int32), bitcast=True)
        word += block * (3 * COUNT) + 3 * tl.arange(0, COUNT)[None, :]
        tl.store(word, a, mask=exists)
        tl.store(word + 1, b, mask=exists)
        tl.store(word + 2, c, mask=exists)
    else:
        made = (made & mask_unless_poisoned(scale, 0x3F).to(tl.int8)).to(tl.uint8, bitcast=True)
        store_elements(codes + at, made, inside)
