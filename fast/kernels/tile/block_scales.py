"""The scales and zero points of a tile's blocks, by the rule that a record asks for, and where they are written."""

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
    largest, low, high, outer, scale, zero, block, writes, stride, RULE: tl.constexpr, JOB: tl.constexpr
):
    """(exact scale, its stored value, its code in storage, prepared factor, zero point); the operation's outputs are stored.

    The exact scale is not rounded to the storage format. The prepared factor is what elements are multiplied by (under an outer
    scale of the order "encode": divided by) where choosing the scale computes it, else the scale.
    Without a zero point the last is the scale. Where ranges are known to hold zero (`RULE.ranged`), low and high need not.
    """
    if RULE.power_of_two:
        scale_code = power_scale(largest, RULE.level, RULE.house)
        s = power_value(scale_code)
        e = s
        prepared = s
        z = s
    elif RULE.ranged:
        s, prepared, z = scale_of_range(largest, low, high, RULE)
        e = s
        scale_code = s
    elif RULE.e4m3_scales:
        scale_code, s, prepared = ordinary_e4m3_scales(largest, outer, RULE)
        e = s
        z = s
    elif RULE.under_outer:
        scale_code, s, prepared = choose_under_outer(largest, outer, RULE, JOB.outer == "statistic")
        e = s
        z = s
    else:
        e = exact_scale(largest, low, high, outer, RULE)
        scale_code, s = stored_scale(e, RULE.level)
        prepared = s
        z = e
        if RULE.zero != "":
            z = zero_point(low, e, RULE)
    if RULE.zero == "code" and JOB.scales:
        tl.store(zero + block, z.to(tl.int8), mask=writes)
    elif RULE.zero == "value" and JOB.scales and RULE.zero_storage == "float32":
        tl.store(zero + block, z, mask=writes)
    elif RULE.zero == "value" and JOB.scales:
        tl.store(zero + block, (bits_of(z) >> 16).to(tl.uint16), mask=writes)
    if JOB.tiled:
        at = scale_place(block // stride, block % stride, stride, True)
        tl.store(scale + at, scale_code.to(tl.uint8), mask=writes)
    elif JOB.scales and RULE.ranged and RULE.level.in_dtype:
        tl.store(scale + block, in_storage(s, RULE.level).to(scale.dtype.element_ty), mask=writes)
    elif JOB.scales and RULE.ranged:
        tl.store(scale + block, s, mask=writes)
    elif JOB.scales:
        tl.store(scale + block, scale_code.to(scale.dtype.element_ty), mask=writes)
    return e, s, scale_code, prepared, z
