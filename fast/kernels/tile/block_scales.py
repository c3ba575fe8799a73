"""The scales and zero points of a tile's blocks, by the rule that a record asks for, and where they are written."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import bits_of
from fast.kernels.rules.scale_swizzle import scale_place
from fast.kernels.rules.scales import (
    exact_scale,
    in_storage,
    power_scale,
    power_value,
    stored_scale,
    zero_point,
)
from fast.kernels.sm90.int_asymmetric import scale_of_range
from fast.kernels.tile.outer_scales import choose_under_outer, ordinary_e4m3_scales


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
        scale_code = power_scale(largest, SCHEME.level, SCHEME.house)
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
