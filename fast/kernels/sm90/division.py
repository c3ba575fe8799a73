"""Quotients and reciprocals that are correctly rounded, without the branches of division for rare exponents."""

from __future__ import annotations

import triton
import triton.language as tl


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
