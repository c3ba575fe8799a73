"""Kernels that only divide; importing this needs triton."""

import triton
import triton.language as tl

from fast.kernels.sm90.bit_tricks import divided, quotient, reciprocal_rn


@triton.jit
def unary_kernel(a, y, NAME: tl.constexpr, TARGET: tl.constexpr, INVERSE: tl.constexpr):
    """y = inverse(a) or quotient(a, TARGET)."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    v = tl.load(a + at)
    if NAME == "inverse":
        made = reciprocal_rn(v)
    else:
        made = quotient(v, TARGET, INVERSE)
    tl.store(y + at, made)


@triton.jit
def divided_kernel(a, b, y):
    """y = a / b."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    divisor = tl.load(b + at)
    tl.store(y + at, divided(tl.load(a + at), divisor, reciprocal_rn(divisor)))
