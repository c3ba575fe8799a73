"""The rounding rule of `reference.formats.rounding` on int32 significands, and random bits for its stochastic mode."""

from __future__ import annotations

import triton
import triton.language as tl

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
