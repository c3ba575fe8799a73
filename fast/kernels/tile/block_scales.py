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
def choose(
    largest, low, high, outer, scale, zero, block, writes, stride, RULE: tl.constexpr, JOB: tl.constexpr
):
    """(scale before storage, as stored, zero point, what is kept of the scale), written where the job says so.

    Of rules whose range is known to hold zero the last is the multiplier, and low and high need not hold it.
    """
    if RULE.power_of_two:
        kept = power_scale(largest, RULE.level, RULE.house)
        s = power_value(kept)
        e = s
        z = s
    elif RULE.ranged:
        s, kept, z = scale_of_range(largest, low, high, RULE)
        e = s
    elif RULE.e4m3_scales:
        kept, s, z = ordinary_e4m3_scales(largest, outer, RULE)
        e = s
    elif RULE.under_outer:
        kept, s, z = choose_under_outer(largest, outer, RULE, JOB.outer == "statistic")
        e = s
    else:
        e = exact_scale(largest, low, high, outer, RULE)
        kept, s = stored_scale(e, RULE.level)
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
        tl.store(scale + at, kept.to(tl.uint8), mask=writes)
    elif JOB.scales and RULE.ranged and RULE.level.in_dtype:
        tl.store(scale + block, in_storage(s, RULE.level).to(scale.dtype.element_ty), mask=writes)
    elif JOB.scales and RULE.ranged:
        tl.store(scale + block, s, mask=writes)
    elif JOB.scales:
        tl.store(scale + block, kept.to(scale.dtype.element_ty), mask=writes)
    return e, s, z, kept
