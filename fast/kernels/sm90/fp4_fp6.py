"""float4_e2m1fn codes of bfloat16 blocks, packed or not, from pairs: a 32-bit word of two elements is not taken apart early.

At the memory limit a packed 4-bit quantizer has about 18 issue slots an element, and integer, compare and select instructions
count twice. So maxima are taken of two elements at once, the magnitudes that they need are masked once, and the signs of eight
elements are put into place together. Blocks whose scale costs many instructions lie in one thread each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.sm90.bit_tricks import (
    joined2,
    mask_unless_poisoned,
    quarters,
    reciprocal_error_cut,
    store_words,
)

MAGNITUDES = tl.constexpr(0x7FFF7FFF)

# Elements 2 * i and 2 * i + 1 of eight: the halves of word $`at` as floats.
_HALVES = "shl.b32 t, ${at}, 16; mov.b32 x, t; {low} and.b32 t, ${at}, 0xFFFF0000; mov.b32 x, t; {high} "
# |x| to 2**23 + code: see `bit_tricks.e2m1_floats`.
_NUMBER = """{scaled} mul.rn.sat.f32 g, x, {half}; fma.rn.sat.f32 h, x, {half}, 0fBF800000;
fma.rn.sat.f32 k, x, {half}, 0fC0000000; fma.rn.f32 g, g, 0f40800000, 0f4B000000; fma.rn.f32 g, h, 0f40000000, g;
add.rn.f32 g, k, g; mov.b32 n{number}, g; """
# Digits 16**i; the patterns of 2**23 add up to 0xFB000000.
_DIGITS = """shl.b32 t, n1, 4; add.u32 n0, n0, t; shl.b32 t, n3, 4; add.u32 n2, n2, t; shl.b32 t, n5, 4; add.u32 n4, n4, t;
shl.b32 t, n7, 4; add.u32 n6, n6, t; shl.b32 t, n2, 8; add.u32 n0, n0, t; shl.b32 t, n6, 8; add.u32 n4, n4, t;
shl.b32 t, n4, 16; add.u32 n0, n0, t; add.u32 n0, n0, 0x05000000; """
# Signs of elements 0 and 2, 1 and 3 in neighbouring bytes, then the even and the odd ones of all eight in order.
_SIGNS = """shr.u32 t, $6, 8; lop3.b32 n1, $5, t, 0x80008000, 0xE4; shr.u32 t, $8, 8; lop3.b32 n2, $7, t, 0x80008000, 0xE4;
prmt.b32 n3, n1, n2, 0x4501; prmt.b32 n4, n1, n2, 0x6723; shr.u32 n3, n3, 4; lop3.b32 n3, n3, n4, 0x0F0F0F0F, 0xE4;
lop3.b32 n3, n3, $11, 0x88888888, 0x28; lop3.b32 $0, n3, n0, $10, 0xA8; """


def _words(scaled: str, half: str) -> tl.constexpr:
    """Eight codes from magnitudes $1 to $4 and elements $5 to $8, with the factor $9, the mask $10 and the flip of signs $11.

    $12: what the factor lacks of a reciprocal.
    """
    text = ""
    for pair in range(4):
        low, high = (_NUMBER.format(scaled=scaled, half=half, number=2 * pair + i) for i in range(2))
        text += _HALVES.format(at=pair + 1, low=low, high=high)
    registers = ".reg .b32 t, n0, n1, n2, n3, n4, n5, n6, n7; .reg .f32 x, g, h, k;"
    return tl.constexpr(f"{{ {registers} {text}{_DIGITS}{_SIGNS} }}")


# Codes of elements 0 to 3 to the bytes of n0, and their signs.
_BYTES = """prmt.b32 n0, n0, n1, 0x0040; prmt.b32 n2, n2, n3, 0x0040; prmt.b32 n0, n0, n2, 0x5410; prmt.b32 t, $3, $4, 0x7531;
shr.u32 t, t, 4; lop3.b32 t, t, $7, 0x08080808, 0x28; lop3.b32 $0, t, n0, $6, 0xA8; """


def _bytes(scaled: str, half: str) -> tl.constexpr:
    """Four codes, a byte each, from magnitudes $1 and $2 and elements $3 and $4, with $5 to $8 for `_words`' $9 to $12."""
    text = ""
    for pair in range(2):
        low, high = (_NUMBER.format(scaled=scaled, half=half, number=2 * pair + i) for i in range(2))
        text += _HALVES.format(at=pair + 1, low=low, high=high)
    return tl.constexpr(f"{{ .reg .b32 t, n0, n1, n2, n3; .reg .f32 x, g, h, k; {text}{_BYTES} }}")


# The product with a power of two is exact, and the factor is half of it; any other product is rounded first.
EXACT, ROUNDED = _words("", "$9"), _words("mul.rn.f32 x, x, $9;", "0f3F000000")
# See `division.corrected_quotient`.
CORRECTED = _words("mul.rn.f32 g, x, $12; fma.rn.f32 x, x, $9, g;", "0f3F000000")
CORRECTED_BYTES = _bytes("mul.rn.f32 g, x, $8; fma.rn.f32 x, x, $5, g;", "0f3F000000")
EXACT_BYTES, ROUNDED_BYTES = _bytes("", "$5"), _bytes("mul.rn.f32 x, x, $5;", "0f3F000000")


@triton.jit
def larger_pair(a, b):
    """The larger of both pairs of unsigned 16-bit integers; as patterns of magnitudes NaN is the largest."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def load_pairs(x, block, SIZE: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr):
    """Pairs of bfloat16 (int32) of part HALF of HALVES of each block: (P, SIZE / 2 / HALVES)."""
    COUNT: tl.constexpr = SIZE // 2 // HALVES
    at = block * (SIZE // 2) + (HALF * COUNT + tl.arange(0, COUNT)[None, :])
    return tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + at)


@triton.jit
def largest_of_pairs(pairs):
    """The larger magnitudes of each four neighbouring pairs (P, S), as pairs (P, S / 4)."""
    a, b, c, d = quarters(pairs & MAGNITUDES)
    return larger_pair(larger_pair(a, b), larger_pair(c, d))


@triton.jit
def largest_of_block(pairs):
    """float32 pattern of the largest magnitude of each row of pairs, (P, 1)."""
    both = tl.reduce(pairs, 1, larger_pair, keep_dims=True)
    return tl.maximum(both & 0xFFFF, (both >> 16) & 0xFFFF) << 16


@triton.jit
def _without_negative_zeros(pairs):
    """Pairs of bfloat16 with +0 for -0: a sum with +0."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 z; mov.b32 z, 0; add.rn.bf16x2 $0, $1, z; }", "=r,r", [pairs], dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def words_of_pairs(a, b, inv_scale, divisor, keep, SCHEME: tl.constexpr, PACKED: tl.constexpr):
    """Words of pairs (P, 4) each: |x * m| (or |x / divisor|) rounded, the sign of the product; keep: a block's mask.

    PACKED: two words of eight codes, (P, 2); else four of four, a byte each, (P, 4).
    """
    if SCHEME.on_ordinary and not SCHEME.negative_zero:
        a, b = _without_negative_zeros(a), _without_negative_zeros(b)
    if PACKED:
        return side_by_side(
            _word(a, inv_scale, divisor, keep, SCHEME), _word(b, inv_scale, divisor, keep, SCHEME)
        )
    else:
        return side_by_side(
            _two_words(a, inv_scale, divisor, keep, SCHEME), _two_words(b, inv_scale, divisor, keep, SCHEME)
        )


@triton.jit
def words_of_strip(pairs, inv_scale, divisor, keep, SCHEME: tl.constexpr, PACKED: tl.constexpr):
    """`words_of_pairs` of whole blocks of (P, S) pairs, S a multiple of 4: (P, S / 4) or (P, S / 2) words."""
    if SCHEME.on_ordinary and not SCHEME.negative_zero:
        pairs = _without_negative_zeros(pairs)
    if PACKED:
        return _word(pairs, inv_scale, divisor, keep, SCHEME)
    else:
        p, q, r, s = quarters(pairs)
        a, b, c, d = quarters(pairs & MAGNITUDES)
        return joined2(
            _bytes_of(a, b, p, q, inv_scale, divisor, keep, SCHEME),
            _bytes_of(c, d, r, s, inv_scale, divisor, keep, SCHEME),
        )


@triton.jit
def _two_words(pairs, inv_scale, divisor, keep, SCHEME: tl.constexpr):
    p, q, r, s = quarters(pairs)
    a, b, c, d = quarters(pairs & MAGNITUDES)
    return side_by_side(
        _bytes_of(a, b, p, q, inv_scale, divisor, keep, SCHEME),
        _bytes_of(c, d, r, s, inv_scale, divisor, keep, SCHEME),
    )


@triton.jit
def _bytes_of(a, b, p, q, inv_scale, divisor, keep, SCHEME: tl.constexpr):
    flip = inv_scale.to(tl.int32, bitcast=True) >> 31
    if SCHEME.corrected:
        return tl.inline_asm_elementwise(
            CORRECTED_BYTES, "=r,r,r,r,r,f,r,r,f",
            [a, b, p, q, inv_scale, keep, flip, reciprocal_error_cut(inv_scale, divisor)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        factor = tl.abs(inv_scale * 0.5 if SCHEME.power_of_two else inv_scale)
        return tl.inline_asm_elementwise(
            EXACT_BYTES if SCHEME.power_of_two else ROUNDED_BYTES, "=r,r,r,r,r,f,r,r", [a, b, p, q, factor, keep, flip],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def side_by_side(a, b):
    """(P, S) twice as (P, 2 S), a first."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _word(pairs, inv_scale, divisor, keep, SCHEME: tl.constexpr):
    p, q, r, s = quarters(pairs)
    a, b, c, d = quarters(pairs & MAGNITUDES)
    flip = inv_scale.to(tl.int32, bitcast=True) >> 31
    if SCHEME.corrected:
        return tl.inline_asm_elementwise(
            CORRECTED, "=r,r,r,r,r,r,r,r,r,f,r,r,f",
            [a, b, c, d, p, q, r, s, inv_scale, keep, flip, reciprocal_error_cut(inv_scale, divisor)],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        factor = tl.abs(inv_scale * 0.5 if SCHEME.power_of_two else inv_scale)
        return tl.inline_asm_elementwise(
            EXACT if SCHEME.power_of_two else ROUNDED, "=r,r,r,r,r,r,r,r,r,f,r,r", [a, b, c, d, p, q, r, s, factor, keep, flip],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


def _codes() -> tl.constexpr:
    """NaN saturates to 0 in every term of the sum. The sign is that of a minimum, whose bound replaces NaN."""
    text = ".reg .b32 p, q, w, c0, c1, c2, c3, t0, t1, t2, t3; .reg .f32 a, g, h, k; "
    for i in range(4):
        text += f"""abs.f32 a, ${i + 1};
        mul.rn.sat.f32 g, a, 0f3F000000;
        fma.rn.sat.f32 h, a, 0f3F000000, 0fBF800000;
        fma.rn.sat.f32 k, a, 0f3F000000, 0fC0000000;
        fma.rn.f32 g, g, 0f40800000, 0f4B000000;
        fma.rn.f32 g, h, 0f40000000, g;
        add.rn.f32 g, k, g; mov.b32 c{i}, g;
        min.f32 a, ${i + 1}, 0f7F7FFFFF; mov.b32 t{i}, a;
        """
    text += """prmt.b32 p, t0, t1, 0x0073; prmt.b32 q, t2, t3, 0x0073; prmt.b32 w, p, q, 0x5410; shr.u32 w, w, 4;
        prmt.b32 p, c0, c1, 0x0040; prmt.b32 q, c2, c3, 0x0040; prmt.b32 p, p, q, 0x5410;
        lop3.b32 $0, w, 0x08080808, p, 0xEA;"""
    return tl.constexpr(f"{{ {text} }}")


CODES = _codes()


@triton.jit
def e2m1_codes(v):
    """int8 codes of float32 values, nearest even, saturating; 0 for NaN."""
    return tl.inline_asm_elementwise(CODES, "=r,f,f,f,f", [v], dtype=tl.int8, is_pure=True, pack=4)


# Packed 6-bit floats of bfloat16 blocks, made from pairs, as `fp4` makes 4-bit ones: a block of 32 lies in one thread.


def _triple(convert: str) -> tl.constexpr:
    """Four elements, the pairs $1 and $2, times $3, as 24 bits and more above them.

    The conversion makes 8-bit codes of the same exponents, whose bit 5 belongs one place lower (see `bit_tricks.e2m3_bytes`).
    Then 6 bits of each byte move together, what lies between them is dropped.
    """
    halves = ""
    for pair, (low, high) in ((1, "ab"), (2, "cd")):
        halves += f"shl.b32 t, ${pair}, 16; mov.b32 {low}, t; mul.rn.f32 {low}, {low}, $3; "
        halves += f"and.b32 t, ${pair}, 0xFFFF0000; mov.b32 {high}, t; mul.rn.f32 {high}, {high}, $3; "
    return tl.constexpr(
        f"""{{ .reg .b16 l, h; .reg .b32 t, w, o; .reg .f32 a, b, c, d; {halves}
        {convert} l, b, a; {convert} h, d, c; mov.b32 w, {{l, h}};
        and.b32 o, w, 0x20202020; shr.u32 t, o, 5; sub.u32 o, o, t; or.b32 o, o, w;
        shr.u32 t, w, 2; lop3.b32 o, o, t, 0x1F1F1F1F, 0xE4;
        shr.u32 t, o, 2; lop3.b32 o, o, t, 0x003F003F, 0xE4; shr.u32 t, o, 4; lop3.b32 $0, o, t, 0x00000FFF, 0xE4; }}"""
    )


E2M3, E3M2 = _triple("cvt.rn.satfinite.e4m3x2.f32"), _triple("cvt.rn.satfinite.e5m2x2.f32")


@triton.jit
def _six_words(first, second, inv_scale, keep, SCHEME: tl.constexpr):
    """Three words (P, 1) of sixteen codes, of pairs (P, 4) twice; `six_words` for triples with more above them."""
    a, b = _triples(first, inv_scale, SCHEME)
    c, d = _triples(second, inv_scale, SCHEME)
    return tl.inline_asm_elementwise(
        """{ .reg .b32 x, y, z;
        prmt.b32 x, $3, $4, 0x4210; prmt.b32 y, $4, $5, 0x5421; prmt.b32 z, $5, $6, 0x6542;
        and.b32 $0, x, $7; and.b32 $1, y, $7; and.b32 $2, z, $7; }""",
        "=&r,=&r,=&r,r,r,r,r,r", [a, b, c, d, keep], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _triples(pairs, inv_scale, SCHEME: tl.constexpr):
    p, q, r, s = quarters(pairs)
    return _triple_of(p, q, inv_scale, SCHEME), _triple_of(r, s, inv_scale, SCHEME)


@triton.jit
def _triple_of(p, q, inv_scale, SCHEME: tl.constexpr):
    return tl.inline_asm_elementwise(
        E2M3 if SCHEME.fast_path == "e2m3" else E3M2,
        "=r,r,r,f",
        [p, q, inv_scale],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_sixes(codes, a, b, c, d, inv_scale, scale, place, exists, SCHEME: tl.constexpr):
    """Six words of 32 codes, of pairs (P, 4) four times; m is a power of two, scale NaN where the block is poisoned."""
    # The formats of the conversions have the same exponents 2**-6 and 2**-12 times the element.
    factor = inv_scale * (0.015625 if SCHEME.fast_path == "e2m3" else 0.000244140625)
    keep = mask_unless_poisoned(scale, -1)
    u, v, w = _six_words(a, b, factor, keep, SCHEME)
    x, y, z = _six_words(c, d, factor, keep, SCHEME)
    # Two words a store: 24 bytes are aligned to 8.
    store_words(codes, side_by_side(u, v), 3 * place, exists)
    store_words(codes, side_by_side(w, x), 3 * place + 1, exists)
    store_words(codes, side_by_side(y, z), 3 * place + 2, exists)
