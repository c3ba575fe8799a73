"""Moments in 4 bits, eight neighbours of a thread in a word: e2m1 and unsigned integers, rounded stochastically.

Codes and values are those of `reference.formats.encode` under mode "stochastic" with 16 random bits, found by additions toward
zero: what an element lacks to a code, cut to 16 bits, is added to the random ones and carries into the code. Of an instruction
that adds, selects or shifts integers Hopper issues half as many as of a multiplication, so they are few (`reports/LOG.md`).
Only for GPUs; in the interpreter codes go one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import bits_of

#: A float16 with an e2m1 number's exponent as its lowest exponent bits, and its fraction as highest bit, is 2**-14 times it.
SCALE = tl.constexpr(2.0**14)


@triton.jit
def halves_in_middle(words):
    """Words (P, S) as 16 random bits for each of (P, 2 S) in bits 8 to 23 of an int32; the lower half of a word first."""
    low = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x4104;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )
    high = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, 0, 0x4324;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1
    )
    return tl.reshape(tl.join(low, high), (words.shape[0], 2 * words.shape[1]))


@triton.jit
def eight(a, b, c, d, e, f, g, h):
    """(P, 8 S) of neighbours (P, S) each."""
    x = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    return tl.reshape(x, (a.shape[0], 8 * a.shape[1]))


@triton.jit
def e2m1_values(words):
    """float32 (P, 8 S) of nibbles (P, S), from the lowest on."""
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, z;
        .reg .b16 l, u;
        shl.b32 x, $8, 12; shl.b32 y, $8, 9;
        lop3.b32 y, y, 0x0E000E00, 0, 0xC0; lop3.b32 z, x, 0x80008000, y, 0xEA;
        mov.b32 {l, u}, z; cvt.f32.f16 $0, l; cvt.f32.f16 $4, u;
        shl.b32 x, $8, 8; shl.b32 y, $8, 5;
        lop3.b32 y, y, 0x0E000E00, 0, 0xC0; lop3.b32 z, x, 0x80008000, y, 0xEA;
        mov.b32 {l, u}, z; cvt.f32.f16 $1, l; cvt.f32.f16 $5, u;
        shl.b32 x, $8, 4; shl.b32 y, $8, 1;
        lop3.b32 y, y, 0x0E000E00, 0, 0xC0; lop3.b32 z, x, 0x80008000, y, 0xEA;
        mov.b32 {l, u}, z; cvt.f32.f16 $2, l; cvt.f32.f16 $6, u;
        shr.u32 y, $8, 3;
        lop3.b32 y, y, 0x0E000E00, 0, 0xC0; lop3.b32 z, $8, 0x80008000, y, 0xEA;
        mov.b32 {l, u}, z; cvt.f32.f16 $3, l; cvt.f32.f16 $7, u;
        }""",
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [words], dtype=(tl.float32,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    return eight(a, b, c, d, e, f, g, h) * SCALE


@triton.jit
def uint4_values(words):
    """float32 (P, 8 S) of nibbles (P, S), from the lowest on: digits of a float32 that is 2**23 and more, taken off again."""
    a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y;
        shr.u32 y, $8, 16;
        lop3.b32 x, $8, 0x0000000F, 0x4B000000, 0xEA; fma.rn.f32 $0, x, 0f3F800000, 0fCB000000;
        lop3.b32 x, $8, 0x000000F0, 0x4B000000, 0xEA; fma.rn.f32 $1, x, 0f3D800000, 0fC9000000;
        lop3.b32 x, $8, 0x00000F00, 0x4B000000, 0xEA; fma.rn.f32 $2, x, 0f3B800000, 0fC7000000;
        lop3.b32 x, $8, 0x0000F000, 0x4B000000, 0xEA; fma.rn.f32 $3, x, 0f39800000, 0fC5000000;
        lop3.b32 x, y, 0x0000000F, 0x4B000000, 0xEA; fma.rn.f32 $4, x, 0f3F800000, 0fCB000000;
        lop3.b32 x, y, 0x000000F0, 0x4B000000, 0xEA; fma.rn.f32 $5, x, 0f3D800000, 0fC9000000;
        lop3.b32 x, y, 0x00000F00, 0x4B000000, 0xEA; fma.rn.f32 $6, x, 0f3B800000, 0fC7000000;
        lop3.b32 x, y, 0x0000F000, 0x4B000000, 0xEA; fma.rn.f32 $7, x, 0f39800000, 0fC5000000;
        }""",
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r", [words], dtype=(tl.float32,) * 8, is_pure=True, pack=1,
    )  # fmt: skip
    return eight(a, b, c, d, e, f, g, h)


@triton.jit
def add_toward_zero(a, b):
    """float32 a + b, rounded toward zero."""
    return tl.inline_asm_elementwise(
        "add.rz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def neighbours(x):
    """Eight of (P, S) of (P, 8 S), in order."""
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // 8, 2, 2, 2))
    even, odd = tl.split(parts)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    a, e = tl.split(a)
    c, g = tl.split(c)
    b, f = tl.split(b)
    d, h = tl.split(d)
    return a, b, c, d, e, f, g, h


@triton.jit
def e2m1_words(y, middle, poisoned):
    """Words (P, S) of e2m1 codes of y (P, 8 S), at most 6 in magnitude. middle: random bits in bits 8 to 23. poisoned (P, 1):
    codes are 0.

    Below 1 an element lies on a fixed grid, as 1 + y does; above, on that of its exponent. So codes are what both patterns are
    above that of 1, of 1 + min(|y|, 1) and of max(|y|, 1).
    """
    small = tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; add.sat.f32 $0, a, 0f00000000; }", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip
    larger = tl.abs(y) - small + 1.0
    above = bits_of(larger) + bits_of(add_toward_zero(small, 1.0)) - 2 * 0x3F800000
    digits = ((above << 2) + middle) | (bits_of(y) & -0x80000000)
    a, b, c, d, e, f, g, h = neighbours(digits)
    words = tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, u, v;
        prmt.b32 x, $1, $3, 0x0073; prmt.b32 y, $5, $7, 0x7300; prmt.b32 u, x, y, 0x7610;
        prmt.b32 x, $2, $4, 0x0073; prmt.b32 y, $6, $8, 0x7300; prmt.b32 v, x, y, 0x7610;
        shl.b32 y, v, 4; shr.u32 x, u, 4;
        lop3.b32 u, u, 0x07070707, 0, 0xC0; lop3.b32 u, y, 0x70707070, u, 0xEA;
        lop3.b32 u, x, 0x08080808, u, 0xEA; lop3.b32 $0, v, 0x80808080, u, 0xEA;
        }""",
        "=r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return tl.where(poisoned, 0, words)


@triton.jit
def uint4_words(y, middle):
    """Words (P, S) of integers from 1 to 15 of y (P, 8 S), from 0 to 15 and a few units in the last place. middle: random bits
    in bits 8 to 23.

    128 + y has the integer in its fraction from bit 16 on, below it what random bits are added to.
    """
    fixed = add_toward_zero(tl.maximum(y, 1.0), 128.0)
    a, b, c, d, e, f, g, h = neighbours((bits_of(fixed) << 8) + middle)
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 x, y, u, v;
        prmt.b32 x, $1, $3, 0x0073; prmt.b32 y, $5, $7, 0x7300; prmt.b32 u, x, y, 0x7610;
        prmt.b32 x, $2, $4, 0x0073; prmt.b32 y, $6, $8, 0x7300; prmt.b32 v, x, y, 0x7610;
        shl.b32 v, v, 4; or.b32 $0, u, v;
        }""",
        "=r,r,r,r,r,r,r,r,r", [a, b, c, d, e, f, g, h], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


__all__ = ["e2m1_values", "e2m1_words", "halves_in_middle", "uint4_values", "uint4_words"]
