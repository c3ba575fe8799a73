"""Decoded values: the second half of `reference.quantize.dequantize`, and which elements saturated."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import (
    INFINITY,
    LARGEST,
    MAGNITUDE,
    SIGN,
    bits_of,
    canonical,
    float_of,
    is_nan,
    narrow,
    rounded,
    widened,
)
from fast.kernels.rules.elements import MARK, decode


@triton.jit
def combined(scale, outer, SCHEME: tl.constexpr, DTYPE: tl.constexpr):
    """Block scale and outer scale as one decoding scale; DTYPE: precision of the arithmetic."""
    scale = rounded(scale, DTYPE)
    if SCHEME.has_outer:
        if SCHEME.outer_order == "encode":
            scale = rounded(tl.div_rn(scale, outer), DTYPE)
        elif SCHEME.outer_order == "folded":
            scale = rounded(scale * rounded(tl.div_rn(1.0, outer), DTYPE), DTYPE)
        else:
            scale = rounded(scale * outer, DTYPE)
    return scale


@triton.jit
def unscaled(codes, zero, SCHEME: tl.constexpr):
    """Decoded elements before scaling, float32."""
    if SCHEME.zero == "":
        return decode(codes, SCHEME.element)
    elif SCHEME.zero == "code":
        signed = tl.where(codes > SCHEME.element.max_code, codes - (1 << SCHEME.bits), codes)
        return (signed - zero).to(tl.float32)
    else:
        return (codes - SCHEME.middle_code).to(tl.float32)


@triton.jit
def values(codes, scale, zero, SCHEME: tl.constexpr, DTYPE: tl.constexpr):
    """float32 values of a tile; scale is the combined one (blocks, 1)."""
    value = unscaled(codes, zero, SCHEME)
    if SCHEME.stored == "encode":
        return rounded(tl.div_rn(value, scale), DTYPE)
    else:
        product = rounded(rounded(value, DTYPE) * scale, DTYPE)
        if SCHEME.dequantize == "float32" and SCHEME.element.specials == "ieee":
            product = _stay_finite(product, value, scale)
        elif SCHEME.dequantize == "float32":
            # Without infinities among the values only the scale decides.
            limit = tl.where((bits_of(scale) & MAGNITUDE) < INFINITY, LARGEST, INFINITY)
            product = tl.clamp(product, -float_of(limit), float_of(limit), propagate_nan=tl.PropagateNan.ALL)
        if SCHEME.zero == "value":
            product = rounded(product + zero, DTYPE)
        return product


@triton.jit
def _stay_finite(product, value, scale):
    """Finite times finite stops at the largest finite float32."""
    finite = ((bits_of(value) & MAGNITUDE) < INFINITY) & ((bits_of(scale) & MAGNITUDE) < INFINITY)
    b = bits_of(product)
    over = ((b & MAGNITUDE) == INFINITY) & finite
    return float_of(tl.where(over, (b & SIGN) | LARGEST, b))


@triton.jit
def loaded_zero(stored, SCHEME: tl.constexpr):
    """A stored zero point as int32 code or float32."""
    if SCHEME.zero == "code":
        return stored.to(tl.int32)
    elif SCHEME.zero_storage == "float32":
        return canonical(stored)
    else:
        v = float_of(stored.to(tl.int32) << 16)
        return float_of(tl.where(is_nan(v), 0x7FC00000, bits_of(v)))


@triton.jit
def saturated(v, marked, scale, outer, SCHEME: tl.constexpr):
    """Whether saturation changed the rounded element; `marked` are codes made under the overflow policy "mark"."""
    if SCHEME.kind != "codebook":
        return (marked & MARK) != 0
    else:
        units = in_units(v, scale, outer, scale, SCHEME)
        return (bits_of(canonical(units)) & MAGNITUDE) > SCHEME.max_bits


@triton.jit
def in_units(v, scale, outer, zero, SCHEME: tl.constexpr):
    """v / s in float32 (v * S for an encoding scale), for tinygemm (v - z) / s."""
    if SCHEME.zero == "value":
        v = v - zero
    if SCHEME.stored == "encode":
        return v * scale
    else:
        return (
            tl.div_rn(tl.div_rn(v, scale), decoding(outer, SCHEME))
            if SCHEME.has_outer
            else tl.div_rn(v, scale)
        )


@triton.jit
def decoding(outer, SCHEME: tl.constexpr):
    """The outer scale as a factor of values."""
    if SCHEME.outer.stored == "encode":
        return tl.div_rn(1.0, outer)
    else:
        return outer


@triton.jit
def passed_on(g, lost, DTYPE: tl.constexpr):
    """The gradient g where the element was not lost to saturation, +0 where it was; a float32 NaN keeps its payload."""
    dx = tl.where(lost, 0.0, widened(g))
    if DTYPE == "float32":
        return dx
    else:
        return narrow(dx, DTYPE, False)
