"""Pairs of bfloat16 rounded to float elements under scales that are powers of two, by 16-bit arithmetic alone.

A word has two neighbouring elements. With a scale 2**e, and u the power of two of a scaled magnitude y (at least the format's
smallest normal number), a format of m mantissa bits keeps multiples of u * 2**-m. bfloat16 has 8 significant bits, so the sum
y + u * 2**(7 - m), which lies between that addend and twice it, is rounded to such a multiple, to nearest even; less the addend
it is the rounded element, exactly, and times 2**e its value, rounded once where it is subnormal. That is eight instructions for
two elements, and neither codes nor float32 in between.

What is scaled below 2**-126 is rounded on the way; it is far under half of the smallest element before and after, and becomes 0
with its sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.rowwise_colwise.mxfp8 import EXPONENTS, LOW_BYTES


def _rounding(saturates: str) -> tl.constexpr:
    """The value of a pair $1 under its blocks' multipliers $2, scales $3, limits $4 and signs $5.

    $6: the smallest normal number, $7: 2**(7 - m), $8: -2**(7 - m), $9: the largest number.
    """
    return tl.constexpr(
        f"""{{ .reg .b32 y, u;
        and.b32 y, $1, 0x7FFF7FFF; mul.rn.bf16x2 y, y, $2; {saturates}
        and.b32 u, y, 0x7F807F80; max.u16x2 u, u, $6;
        fma.rn.bf16x2 y, u, $7, y; fma.rn.bf16x2 y, u, $8, y;
        mul.rn.bf16x2 y, y, $3; min.u16x2 y, y, $4;
        lop3.b32 $0, $1, $5, y, 0xEA; }}"""
    )


INSIDE, SATURATING = _rounding(""), _rounding("min.u16x2 y, y, $9;")


@triton.jit
def factors_of(largest, SCHEME: tl.constexpr):
    """(multipliers, scales, limits, signs) of pairs of blocks, from pairs of their largest magnitudes; all pairs.

    Multiplier and scale are 2**-e and 2**e, NaN where the magnitude is not finite (0 times a finite one plus a number is that
    number). A limit is the largest finite number, or the NaN that leaves; signs are the sign bit, or 0 where NaN leaves. With E
    the exponent field of a magnitude after the record's carry, 2**-e has the field 254 + target - E, at most 254, and 2**e what
    is missing to 254, or is 2**-127.
    """
    CARRY: tl.constexpr = (SCHEME.level.carry >> 16) * 0x10001
    TOP: tl.constexpr = ((254 + SCHEME.level.target_exponent) << 7) * 0x10001
    SIGNED: tl.constexpr = TOP - 0x100000000 if TOP >= 0x80000000 else TOP
    return tl.inline_asm_elementwise(
        """{ .reg .b32 m, s, t, z;
        mov.b32 z, 0; mov.b32 t, 0x7F007F00; min.u16x2 m, $4, t; sub.u32 s, t, m;
        mov.b32 t, 0x00400040; max.u16x2 s, s, t;
        fma.rn.bf16x2 $0, $5, z, m; fma.rn.bf16x2 s, $5, z, s; mov.b32 $1, s;
        mov.b32 t, 0x7FC07FC0; min.u16x2 t, s, t; mov.b32 z, 0x7F7F7F7F; max.u16x2 $2, t, z;
        add.u32 s, s, 0x00010001; lop3.b32 $3, s, 0x80008000, 0, 0x0C; }""",
        "=&r,=&r,=&r,=&r,r,r", [SIGNED - ((largest + CARRY) & EXPONENTS), largest],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scale_codes(scales):
    """Codes of pairs of scales in e8m0, each in a half of a word: exponent fields, 255 for NaN."""
    return (scales >> 7) & LOW_BYTES


@triton.jit
def rounded_pairs(words, multipliers, scales, limits, signs, SATURATES: tl.constexpr, SCHEME: tl.constexpr):
    """Values of pairs under the factors of their blocks. SATURATES: scaled elements may lie beyond the largest number."""
    E: tl.constexpr = SCHEME.element
    LEAST: tl.constexpr = ((E.emin + 127) << 7) * 0x10001
    UNIT: tl.constexpr = ((134 - E.mantissa) << 7) * 0x10001
    MINUS: tl.constexpr = UNIT - 0x7FFF8000
    TOP: tl.constexpr = (E.max_bits >> 16) * 0x10001
    text: tl.constexpr = SATURATING if SATURATES else INSIDE
    return tl.inline_asm_elementwise(
        text, "=r,r,r,r,r,r,r,r,r,r", [words, multipliers, scales, limits, signs, LEAST, UNIT, MINUS, TOP],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def scaled_pairs(words, multipliers, signs, SCHEME: tl.constexpr):
    """Pairs times the multipliers of their blocks; in blocks without a scale NaN, or 0 where the element has no NaN."""
    if SCHEME.bits == 8:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [words, multipliers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        # Each half's sign bit in all of its bits.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 y, m; prmt.b32 m, $3, $3, 0xBB99; mul.rn.bf16x2 y, $1, $2; and.b32 $0, y, m; }", "=r,r,r,r",
            [words, multipliers, signs], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip


__all__ = ["factors_of", "rounded_pairs", "scale_codes", "scaled_pairs"]
