"""Codes and values of default schemes by the instruction sequences of `sm90`.

Only for scales that were computed from the tile: then a block with NaN or infinity has a NaN scale, every other element is
finite, and what must become the poison code is masked a word at a time. Everything else goes through `rules.elements` and
`rules.values`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, LARGEST, MAGNITUDE, NAN, SIGN, bits_of, float_of, is_nan, narrow
from fast.kernels.rules.elements import pairs, store_packed
from fast.kernels.rules.values import power_multiplier
from fast.kernels.sm90.bf16x2 import bfloat16_of, float16_of, rounded_once
from fast.kernels.sm90.bit_tricks import (
    TO_INTEGER,
    bytes_of,
    corrected_quotient,
    e2m1_floats,
    e2m1_values,
    e2m1_words,
    e2m3_bytes,
    e2m3_values,
    e3m2_bytes,
    e3m2_values,
    int4_values,
    int4_words,
    integer_values,
    mask_unless_poisoned,
    nibble_words,
    reciprocal_below,
    reciprocal_error,
    reciprocal_error_cut,
    reciprocal_rn,
    round_to_dtype,
    six_triples,
    six_words,
    store_words,
)
from fast.kernels.sm90.codebooks import (
    codebook_floats,
    codebook_values,
    codebook_word_values,
    stretched_floats,
    stretched_values,
)
from fast.kernels.sm90.integers import integer_quads, load_quads, quad_values, store_quads

# Values of codes by the instruction sequences of `sm90`: those of a tile that is quantized, and those of stored codes.


@triton.jit
def rounded_values(v, inv_scale, scale, zero, SCHEME: tl.constexpr):
    """Decoded elements of a tile before scaling, without the codes; the scale of a poisoned block is NaN."""
    if SCHEME.fast_path == "int":
        n = integers(v, inv_scale, scale, zero, SCHEME) - TO_INTEGER
        if SCHEME.zero == "code":
            n = n - zero.to(tl.float32)
        if SCHEME.fraction_bits != 0:
            n = n * (1.0 / (1 << SCHEME.fraction_bits))
        return n
    elif SCHEME.fast_path == "codebook":
        y = scaled(v, inv_scale, scale, zero, SCHEME)
        return codebook_values(bits_of(codebook_floats(y, SCHEME.element)), SCHEME.element)
    elif SCHEME.fast_path == "stretched":
        return stretched_values(stretched_floats(v * inv_scale, SCHEME.element), SCHEME.element)
    else:
        y = scaled(v, inv_scale, scale, zero, SCHEME)
        if SCHEME.fast_path == "e4m3":
            return y.to(tl.float8e4nv).to(tl.float32)
        else:
            return _rounded_float(y, SCHEME.element)


@triton.jit
def _rounded_float(y, E: tl.constexpr):
    """y rounded to a float format by adding and subtracting 1.5 * 2**(e + 23 - mantissa); saturating, sign kept."""
    top: tl.constexpr = E.max_value
    a = tl.minimum(tl.maximum(y, -top), top)
    least = float_of(tl.full((), (E.emin + 127) << 23, tl.int32))
    unit = float_of(
        ((bits_of(tl.maximum(tl.abs(a), least)) & INFINITY) + ((23 - E.mantissa) << 23)) | 0x00400000
    )
    result = (a + unit) - unit
    return float_of((bits_of(result) & MAGNITUDE) | (bits_of(y) & SIGN))


@triton.jit
def finished(product, scale, DTYPE: tl.constexpr):
    """Products as the output dtype: finite values stay finite where the scale is, NaN canonical."""
    finite = (bits_of(scale) & MAGNITUDE) < INFINITY
    if DTYPE == "bfloat16":
        limit = tl.where(finite, 0x7F7F, 0x7F80).to(tl.int16)
        return bfloat16_of(product, tl.broadcast_to(limit, product.shape))
    elif DTYPE == "float16":
        limit = tl.where(finite, 0x7BFF, 0x7C00).to(tl.int16)
        return float16_of(product, tl.broadcast_to(limit, product.shape))
    else:
        bound = float_of(tl.where(finite, LARGEST, INFINITY))
        return narrow(tl.clamp(product, -bound, bound, propagate_nan=tl.PropagateNan.ALL), "float32", True)


@triton.jit
def load_values(
    codes, at, inside, block, exists, zero, SCHEME: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr
):
    """Decoded elements of a tile before scaling, less the zero point."""
    value = load_elements(codes, at, inside, block, exists, SCHEME, PACKED, SIZE)
    if SCHEME.zero == "code":
        value = value - zero.to(tl.float32)
    return value


@triton.jit
def load_elements(
    codes, at, inside, block, exists, SCHEME: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr
):
    """Decoded elements of a tile before scaling, read as words where they are packed; zero points are left out."""
    if PACKED and SCHEME.bits == 4:
        words = _load_words(codes, block, exists, SIZE // 8)
        if SCHEME.kind == "int":
            value = int4_values(words)
        elif SCHEME.kind == "codebook":
            value = codebook_word_values(words, SCHEME.element)
        else:
            value = e2m1_values(words)
    elif PACKED and SCHEME.kind == "int":
        value = quad_values(load_quads(codes, block, exists, SIZE, SCHEME.bits), SCHEME.bits)
    elif PACKED:
        COUNT: tl.constexpr = SIZE // 16
        word = codes.to(tl.pointer_type(tl.int32), bitcast=True)
        word += block * (3 * COUNT) + 3 * tl.arange(0, COUNT)[None, :]
        a = tl.load(word, mask=exists, other=0)
        b = tl.load(word + 1, mask=exists, other=0)
        c = tl.load(word + 2, mask=exists, other=0)
        if SCHEME.element.mantissa == 3:
            value = e2m3_values(six_triples(a, b, c))
        else:
            value = e3m2_values(six_triples(a, b, c))
    else:
        value = byte_values(tl.load(codes + at, mask=inside, other=0), SCHEME)
    if SCHEME.fraction_bits != 0:
        value = value * (1.0 / (1 << SCHEME.fraction_bits))
    return value


@triton.jit
def byte_values(code, SCHEME: tl.constexpr):
    """Values of codes of a byte each, without the format's power of two."""
    if SCHEME.kind == "int":
        value = integer_values(code.to(tl.int8, bitcast=True), SCHEME.bits)
    elif SCHEME.kind == "codebook":
        value = codebook_values(code.to(tl.int32), SCHEME.element)
    else:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _load_words(codes, block, exists, COUNT: tl.constexpr):
    out = codes.to(tl.pointer_type(tl.int32), bitcast=True) + block * COUNT + tl.arange(0, COUNT)[None, :]
    return tl.load(out, mask=exists, other=0)


# Tiles of two-dimensional blocks side by side: rows of all blocks in memory, one block after the other in registers.


@triton.jit
def of_blocks(strip):
    """(rows, P, columns) as P blocks, (P, rows * columns); no element leaves its thread."""
    return tl.reshape(tl.permute(strip, (1, 0, 2)), (strip.shape[1], strip.shape[0] * strip.shape[2]))


@triton.jit
def store_elements(pointers, made, inside):
    """Elements of a tile (P, S) at pointers of the same shape, or of a strip (rows, P, columns), where all exist."""
    if len(pointers.shape) == 3:
        blocks = tl.reshape(made, (pointers.shape[1], pointers.shape[0], pointers.shape[2]))
        tl.store(pointers, tl.permute(blocks, (1, 0, 2)))
    else:
        tl.store(pointers, made, mask=inside)


@triton.jit
def store_words_of(codes, at, words, block, exists):
    """Words of eight codes of a tile, (P, S / 8), behind a pointer to bytes; at: of the words of a strip, else not used."""
    if len(at.shape) == 3:
        store_elements(codes.to(tl.pointer_type(tl.int32), bitcast=True) + at, words, None)
    else:
        store_words(codes, words, block, exists)


@triton.jit
def store_packed_of(codes, at, made, block, exists, BITS: tl.constexpr):
    """int32 codes of a tile, packed; of a strip, whose codes have four bits, as words."""
    if len(at.shape) == 3:
        store_words_of(codes, at, pairs(pairs(pairs(made, 4), 8), 16), block, exists)
    else:
        store_packed(codes, made, block, exists, BITS)


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
        result = reciprocal_rn(scale)
    else:
        result = tl.div_rn(1.0, scale)
    return result


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
        if SCHEME.kind == "float" and SCHEME.negative_zero:
            inv_scale = reciprocal_below(inv_scale, divisor)
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
            result = bytes_of(t)
        else:
            result = _masked_bytes(t, scale, (1 << SCHEME.bits) - 1)
        store_elements(codes + at, result.to(tl.uint8, bitcast=True), inside)


@triton.jit
def _store_nibbles(codes, at, inside, block, exists, numbers, scale, PACKED: tl.constexpr):
    """Codes in the low four bits of patterns above 0x4b400000."""
    if PACKED:
        store_words_of(codes, at, nibble_words(numbers, mask_unless_poisoned(scale, -1)), block, exists)
    else:
        result = bytes_of(numbers) & mask_unless_poisoned(scale, 0x0F).to(tl.int8)
        store_elements(codes + at, result.to(tl.uint8, bitcast=True), inside)


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
        result = (numbers & 7) | ((bits_of(signed) >> 28) & 8)
        store_elements(codes + at, _masked_bytes(result, scale, 0x0F).to(tl.uint8, bitcast=True), inside)


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
        result = e2m3_bytes(y)
    else:
        if SCHEME.power_of_two:
            y = v * (inv_scale * 0.000244140625)
        else:
            y = (v * inv_scale) * 0.000244140625
        result = e3m2_bytes(y)
    if PACKED:
        a, b, c = six_words(result, mask_unless_poisoned(scale, -1))
        COUNT: tl.constexpr = v.shape[1] // 16
        word = codes.to(tl.pointer_type(tl.int32), bitcast=True)
        word += block * (3 * COUNT) + 3 * tl.arange(0, COUNT)[None, :]
        tl.store(word, a, mask=exists)
        tl.store(word + 1, b, mask=exists)
        tl.store(word + 2, c, mask=exists)
    else:
        result = (result & mask_unless_poisoned(scale, 0x3F).to(tl.int8)).to(tl.uint8, bitcast=True)
        store_elements(codes + at, result, inside)
