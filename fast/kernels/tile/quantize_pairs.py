"""Codes of 16-bit tiles that are read in pairs, each block or segment in one thread: 4-bit and 6-bit floats, 4-bit integers."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import float_of, read, widened
from fast.kernels.sm90.bit_tricks import mask_unless_poisoned, store_words
from fast.kernels.sm90.division import reciprocal_rn
from fast.kernels.sm90.fp4 import (
    larger_pair,
    largest_of_block,
    largest_of_pairs,
    load_pairs,
    side_by_side,
    words_of_pairs,
    words_of_strip,
)
from fast.kernels.sm90.fp6 import store_sixes
from fast.kernels.sm90.int_asymmetric import load_segments, range_of_segments, store_segments
from fast.kernels.tile.block_scales import choose_scales
from fast.kernels.tile.fast_codes import multiplier
from fast.kernels.tile.quantize import are_ordinary, general_tile, load_outer
from fast.kernels.tile.strips import of_blocks, store_elements


@triton.jit
def pairs_tile(
    x, codes, scale, outer, outer_statistic, at, inside, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """4-bit and packed 6-bit floats of bfloat16 in blocks of 16 or 32, each in one thread; see `fp4` and `fp6`."""
    PARTS: tl.constexpr = SIZE // 8
    g_outer = load_outer(outer, outer_statistic, SCHEME, OP)
    a, b = load_pairs(x, block, SIZE, 0, PARTS), load_pairs(x, block, SIZE, 1, PARTS)
    top = larger_pair(largest_of_pairs(a), largest_of_pairs(b))
    if PARTS == 4:
        c, d = load_pairs(x, block, SIZE, 2, PARTS), load_pairs(x, block, SIZE, 3, PARTS)
        top = larger_pair(top, larger_pair(largest_of_pairs(c), largest_of_pairs(d)))
    largest = largest_of_block(top)
    if PARTS == 2:
        c, d = a, b
    if not SCHEME.has_same:
        _store_pairs(codes, a, b, c, d, largest, g_outer, scale, block, exists, stride, SCHEME, OP, PARTS)
    elif are_ordinary(largest, g_outer, exists, SCHEME):
        _store_pairs(
            codes, a, b, c, d, largest, g_outer, scale, block, exists, stride, SCHEME.same, OP, PARTS
        )
    else:
        e, s, _, _, z = choose_scales(
            largest,
            float_of(largest),
            float_of(largest),
            g_outer,
            scale,
            None,
            block,
            exists,
            stride,
            SCHEME,
            OP,
        )
        v = widened(read(x + at, inside), SCHEME.signs_nan)
        general_tile(
            v, None, None, codes, None, at, inside, block, exists, e, s, z, g_outer, g_outer, SCHEME, OP
        )


@triton.jit
def strip_tile(
    x, codes, scale, outer, outer_statistic, elements, pairs, words, block, exists, stride, SCHEME: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """4-bit floats of bfloat16 in two-dimensional blocks side by side; elements, pairs, words: where these lie (`strips`)."""
    g_outer = load_outer(outer, outer_statistic, SCHEME, OP)
    both = of_blocks(tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + pairs))
    largest = largest_of_block(largest_of_pairs(both))
    if not SCHEME.has_same:
        _store_strip(codes, both, largest, g_outer, scale, words, block, exists, stride, SCHEME, OP)
    elif are_ordinary(largest, g_outer, exists, SCHEME):
        _store_strip(codes, both, largest, g_outer, scale, words, block, exists, stride, SCHEME.same, OP)
    else:
        f = float_of(largest)
        e, s, _, _, z = choose_scales(largest, f, f, g_outer, scale, None, block, exists, stride, SCHEME, OP)
        v = widened(of_blocks(tl.load(x + elements)), SCHEME.signs_nan)
        at = words if OP.packed else elements
        general_tile(
            v, None, None, codes, None, at, None, block, exists, e, s, z, g_outer, g_outer, SCHEME, OP
        )


@triton.jit
def _store_strip(
    codes, both, largest, outer, scale, words, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr
):
    """Codes of whole blocks, as words."""
    _, s, scale_code, prepared, z = choose_scales(
        largest, largest, largest, outer, scale, None, block, exists, stride, SCHEME, OP
    )
    divisor, inv_scale = s, multiplier(s, scale_code, prepared, SCHEME)
    if SCHEME.on_ordinary and SCHEME.has_outer and SCHEME.outer_order == "encode":
        divisor, inv_scale = prepared, reciprocal_rn(prepared)
    made = words_of_strip(both, inv_scale, divisor, mask_unless_poisoned(s, -1), SCHEME, OP.packed)
    store_elements(codes.to(tl.pointer_type(tl.int32), bitcast=True) + words, made, None)


@triton.jit
def _store_pairs(
    codes, a, b, c, d, largest, outer, scale, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Codes of the parts of blocks, as words."""
    _, s, scale_code, prepared, z = choose_scales(
        largest, largest, largest, outer, scale, None, block, exists, stride, SCHEME, OP
    )
    divisor, inv_scale = s, multiplier(s, scale_code, prepared, SCHEME)
    if SCHEME.on_ordinary and SCHEME.has_outer and SCHEME.outer_order == "encode":
        divisor, inv_scale = prepared, reciprocal_rn(prepared)
    if SCHEME.bits == 6:
        store_sixes(codes, a, b, c, d, inv_scale, s, block, exists, SCHEME)
    else:
        keep = mask_unless_poisoned(s, -1)
        random_bits = words_of_pairs(a, b, inv_scale, divisor, keep, SCHEME, OP.packed)
        if PARTS == 4:
            random_bits = side_by_side(
                random_bits, words_of_pairs(c, d, inv_scale, divisor, keep, SCHEME, OP.packed)
            )
        store_words(codes, random_bits, block, exists)


@triton.jit
def segments_tile(
    x, codes, scale, zero, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr, SIZE: tl.constexpr
):
    """Packed 4-bit integers with zero points, of 16-bit floats, 32 of a block in each thread; see `int_asymmetric`."""
    a, b = load_segments(x, block, SIZE, 0), load_segments(x, block, SIZE, 1)
    c, d = load_segments(x, block, SIZE, 2), load_segments(x, block, SIZE, 3)
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    largest, low, high = range_of_segments(a, b, c, d, IS_BF16, SIZE)
    _, s, _, inv_scale, z = choose_scales(
        largest, float_of(low), float_of(high), None, scale, zero, block, exists, stride, SCHEME, OP
    )
    store_segments(codes, a, b, c, d, inv_scale, s, z, block, IS_BF16, SIZE)
