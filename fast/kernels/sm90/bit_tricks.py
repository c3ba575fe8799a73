"""Instruction sequences of the fast paths: several codes made, or read, as one 32-bit word.

On Hopper float32 additions and multiplications run at twice the rate of integer, compare and select operations, and a kernel at
the memory limit has about 7 issue slots for each byte it moves. So rounding is done by the adder (a constant whose last bit is
the unit) and by the conversion instructions, and codes are combined into words before anything is selected or masked.

All of these expect finite elements or blocks whose `keep` mask is zero: NaN and infinity are dealt with per block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import bits_of, float_of, is_nan

# Quotients and reciprocals that are correctly rounded, without the branches of division for rare exponents.


def _round_asm(kind: str, widen: str) -> tl.constexpr:
    return tl.constexpr(f"{{ .reg .b16 p, q; .reg .b32 d; cvt.rn.{kind}x2.f32 d, $1, $1; {widen} }}")


ROUND_BFLOAT16 = _round_asm("bf16", "and.b32 $0, d, 0xFFFF0000;")
ROUND_FLOAT16 = _round_asm("f16", "mov.b32 {p, q}, d; cvt.f32.f16 $0, p;")


@triton.jit
def reciprocal_rn(v):
    """1 / v, correctly rounded, for v from 2**-126 to 2**125; NaN for NaN: one Newton step on the approximate reciprocal.

    Division without its test for rare exponents. That it is exact for every significand is checked on the GPU
    (`tests/gpu/kernels/schemes.py`).
    """
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(tl.fma(negative_by_product(v), guess, 1.0), guess, guess)


@triton.jit
def quotient(a, TARGET: tl.constexpr, INVERSE: tl.constexpr):
    """a / TARGET, correctly rounded where it is at least 2**-126, and at most that otherwise; a is not negative.

    INVERSE: 1 / TARGET rounded. One step with the remainder corrects the product. The remainder is exact, for small a as well:
    it is a multiple of 2**-149. Which targets this is exact for is checked on the GPU for every significand, as for
    `reciprocal_rn`.
    """
    first = a * INVERSE
    return tl.fma(tl.fma(first, -TARGET, a), INVERSE, first)


@triton.jit
def divided(a, divisor, inverse_divisor):
    """a / divisor, correctly rounded, for quotients and divisors far from the ends of the exponent range."""
    first = a * inverse_divisor
    better = tl.fma(tl.fma(negative_by_product(first), divisor, a), inverse_divisor, first)
    return tl.fma(tl.fma(negative_by_product(better), divisor, a), inverse_divisor, better)


@triton.jit
def corrected_quotient(v, inverse_divisor, error):
    """v / divisor of tiles: v times m = 1 / divisor of their blocks and what m lacks. `quotient_sequence` says how exact."""
    return tl.fma(v, inverse_divisor, v * error)


@triton.jit
def reciprocal_error(inverse_divisor, divisor):
    """1 / divisor less m, which is 1 / divisor rounded."""
    return tl.fma(negative_by_product(divisor), inverse_divisor, 1.0) * inverse_divisor


@triton.jit
def reciprocal_below(inverse_divisor, divisor):
    """Of m, 1 / divisor rounded, the largest float32 that is not above 1 / divisor: what it lacks has no sign, so that -0 times
    it is -0, and the corrected quotient of -0 as well. The correction's own error is below 2**-45 of the quotient then."""
    above = tl.fma(negative_by_product(divisor), inverse_divisor, 1.0) < 0.0
    return float_of(bits_of(inverse_divisor) - above.to(tl.int32))


@triton.jit
def reciprocal_error_cut(inverse_divisor, divisor):
    """The same with the product rounded towards zero, so that the quotients lie on the side of e2m1's ties that they should."""
    rest = tl.fma(negative_by_product(divisor), inverse_divisor, 1.0)
    return tl.inline_asm_elementwise(
        "mul.rz.f32 $0, $1, $2;", "=f,f,f", [rest, inverse_divisor], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def round_to_dtype(v, DTYPE: tl.constexpr):
    """float32 rounded to a dtype, one value for each block; NaN stays some NaN."""
    if DTYPE == "bfloat16":
        return tl.inline_asm_elementwise(ROUND_BFLOAT16, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    elif DTYPE == "float16":
        return tl.inline_asm_elementwise(ROUND_FLOAT16, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return v


@triton.jit
def negative_by_product(v):
    """-v, as an operand's sign: Triton's own is the subtraction 0 - v, an instruction."""
    return v * -1.0


# 1.5 * 2**23, its pattern, and 2**23: float32 values of this size are integers.
TO_INTEGER = tl.constexpr(12582912.0)


@triton.jit
def bytes_of(codes):
    """The low bytes of int32 codes as int8. Four registers of a thread, whichever elements they hold, make a word."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        prmt.b32 a, $1, $2, 0x0040;
        prmt.b32 b, $3, $4, 0x0040;
        prmt.b32 $0, a, b, 0x5410;
        }""",
        "=r,r,r,r,r", [codes], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip


@triton.jit
def combined_digits(codes, BITS: tl.constexpr, COUNT: tl.constexpr):
    """The sum of COUNT neighbouring codes times 2**(BITS * i), int32: (P, S) -> (P, S / COUNT).

    A reduction keeps neighbours in their thread, and no layout is moved across it.
    """
    ROWS: tl.constexpr = codes.shape[0]
    GROUPS: tl.constexpr = codes.shape[1] // COUNT
    weight = tl.full((), 1, tl.int32) << (BITS * (tl.arange(0, codes.shape[1]) % COUNT))
    return tl.sum(tl.reshape(codes * weight[None, :], (ROWS, GROUPS, COUNT)), axis=2)


@triton.jit
def quarters(tile):
    """(P, S) as four tensors (P, S / 4): element i of each four neighbours."""
    QUARTER: tl.constexpr = tile.shape[1] // 4
    even, odd = tl.split(tl.reshape(tile, (tile.shape[0], QUARTER * 2, 2)))
    a0, a2 = tl.split(tl.reshape(even, (tile.shape[0], QUARTER, 2)))
    a1, a3 = tl.split(tl.reshape(odd, (tile.shape[0], QUARTER, 2)))
    return a0, a1, a2, a3


@triton.jit
def joined(a0, a1, a2, a3, a4, a5, a6, a7):
    """Eight tensors (P, S) as one (P, 8 S), their elements in turn."""
    even = joined2(joined2(a0, a4), joined2(a2, a6))
    odd = joined2(joined2(a1, a5), joined2(a3, a7))
    return joined2(even, odd)


@triton.jit
def joined2(a, b):
    """(P, S) twice as (P, 2 S): the even elements and the odd ones."""
    return tl.reshape(tl.join(a, b), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def joined4(a0, a1, a2, a3):
    """The inverse of `quarters`."""
    return joined2(joined2(a0, a2), joined2(a1, a3))


@triton.jit
def int4_words(numbers, keep):
    """Patterns of n + 1.5 * 2**23 with n from -8 to 7 (int32, (P, S)) as words of eight nibbles (P, S / 8).

    The sum of n * 16**i with n + 8 for n, the constant's pattern taken out, is eight offset nibbles.
    """
    offset = combined_digits(numbers, 4, 8) + 0x49488888
    return (offset ^ -0x77777778) & keep


@triton.jit
def nibble_words(numbers, keep):
    """Patterns of n + 1.5 * 2**23 with n from 0 to 15 (int32, (P, S)) as words of eight nibbles (P, S / 8)."""
    return (combined_digits(numbers, 4, 8) - 0x3F400000) & keep


@triton.jit
def e2m1_floats(x, half):
    """2**23 + code of |x| * 2 half in float4_e2m1fn, nearest even, saturating; float32. The product with half is exact.

    The code is round(2 m) below 2, plus round(m - 2) from 2 to 4, plus round(m / 2 - 2) beyond: each term saturates to
    [0, 1] in its own instruction, and each sum rounds to an integer whose parity is that of the code. (m is 2 |x| half.)
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 a, g, h, k;
        abs.f32 a, $1;
        mul.rn.sat.f32 g, a, $2;
        fma.rn.sat.f32 h, a, $2, 0fBF800000;
        fma.rn.sat.f32 k, a, $2, 0fC0000000;
        fma.rn.f32 g, g, 0f40800000, 0f4B000000;
        fma.rn.f32 g, h, 0f40000000, g;
        add.rn.f32 $0, k, g;
        }""",
        "=f,f,f", [x, half], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e2m1_words(numbers, v, keep):
    """Patterns that `e2m1_floats` made, with the signs of v (int32), as words of eight nibbles (P, S / 8)."""
    ROWS: tl.constexpr = v.shape[0]
    GROUPS: tl.constexpr = v.shape[1] // 8
    place = 4 * (tl.arange(0, v.shape[1]) % 8)[None, :]
    signs = (v >> (28 - place)) & (tl.full((), 8, tl.int32) << place)
    sign = tl.reduce(tl.reshape(signs, (ROWS, GROUPS, 8)), 2, _either)
    return (combined_digits(numbers, 4, 8) + 0x05000000 + sign) & keep


@triton.jit
def _either(a, b):
    return a | b


def _six_bytes(convert: str) -> tl.constexpr:
    """Four 6-bit codes in bytes, by a conversion to 8 bits with the same exponents; bit 5 of its codes belongs one place lower.

    Saturates what rounds to one binade beyond the largest number; a scaled block holds nothing larger.
    """
    return tl.constexpr(
        f"""{{
        .reg .b16 l, h; .reg .b32 w, s, o;
        {convert} l, $2, $1; {convert} h, $4, $3;
        mov.b32 w, {{l, h}};
        and.b32 o, w, 0x20202020; shr.u32 s, o, 5; sub.u32 o, o, s; or.b32 o, o, w;
        shr.u32 s, w, 2; and.b32 s, s, 0x20202020;
        lop3.b32 $0, o, 0x1F1F1F1F, s, 0xEA;
        }}"""
    )


E2M3_BYTES, E3M2_BYTES = (_six_bytes(f"cvt.rn.satfinite.{kind}x2.f32") for kind in ("e4m3", "e5m2"))


@triton.jit
def e2m3_bytes(y):
    """Codes of float6_e2m3fn of y * 2**-6 as int8, nearest even: there e4m3 has the same exponents; see `_six_bytes`."""
    return tl.inline_asm_elementwise(E2M3_BYTES, "=r,f,f,f,f", [y], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def e3m2_bytes(y):
    """Codes of float6_e3m2fn of y * 2**-12 as int8, nearest even: there e5m2 has the same exponents; see `_six_bytes`."""
    return tl.inline_asm_elementwise(E3M2_BYTES, "=r,f,f,f,f", [y], dtype=tl.int8, is_pure=True, pack=4)


@triton.jit
def six_words(codes, keep):
    """6-bit codes (int8, (P, S)), and-ed with keep (P, 1), as three tensors of words (P, S / 16)."""
    p, q, r, s = quarters(combined_digits(codes.to(tl.int32), 6, 4) & keep)
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $3, $4, 0x4210; prmt.b32 $1, $4, $5, 0x5421; prmt.b32 $2, $5, $6, 0x6542;",
        "=&r,=&r,=&r,r,r,r,r", [p, q, r, s], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


def _offset_bytes(bits: int) -> tl.constexpr:
    """float32 of four two's complement integers of `bits` bits in the bytes of a word."""
    bias = 1 << (bits - 1)
    text = f"lop3.b32 w, $4, 0x{(2 * bias - 1) * 0x01010101:08X}, 0x{bias * 0x01010101:08X}, 0x6A; "
    for i in range(4):
        text += f"prmt.b32 t, w, 0x4B000000, 0x744{i}; mov.b32 f, t; add.rn.f32 ${i}, f, 0fCB{bias:06X}; "
    return tl.constexpr(f"{{ .reg .b32 w, t; .reg .f32 f; {text} }}")


BYTES2, BYTES3, BYTES4, BYTES5 = (_offset_bytes(bits) for bits in (2, 3, 4, 5))
BYTES6, BYTES7, BYTES8 = (_offset_bytes(bits) for bits in (6, 7, 8))


@triton.jit
def integer_values(codes, BITS: tl.constexpr):
    """float32 of two's complement codes (int8), whatever lies above their BITS bits."""
    text: tl.constexpr = (
        BYTES2 if BITS == 2 else BYTES3 if BITS == 3 else BYTES4 if BITS == 4 else BYTES5
        if BITS == 5 else BYTES6 if BITS == 6 else BYTES7 if BITS == 7 else BYTES8
    )  # fmt: skip
    return tl.inline_asm_elementwise(
        text, "=&f,=&f,=&f,=&f,r", [codes], dtype=tl.float32, is_pure=True, pack=4
    )


@triton.jit
def int4_values(words):
    """float32 (P, 8 S) of words of eight two's complement nibbles (P, S)."""
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        """{
        .reg .b32 w, v, t; .reg .f32 x;
        xor.b32 w, $8, 0x88888888; shr.u32 v, w, 20;
        lop3.b32 t, w, 0xF, 0x4B000000, 0xEA; mov.b32 x, t; add.rn.f32 $0, x, 0fCB000008;
        lop3.b32 t, w, 0xF0, 0x4B000000, 0xEA; mov.b32 x, t; fma.rn.f32 $1, x, 0f3D800000, 0fC9000080;
        lop3.b32 t, w, 0xF00, 0x4B000000, 0xEA; mov.b32 x, t; fma.rn.f32 $2, x, 0f3B800000, 0fC7000800;
        lop3.b32 t, w, 0xF000, 0x4B000000, 0xEA; mov.b32 x, t; fma.rn.f32 $3, x, 0f39800000, 0fC5008000;
        lop3.b32 t, w, 0xF0000, 0x4B000000, 0xEA; mov.b32 x, t; fma.rn.f32 $4, x, 0f37800000, 0fC3080000;
        lop3.b32 t, v, 0xF, 0x4B000000, 0xEA; mov.b32 x, t; add.rn.f32 $5, x, 0fCB000008;
        lop3.b32 t, v, 0xF0, 0x4B000000, 0xEA; mov.b32 x, t; fma.rn.f32 $6, x, 0f3D800000, 0fC9000080;
        lop3.b32 t, v, 0xF00, 0x4B000000, 0xEA; mov.b32 x, t; fma.rn.f32 $7, x, 0f3B800000, 0fC7000800;
        }""",
        "=f,=f,=f,=f,=f,=f,=f,=f,r", [words],
        dtype=(tl.float32,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    return joined(a, b, c, d, e, f, g, h)


def _float_values(exponent: int, mantissa: int, bias: int, count: int) -> tl.constexpr:
    """float32 of `count` float codes in a word: fields moved, biases multiplied away."""
    mask = 1 << 31 | ((1 << (exponent + mantissa)) - 1) << (23 - mantissa)
    text = ""
    for i in range(count):
        left = 32 - (1 + exponent + mantissa) * (i + 1)
        text += f"shl.b32 t, ${count}, {left}; shr.s32 t, t, " if left else f"shr.s32 t, ${count}, "
        text += f"{8 - exponent}; and.b32 t, t, 0x{mask:08X}; mov.b32 x, t; "
        text += f"mul.rn.f32 ${i}, x, 0f{(254 - bias) << 23:08X}; "
    return tl.constexpr(f"{{ .reg .b32 t; .reg .f32 x; {text} }}")


E2M1_VALUES = _float_values(2, 1, 1, 8)
E2M3_VALUES, E3M2_VALUES = _float_values(2, 3, 1, 4), _float_values(3, 2, 3, 4)


@triton.jit
def e2m1_values(words):
    """float32 (P, 8 S) of words of eight float4_e2m1fn codes (P, S)."""
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        E2M1_VALUES, "=f,=f,=f,=f,=f,=f,=f,=f,r", [words], dtype=(tl.float32,) * 8, is_pure=True, pack=1
    )
    return joined(a, b, c, d, e, f, g, h)


@triton.jit
def six_triples(a, b, c):
    """Three words (P, S) as words of four 6-bit codes (P, 4 S)."""
    p, q, r, s = tl.inline_asm_elementwise(
        """and.b32 $0, $4, 0xFFFFFF; prmt.b32 $1, $4, $5, 0x8543; and.b32 $1, $1, 0xFFFFFF;
        prmt.b32 $2, $5, $6, 0x8432; and.b32 $2, $2, 0xFFFFFF; shr.u32 $3, $6, 8;""",
        "=&r,=&r,=&r,=&r,r,r,r", [a, b, c], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return joined4(p, q, r, s)


@triton.jit
def e2m3_values(triples):
    """float32 (P, 4 S) of words of four float6_e2m3fn codes (P, S)."""
    a, b, c, d = tl.inline_asm_elementwise(
        E2M3_VALUES, "=f,=f,=f,=f,r", [triples], dtype=(tl.float32,) * 4, is_pure=True, pack=1
    )
    return joined4(a, b, c, d)


@triton.jit
def e3m2_values(triples):
    """float32 (P, 4 S) of words of four float6_e3m2fn codes (P, S)."""
    a, b, c, d = tl.inline_asm_elementwise(
        E3M2_VALUES, "=f,=f,=f,=f,r", [triples], dtype=(tl.float32,) * 4, is_pure=True, pack=1
    )
    return joined4(a, b, c, d)


@triton.jit
def mask_unless_poisoned(scale, MASK: tl.constexpr):
    """MASK where the block has a scale, 0 where it is poisoned: (blocks, 1) int32."""
    return tl.where(is_nan(scale), 0, MASK)


@triton.jit
def store_words(codes, words, block, exists):
    """Words of a tile behind a pointer to bytes."""
    COUNT: tl.constexpr = words.shape[1]
    out = codes.to(tl.pointer_type(tl.int32), bitcast=True) + block * COUNT + tl.arange(0, COUNT)[None, :]
    tl.store(out, words, mask=exists)
