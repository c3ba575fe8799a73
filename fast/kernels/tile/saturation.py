"""Saturation masks: blocks with saturated elements are marked when x is quantized, so that only their gradients are masked.

Under a zero point the ends of a block's range are rounded separately. Only where both lie half way between two codes may one of
them land beyond the last code: few blocks saturate, above all those with a minimum and a maximum of one magnitude. Scaling and
rounding keep the order of elements, so a block has saturated elements where its minimum or its maximum saturates. The gradients
of marked blocks are read and written again, with 0 where the element saturated; all others are left as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import float_of, read, widened
from fast.kernels.rules.elements import TO_INTEGER
from fast.kernels.rules.scaled import reciprocal
from fast.kernels.rules.statistics import bound, value_range
from fast.kernels.tile.block_scales import choose_scales


@triton.jit
def store_saturation_mask(
    saturation_mask, low, high, scale, zero, prepared, block, exists, SCHEME: tl.constexpr
):
    """1 for blocks of integers whose minimum or maximum lies beyond the codes; 0 for the others, and for poisoned ones."""
    inv_scale, bottom, top = _limits(scale, zero, prepared, SCHEME)
    saturates = (high * inv_scale + TO_INTEGER > top) | (low * inv_scale + TO_INTEGER < bottom)
    tl.store(saturation_mask + block, saturates.to(tl.uint8), mask=exists)


@triton.jit
def _limits(scale, zero, prepared, SCHEME: tl.constexpr):
    """(multiplier, lowest, highest) of blocks: elements times the multiplier, rounded by adding TO_INTEGER, lie between.

    In poisoned blocks the multiplier is NaN, and nothing is beyond.
    """
    inv_scale = prepared if SCHEME.ranged else reciprocal(scale, scale, SCHEME)
    return (
        inv_scale,
        (SCHEME.low - zero).to(tl.float32) + TO_INTEGER,
        (SCHEME.high - zero).to(tl.float32) + TO_INTEGER,
    )


@triton.jit
def mask_saturated_gradients(
    x, g, saturation_mask, at, inside, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr
):
    """Write 0 into g where elements of marked blocks saturated; tiles without a marked block are skipped."""
    saturates = tl.load(saturation_mask + block, mask=exists, other=0) != 0
    if tl.max(tl.max(saturates.to(tl.int32), axis=1), axis=0) != 0:
        here = inside & saturates
        tile = read(x + at, here)
        largest, low, high = value_range(tile, here, SCHEME.signs_nan, SCHEME.with_zero, SCHEME.has_ptx)
        if SCHEME.ranged:
            low, high = float_of(low), float_of(high)
        else:
            low, high = (
                bound(low, largest, SCHEME.with_zero, True),
                bound(high, largest, SCHEME.with_zero, False),
            )
        _, s, _, prepared, z = choose_scales(
            largest, low, high, None, None, None, block, exists, stride, SCHEME, OP
        )
        inv_scale, bottom, top = _limits(s, z, prepared, SCHEME)
        t = widened(tile, SCHEME.signs_nan) * inv_scale + TO_INTEGER
        # How far it is beyond: one comparison. NaN, of poisoned blocks, is not.
        beyond = tl.maximum(t - top, bottom - t)
        tl.store(g + at, tl.where(beyond > 0, 0.0, read(g + at, here)), mask=here)
