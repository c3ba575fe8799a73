"""Blocks that reach beyond the codes: noted where they are rounded, so that gradients of all others need no look.

Under a zero point the ends of a block's range are rounded one by one, and only where both lie half way between two codes may
one of them land beyond the last: few blocks do, above all those with a minimum and a maximum of one size. Scaling and rounding
keep the order of elements, so a block has lost some where its minimum or its maximum is lost. It is noted by these two, and of
the gradients only those of noted blocks are touched: what was lost gets 0.
"""

import triton
import triton.language as tl

from fast.kernels.bits import float_of, read, widened
from fast.kernels.rules.elements import TO_INTEGER
from fast.kernels.rules.scaled import reciprocal
from fast.kernels.rules.statistics import bound, value_range
from fast.kernels.tile.block_scales import choose_scales


@triton.jit
def store_saturation_mask(
    saturation_mask, low, high, scale, zero, prepared, block, exists, RULE: tl.constexpr
):
    """1 for blocks of integers whose minimum or maximum lies beyond the codes; 0 for the others, and for poisoned ones."""
    inv_scale, bottom, top = _limits(scale, zero, prepared, RULE)
    saturates = (high * inv_scale + TO_INTEGER > top) | (low * inv_scale + TO_INTEGER < bottom)
    tl.store(saturation_mask + block, saturates.to(tl.uint8), mask=exists)


@triton.jit
def _limits(scale, zero, prepared, RULE: tl.constexpr):
    """(multiplier, lowest, highest) of blocks: elements times the multiplier, rounded by adding TO_INTEGER, lie between.

    In poisoned blocks the multiplier is NaN, and nothing is beyond.
    """
    inv_scale = prepared if RULE.ranged else reciprocal(scale, scale, RULE)
    return (
        inv_scale,
        (RULE.low - zero).to(tl.float32) + TO_INTEGER,
        (RULE.high - zero).to(tl.float32) + TO_INTEGER,
    )


@triton.jit
def mask_saturated_gradients(
    x, g, saturation_mask, at, inside, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr
):
    """0 into g where elements of noted blocks lie beyond the codes; tiles without a noted block are passed over."""
    saturates = tl.load(saturation_mask + block, mask=exists, other=0) != 0
    if tl.max(tl.max(saturates.to(tl.int32), axis=1), axis=0) != 0:
        here = inside & saturates
        tile = read(x + at, here)
        largest, low, high = value_range(tile, here, RULE.signs_nan, RULE.with_zero, RULE.has_ptx)
        if RULE.ranged:
            low, high = float_of(low), float_of(high)
        else:
            low, high = bound(low, largest, RULE.with_zero, True), bound(high, largest, RULE.with_zero, False)
        _, s, _, prepared, z = choose_scales(
            largest, low, high, None, None, None, block, exists, stride, RULE, JOB
        )
        inv_scale, bottom, top = _limits(s, z, prepared, RULE)
        t = widened(tile, RULE.signs_nan) * inv_scale + TO_INTEGER
        # How far it is beyond: one comparison. NaN, of poisoned blocks, is not.
        beyond = tl.maximum(t - top, bottom - t)
        tl.store(g + at, tl.where(beyond > 0, 0.0, read(g + at, here)), mask=here)
