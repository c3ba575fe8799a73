"""Rows of stored weights as decoded elements: what products of dequantization and multiplication read.

A decoded element is the value of a code before scaling and without the zero point. Scales and zero points follow after sums of
products, so that a weight costs one multiplication and no rounding.
"""

import triton
import triton.language as tl

from fast.kernels.bits import read
from fast.kernels.rules.elements import decode
from fast.kernels.rules.packing import load_packed
from fast.kernels.rules.scales import loaded_scale
from fast.kernels.rules.second_level import double_scale
from fast.kernels.rules.values import combined, loaded_zero
from fast.kernels.tile.fast_values import load_elements


@triton.jit
def row_elements(codes, row, k, length, SCHEME: tl.constexpr, PACKED: tl.constexpr, SIZE: tl.constexpr):
    """Decoded elements (P, SIZE), float32, from k on of rows (P, 1); `length` codes a row, a multiple of SIZE, like k."""
    at = row * length + (k + tl.arange(0, SIZE))[None, :]
    block = row * (length // SIZE) + k // SIZE
    exists = row >= 0
    if SCHEME.fast_values and (PACKED or SCHEME.bits == 8):
        return load_elements(codes, at, exists, block, exists, SCHEME, PACKED, SIZE)
    else:
        if PACKED:
            code = load_packed(codes, block, exists, SIZE, SCHEME.bits)
        else:
            code = tl.load(codes + at).to(tl.int32) & ((1 << SCHEME.bits) - 1)
        if SCHEME.zero == "value":
            return (code - SCHEME.middle_code).to(tl.float32)
        else:
            return decode(code, SCHEME.element)


@triton.jit
def block_scales(scale, outer, zero, block, SCHEME: tl.constexpr):
    """Decoding scales of blocks, the outer scale included, float32."""
    exists = block >= 0
    if SCHEME.two_level:
        s = double_scale(scale, outer, zero, block, exists, SCHEME, "float32")
    else:
        s = loaded_scale(tl.load(scale + block), SCHEME.level)
    o = tl.full((), 1.0, tl.float32)
    if SCHEME.has_outer:
        o = loaded_scale(tl.load(outer), SCHEME.outer)
    return combined(s, o, SCHEME, "float32")


@triton.jit
def block_zeros(zero, block, SCHEME: tl.constexpr):
    """Zero points of blocks, float32: in units of the scale, or (SCHEME.zero "value") of the weight."""
    return loaded_zero(read(zero + block, block >= 0), SCHEME).to(tl.float32)
