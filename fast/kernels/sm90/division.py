"""Quotients and reciprocals that are correctly rounded, without the branches of division for rare exponents."""

import triton
import triton.language as tl


def _short(kind: str, widen: str) -> tl.constexpr:
    return tl.constexpr(f"{{ .reg .b16 p, q; .reg .b32 d; cvt.rn.{kind}x2.f32 d, $1, $1; {widen} }}")


SHORT_BFLOAT16 = _short("bf16", "and.b32 $0, d, 0xFFFF0000;")
SHORT_FLOAT16 = _short("f16", "mov.b32 {p, q}, d; cvt.f32.f16 $0, p;")


@triton.jit
def inverse(v):
    """1 / v, correctly rounded, for v from 2**-126 to 2**125; NaN for NaN: one Newton step on the approximate reciprocal.

    Division without its test for rare exponents. That it is exact for every significand is checked on the GPU
    (`tests/gpu/kernels/numerics/quotients.py`).
    """
    guess = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1
    )
    return tl.fma(tl.fma(negated(v), guess, 1.0), guess, guess)


@triton.jit
def quotient(a, TARGET: tl.constexpr, INVERSE: tl.constexpr):
    """a / TARGET, correctly rounded where it is at least 2**-126, and at most that otherwise; a is not negative.

    INVERSE: 1 / TARGET rounded. One step with the remainder corrects the product. The remainder is exact, for small a as well:
    it is a multiple of 2**-149. Which targets this is exact for is checked on the GPU for every significand, as for `inverse`.
    """
    first = a * INVERSE
    return tl.fma(tl.fma(first, -TARGET, a), INVERSE, first)


@triton.jit
def divided(a, divisor, inverse_divisor):
    """a / divisor, correctly rounded, for quotients and divisors far from the ends of the exponent range."""
    first = a * inverse_divisor
    better = tl.fma(tl.fma(negated(first), divisor, a), inverse_divisor, first)
    return tl.fma(tl.fma(negated(better), divisor, a), inverse_divisor, better)


@triton.jit
def corrected_quotient(v, m, divisor):
    """v / divisor of tiles, m = 1 / divisor of their blocks: v times m and what m lacks. `quotient_sequence` says how exact."""
    return tl.fma(v, m, v * lacking(m, divisor))


@triton.jit
def refined(y, v, m, divisor):
    """v / divisor, correctly rounded, where y is less than one unit in the last place away and m = 1 / divisor rounded."""
    return tl.fma(tl.fma(negated(y), divisor, v), m, y)


@triton.jit
def lacking(m, divisor):
    """1 / divisor less m, which is 1 / divisor rounded."""
    return tl.fma(negated(divisor), m, 1.0) * m


@triton.jit
def short(v, DTYPE: tl.constexpr):
    """float32 rounded to a dtype, one number for each block; NaN stays some NaN."""
    if DTYPE == "bfloat16":
        return tl.inline_asm_elementwise(SHORT_BFLOAT16, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    elif DTYPE == "float16":
        return tl.inline_asm_elementwise(SHORT_FLOAT16, "=f,f", [v], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return v


@triton.jit
def negated(v):
    """-v, as an operand's sign: Triton's own is the subtraction 0 - v, an instruction."""
    return v * -1.0
