"""Stochastic rounding of MX floats: the rule of `rounding.round_shift`, without decomposing every element.

The rule adds random bits to the significand where it is cut, and cuts: of elements that are normal in the format to the float32
pattern itself, whose exponent takes the carry; below them to a fixed-point value of 24 fraction bits. Each is at most the
other's code where it does not apply, so the larger one is the code. Only for scales that were computed from the tile, as in
`fast_codes`: where a block is not poisoned its elements are finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, bits_of, is_nan
from fast.kernels.rules.packing import store_packed
from fast.kernels.sm90.bit_tricks import bytes_of


@triton.jit
def stochastic_codes(y, random_bits, E: tl.constexpr):
    """int32 codes of scaled elements y by the top 24 bits of random bits (uint32); sign kept, saturating."""
    M: tl.constexpr = E.mantissa
    LEAST: tl.constexpr = 2.0**E.emin
    UNIT: tl.constexpr = 2.0 ** (24 + M - E.emin)
    rest = (bits_of(y) & MAGNITUDE) - ((E.emin + 126) << 23)
    normal = (rest + (random_bits >> (9 + M)).to(tl.int32)) >> (23 - M)
    # Exact: what lies below the 24 bits is dropped, by the rule as by the conversion.
    fixed = (tl.minimum(tl.abs(y), LEAST) * UNIT).to(tl.int32)
    small = (fixed + (random_bits >> 8).to(tl.int32)) >> 24
    code = tl.minimum(tl.maximum(normal, small), E.max_code)
    return code | ((bits_of(y) >> (32 - E.bits)) & E.sign_mask)


@triton.jit
def store_stochastic(
    codes,
    at,
    inside,
    block,
    exists,
    v,
    inv_scale,
    random_bits,
    scale,
    SCHEME: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Codes of a tile under scales (P, 1), packed where the operation asks for it."""
    made = stochastic_codes(v * inv_scale, random_bits, SCHEME.element)
    made = tl.where(is_nan(scale), SCHEME.poison_code, made)
    if PACKED:
        store_packed(codes, made, block, exists, SCHEME.bits)
    else:
        tl.store(codes + at, bytes_of(made).to(tl.uint8, bitcast=True), mask=inside)
