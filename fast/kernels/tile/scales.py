"""The scales and zero points of a tile's blocks, by the rule that a record asks for, and where they are written."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, LARGEST, bits_of, float_of, is_nan
from fast.kernels.rules.elements import finite_e4m3_value, nonnegative_code
from fast.kernels.rules.scales import (
    exact_scale,
    in_storage,
    nonnegative,
    power_scale,
    power_value,
    scale_place,
    stored_scale,
    zero_point,
)
from fast.kernels.rules.values import bounded
from fast.kernels.sm90.bit_tricks import divided, quotient, reciprocal_rn, round_to_dtype
from fast.kernels.sm90.integers import scale_of_range

# e4m3 block scales of 4-bit floats, alone or under a float32 scale over the tensor, and the multipliers of elements.


@triton.jit
def ordinary_e4m3_scales(largest, outer, SCHEME: tl.constexpr):
    """(e4m3 code, scale, divisor or multiplier of the elements) of ordinary blocks, in the order of the record.

    Without an outer scale the last is the scale. Under one, in the orders of `reference.schemes.schemes.Scheme.outer_order`:
    "reciprocal_first" (1 / g) / s, "folded" min(1 / (s * (1 / g)), largest float32), "encode" the divisor s / g.
    """
    L: tl.constexpr = SCHEME.level
    if not SCHEME.has_outer:
        code = _e4m3_code(quotient(float_of(largest), L.target, L.target_reciprocal), L)
        scale = finite_e4m3_value(code)
        return code, scale, scale
    elif SCHEME.outer_order == "folded":
        code = _e4m3_code(float_of(largest) * (outer * L.one_over_target), L)
        scale = finite_e4m3_value(code)
        inv_scale = tl.where(
            code == 0, float_of(tl.full((), LARGEST, tl.int32)), reciprocal_rn(scale * reciprocal_rn(outer))
        )
        return code, scale, inv_scale
    elif SCHEME.outer_order == "encode":
        ratio = round_to_dtype(quotient(float_of(largest), L.target, L.target_reciprocal), L.compute)
        code = _e4m3_code(outer * ratio, L)
        scale = finite_e4m3_value(code)
        return code, scale, divided(scale, outer, reciprocal_rn(outer))
    else:
        first = reciprocal_rn(outer)
        code = _e4m3_code(
            divided(quotient(float_of(largest), L.target, L.target_reciprocal), outer, first), L
        )
        scale = finite_e4m3_value(code)
        return code, scale, divided(first, scale, reciprocal_rn(scale))


@triton.jit
def _e4m3_code(exact, L: tl.constexpr):
    """The code of a scale that is not negative, with the floor of the record before or after it is rounded."""
    if L.floor_kind == "scale":
        exact = tl.maximum(exact, float_of(tl.full((), L.floor, tl.int32)))
    code = nonnegative_code(exact, L.storage_element)
    if L.floor_kind == "zero":
        code = tl.where(code == 0, L.floor_code, code)
    return code


@triton.jit
def choose_under_outer(largest, outer, SCHEME: tl.constexpr, COMPUTED: tl.constexpr):
    """(e4m3 code of the block scale, scale, multiplier of the elements) of default two-level schemes.

    (amax / target) / outer, then 1 / (outer * scale), each correctly rounded. Both are multiplied by the power of two that
    brings the outer scale to [1, 2), so that short divisions do: what overflows e4m3 is cut down first, and what they get wrong
    lies far below the smallest block scale. COMPUTED: the outer scale comes from a tensor, and of records
    that say so lies between 2**-112 and 2**117; a given one may lie anywhere.
    """
    if COMPUTED and SCHEME.ordinary:  # noqa: SIM114  joined, the test would be made where the constant settles it
        code, scale, inv_scale = _under_ordinary(largest, outer, SCHEME.level)
    elif (outer >= 1.925929944387236e-34) & (outer <= 1.661534994731145e35):
        code, scale, inv_scale = _under_ordinary(largest, outer, SCHEME.level)
    else:
        code, scale, inv_scale = _under_any(largest, outer, SCHEME.level)
    return code, scale, inv_scale


@triton.jit
def _under_ordinary(largest, outer, L: tl.constexpr):
    power = (254 << 23) - (bits_of(outer) & INFINITY)
    unit = float_of(power)
    mantissa = outer * unit
    value = quotient(tl.minimum(float_of(largest) * unit, 1024.0 * L.target), L.target, L.target_reciprocal)
    exact = divided(value, mantissa, reciprocal_rn(mantissa))
    code = tl.maximum(nonnegative_code(exact, L.storage_element), L.floor_code)
    # NaN and infinity poison their block.
    bad = largest >= INFINITY
    scale = tl.where(bad, float("nan"), finite_e4m3_value(code))
    return tl.where(bad, 127, code), scale, reciprocal_rn(outer * scale)


@triton.jit
def _under_any(largest, outer, L: tl.constexpr):
    """The same for an outer scale of any size and sign; NaN poisons every block."""
    exact = nonnegative(tl.div_rn(tl.div_rn(float_of(largest), L.target), outer))
    code = tl.maximum(nonnegative_code(exact, L.storage_element), L.floor_code)
    bad = (largest >= INFINITY) | is_nan(exact) | is_nan(outer)
    scale = tl.where(bad, float("nan"), finite_e4m3_value(code))
    return tl.where(bad, 127, code), scale, bounded(tl.div_rn(1.0, outer * scale))


@triton.jit
def choose_scales(
    largest, low, high, outer, scale, zero, block, writes, stride, SCHEME: tl.constexpr, OP: tl.constexpr
):
    """(exact scale, its stored value, its code in storage, prepared factor, zero point); the operation's outputs are stored.

    The exact scale is not rounded to the storage format. The prepared factor is what elements are multiplied by (under an outer
    scale of the order "encode": divided by) where choosing the scale computes it, else the scale.
    Without a zero point the last is the scale. Where ranges are known to hold zero (`SCHEME.ranged`), low and high need not.
    """
    if SCHEME.power_of_two:
        scale_code = power_scale(largest, SCHEME.level, SCHEME.block_nan)
        s = power_value(scale_code)
        e = s
        prepared = s
        z = s
    elif SCHEME.ranged:
        s, prepared, z = scale_of_range(largest, low, high, SCHEME)
        e = s
        scale_code = s
    elif SCHEME.e4m3_scales:
        scale_code, s, prepared = ordinary_e4m3_scales(largest, outer, SCHEME)
        e = s
        z = s
    elif SCHEME.under_outer:
        scale_code, s, prepared = choose_under_outer(largest, outer, SCHEME, OP.outer == "statistic")
        e = s
        z = s
    else:
        e = exact_scale(largest, low, high, outer, SCHEME)
        scale_code, s = stored_scale(e, SCHEME.level)
        prepared = s
        z = e
        if SCHEME.zero != "":
            z = zero_point(low, e, SCHEME)
    if SCHEME.zero == "code" and OP.scales:
        tl.store(zero + block, z.to(tl.int8), mask=writes)
    elif SCHEME.zero == "value" and OP.scales and SCHEME.zero_storage == "float32":
        tl.store(zero + block, z, mask=writes)
    elif SCHEME.zero == "value" and OP.scales:
        tl.store(zero + block, (bits_of(z) >> 16).to(tl.uint16), mask=writes)
    if OP.tiled:
        at = scale_place(block // stride, block % stride, stride, True)
        tl.store(scale + at, scale_code.to(tl.uint8), mask=writes)
    elif OP.scales and SCHEME.ranged and SCHEME.level.in_dtype:
        tl.store(scale + block, in_storage(s, SCHEME.level).to(scale.dtype.element_ty), mask=writes)
    elif OP.scales and SCHEME.ranged:
        tl.store(scale + block, s, mask=writes)
    elif OP.scales:
        tl.store(scale + block, scale_code.to(scale.dtype.element_ty), mask=writes)
    return e, s, scale_code, prepared, z
