"""Scales that are quantized themselves, about their mean and in groups: `reference.quantize.scales.second_level` as device
functions.

The mean is a tree of averages of neighbours. Programs leave the averages of aligned parts of it, as many passes as it takes,
and the last pass, whose programs quantize the groups, goes on from there: each makes the same mean of the same few averages.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, MAGNITUDE, bits_of, canonical, is_nan, read, rounded
from fast.kernels.rules.elements import decode, nearest_integer
from fast.kernels.rules.scales import finite, ratio
from fast.kernels.rules.statistics import absmax
from fast.kernels.rules.trees import MOST_LEVELS


@triton.jit
def averages(v, HAS_PTX: tl.constexpr):
    """Rows of (P, S), S a power of two, averaged to (P, 1): neighbours first, as `reference.quantize.statistics.mean`."""
    COUNT: tl.constexpr = v.shape[0]
    for _ in tl.static_range(MOST_LEVELS):
        if v.shape[1] > 1:
            halves = tl.reshape(v * 0.5, (COUNT, v.shape[1] // 2, 2))
            if HAS_PTX:
                v = tl.sum(halves, axis=2)
            else:
                even, odd = tl.split(halves)
                v = even + odd
    return v


@triton.jit
def averaged_scales(v, SCHEME: tl.constexpr):
    """Scales as the mean has them: in default schemes those of NaN blocks are left out."""
    if SCHEME.house:
        v = tl.where((bits_of(v) & MAGNITUDE) < INFINITY, v, 0.0)
    return v


@triton.jit
def leave_averages(scales, averaged, at, inside, part, exists, SCHEME: tl.constexpr):
    """The averages of parts of the scales, or of averages before them; what lies beyond the last scale is 0."""
    made = averages(averaged_scales(read(scales + at, inside), SCHEME), SCHEME.has_ptx)
    tl.store(averaged + part, made, mask=exists)


@triton.jit
def quantize_groups(
    scales, averaged, codes, outer, center, at, inside, group, exists, count, parts, SCHEME: tl.constexpr, OP: tl.constexpr
):  # fmt: skip
    """Codes of scales, the scale of each group, and the mean. count: of all scales. parts: of averages that are left."""
    L: tl.constexpr = SCHEME.outer
    i = tl.arange(0, OP.parts)[None, :]
    top = averages(averaged_scales(read(averaged + i, i < parts), SCHEME), SCHEME.has_ptx)
    share = (count + tl.zeros((1, 1), tl.int32)).to(tl.float32) * OP.share
    mean = rounded(canonical(tl.div_rn(top, share)), L.compute)
    shifted = tl.where(inside, rounded(read(scales + at, inside) - mean, L.compute), 0.0)
    made = canonical(ratio(absmax(shifted, SCHEME.house, SCHEME.has_ptx), None, None, L, SCHEME.house))
    tl.store(outer + group, made, mask=exists)
    scale_code = _codes(rounded(shifted * made, L.compute), SCHEME.level.storage_element)
    tl.store(codes + at, scale_code.to(tl.int8), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(center + tl.zeros((1, 1), tl.int32), mean)


@triton.jit
def _codes(v, E: tl.constexpr):
    """int32 codes of scaled scales in an integer format."""
    integer = tl.minimum(tl.maximum(nearest_integer(v), E.low), E.high)
    return tl.where(is_nan(v), E.nan_code, integer)


@triton.jit
def double_scale(scale, outer, center, block, exists, SCHEME: tl.constexpr, DTYPE: tl.constexpr):
    """The scales of blocks, float32 (P, 1): code / outer scale + mean, each step rounded to DTYPE."""
    code = read(scale + block, exists).to(tl.int32)
    divisor = canonical(read(outer + block // SCHEME.group, exists))
    made = rounded(tl.div_rn(decode(code, SCHEME.level.storage_element), divisor), DTYPE)
    made = canonical(rounded(made + canonical(tl.load(center)), DTYPE))
    if SCHEME.dequantize == "float32":
        # A scale that was rounded up may lie beyond the largest float32.
        made = finite(made)
    return made
