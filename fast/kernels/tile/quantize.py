"""Scales and codes of a tile, and what else an operation writes of it: values, masked gradients."""

import triton
import triton.language as tl

from fast.kernels.bits import bits_of, float_of, narrow, order_key, read, widened
from fast.kernels.rules.packing import store_packed
from fast.kernels.rules.scaled import element_codes
from fast.kernels.rules.scales import floored, loaded_scale, outer_scale
from fast.kernels.rules.second_level import double_scale
from fast.kernels.rules.statistics import block_absmax, bound, value_range
from fast.kernels.rules.values import combined, loaded_zero, passed_on, saturated, values
from fast.kernels.sm90.bf16x2 import floats, set_aside
from fast.kernels.sm90.bit_tricks import mask_unless_poisoned, store_words
from fast.kernels.sm90.division import reciprocal_rn
from fast.kernels.sm90.fp4 import (
    larger_pair,
    largest_of_block,
    largest_of_pairs,
    load_pairs,
    side_by_side,
    words_of_pairs,
)
from fast.kernels.sm90.fp6 import store_sixes
from fast.kernels.sm90.int_asymmetric import load_segments, range_of_segments, store_segments
from fast.kernels.tile.block_scales import choose_scales
from fast.kernels.tile.fast_codes import multiplier, store_codes
from fast.kernels.tile.fast_values import finished, rounded_values
from fast.kernels.tile.saturation import store_saturation_mask
from fast.kernels.tile.stochastic_rounding import store_stochastic


@triton.jit
def _range(tile, inside, statistic, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr):
    """(pattern of the largest magnitude, minimum, maximum) of each block."""
    MINMAX: tl.constexpr = RULE.level.statistic != "absmax"
    if JOB.source == "statistic":
        largest = read(statistic + block, exists)
        if MINMAX:
            low = order_key(tl.load(statistic + stride + block, mask=exists, other=0))
            high = order_key(tl.load(statistic + 2 * stride + block, mask=exists, other=0))
    elif MINMAX:
        largest, low, high = value_range(tile, inside, RULE.signs_nan, RULE.with_zero, RULE.has_ptx)
    else:
        largest = block_absmax(widened(tile, RULE.signs_nan), RULE.has_ptx)
    if RULE.ranged:
        return largest, float_of(low), float_of(high)
    elif MINMAX:
        return largest, bound(low, largest, RULE.with_zero, True), bound(high, largest, RULE.with_zero, False)
    else:
        return largest, float_of(largest), float_of(largest)


@triton.jit
def quantize_tile(
    tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    RULE: tl.constexpr, JOB: tl.constexpr,
):  # fmt: skip
    """Choose the scales of a tile's blocks, then write what the operation asks for. g: gradients, where it masks those."""
    VALUED: tl.constexpr = JOB.output != "" and RULE.same_values
    if RULE.has_same and JOB.source != "given" and (JOB.codes or VALUED):
        _tile_of_ordinary_blocks(
            tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first,
            stride,
            RULE, JOB,
        )  # fmt: skip
    else:
        _tile(
            tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first,
            stride,
            RULE, JOB,
        )  # fmt: skip


@triton.jit
def _tile_of_ordinary_blocks(
    tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    RULE: tl.constexpr, JOB: tl.constexpr,
):  # fmt: skip
    """A tile by the sequences of `RULE.same` where all of its blocks are ordinary, else by the rules of the record."""
    later = set_aside(tile, RULE.has_ptx and RULE.zero != "")
    g_outer = _outer(outer, outer_statistic, RULE, JOB)
    largest, low, high = _range(tile, inside, statistic, block, exists, stride, RULE, JOB)
    if are_ordinary(largest, g_outer, exists, RULE):
        _, s, scale_code, prepared, z = choose_scales(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, RULE.same, JOB
        )
        v = floats(later, RULE.has_ptx) if RULE.zero != "" else widened(tile)
        _store_hot(
            codes, y, at, inside, block, exists, v, g_outer, s, scale_code, prepared, z, RULE.same, JOB
        )
    else:
        e, s, scale_code, prepared, z = choose_scales(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, RULE, JOB
        )
        v = widened(tile, RULE.signs_nan)
        _general_tile(
            v, g, random_bits, codes, y, at, inside, block, exists, e, s, z, g_outer, g_outer, RULE, JOB
        )


@triton.jit
def are_ordinary(largest, outer, exists, RULE: tl.constexpr):
    """Whether all blocks of a tile are ordinary (`scheme.ordinary_blocks`), by the patterns of their largest magnitudes."""
    S: tl.constexpr = RULE.same
    beyond = largest - S.least
    if S.zero_blocks:
        beyond = tl.where(largest == 0, 0, beyond)
    beyond = tl.where(exists, beyond, 0).to(tl.uint32, bitcast=True)
    made = tl.max(tl.reshape(beyond, (beyond.numel,)), axis=0) <= S.span
    if RULE.has_outer:
        made = made & ((bits_of(outer) - S.outer_least).to(tl.uint32, bitcast=True) <= S.outer_span)
    return made


@triton.jit
def _store_hot(
    codes,
    y,
    at,
    inside,
    block,
    exists,
    v,
    outer,
    s,
    scale_code,
    prepared,
    z,
    RULE: tl.constexpr,
    JOB: tl.constexpr,
):
    """Codes and values by the sequences of `fast_codes`, under scales that come from the tensor."""
    divisor, inv_scale = s, multiplier(s, scale_code, prepared, RULE)
    if RULE.on_ordinary and RULE.has_outer and RULE.outer_order == "encode":
        divisor, inv_scale = prepared, reciprocal_rn(prepared)
    if JOB.codes:
        store_codes(codes, at, inside, block, exists, v, inv_scale, divisor, z, RULE, JOB.packed)
    if JOB.output != "":
        c = combined(s, outer, RULE, "float32")
        value = rounded_values(v, inv_scale, divisor, z, RULE)
        tl.store(y + at, finished(value * c, c, JOB.output), mask=inside)


@triton.jit
def _tile(
    tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    RULE: tl.constexpr, JOB: tl.constexpr,
):  # fmt: skip
    """A tile by the sequences of the record for any block, or by its rules."""
    later = set_aside(tile, RULE.has_ptx and RULE.zero != "")
    g_outer = _outer(outer, outer_statistic, RULE, JOB)
    if JOB.source == "given" and RULE.two_level:
        s = double_scale(scale, outer, zero, block, exists, RULE, "float32")
        divisor_outer, scale_code, prepared, z, e = g_outer, s, s, s, s
        if RULE.house and RULE.codes_from != "exact" and not JOB.exact:
            e = floored(s, RULE.level)
    elif JOB.source == "given":
        s, e, divisor_outer, z = loaded_scales(scale, zero, g_outer, block, exists, RULE)
        if RULE.codes_from == "exact":
            e = s
        scale_code, prepared = s, s
    else:
        divisor_outer = g_outer
        largest, low, high = _range(tile, inside, statistic, block, exists, stride, RULE, JOB)
        e, s, scale_code, prepared, z = choose_scales(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, RULE, JOB
        )
        if JOB.clipped == "note":
            store_saturation_mask(codes, low, high, s, z, prepared, block, exists & first, RULE)
    # After the range, which is taken of pairs: floats would wait for it in twice the registers.
    if RULE.zero != "" and not RULE.signs_nan:
        v = floats(later, RULE.has_ptx)
    else:
        v = widened(tile, RULE.signs_nan)
    # The sequences make values as default schemes do.
    VALUES: tl.constexpr = JOB.output != "" and RULE.dequantize == "float32"
    if RULE.hot != "" and JOB.source != "given" and (JOB.codes or VALUES):
        _store_hot(codes, y, at, inside, block, exists, v, g_outer, s, scale_code, prepared, z, RULE, JOB)
    elif RULE.fast_stochastic and JOB.source != "given" and JOB.codes:
        inv_scale = multiplier(s, scale_code, prepared, RULE)
        bits = read(random_bits + at, inside)
        store_stochastic(codes, at, inside, block, exists, v, inv_scale, bits, s, RULE, JOB.packed)
    elif JOB.codes or JOB.output != "" or JOB.gradient:
        _general_tile(
            v, g, random_bits, codes, y, at, inside, block, exists, e, s, z, divisor_outer, g_outer, RULE, JOB
        )


@triton.jit
def pairs_tile(
    x, codes, scale, outer, outer_statistic, at, inside, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """4-bit and packed 6-bit floats of bfloat16 in blocks of 16 or 32, each in one thread; see `fp4` and `fp6`."""
    PARTS: tl.constexpr = SIZE // 8
    g_outer = _outer(outer, outer_statistic, RULE, JOB)
    a, b = load_pairs(x, block, SIZE, 0, PARTS), load_pairs(x, block, SIZE, 1, PARTS)
    top = larger_pair(largest_of_pairs(a), largest_of_pairs(b))
    if PARTS == 4:
        c, d = load_pairs(x, block, SIZE, 2, PARTS), load_pairs(x, block, SIZE, 3, PARTS)
        top = larger_pair(top, larger_pair(largest_of_pairs(c), largest_of_pairs(d)))
    largest = largest_of_block(top)
    if PARTS == 2:
        c, d = a, b
    if not RULE.has_same:
        _store_pairs(codes, a, b, c, d, largest, g_outer, scale, block, exists, stride, RULE, JOB, PARTS)
    elif are_ordinary(largest, g_outer, exists, RULE):
        _store_pairs(codes, a, b, c, d, largest, g_outer, scale, block, exists, stride, RULE.same, JOB, PARTS)
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
            RULE,
            JOB,
        )
        v = widened(read(x + at, inside), RULE.signs_nan)
        _general_tile(
            v, None, None, codes, None, at, inside, block, exists, e, s, z, g_outer, g_outer, RULE, JOB
        )


@triton.jit
def _store_pairs(
    codes, a, b, c, d, largest, outer, scale, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Codes of the parts of blocks, as words."""
    _, s, scale_code, prepared, z = choose_scales(
        largest, largest, largest, outer, scale, None, block, exists, stride, RULE, JOB
    )
    divisor, inv_scale = s, multiplier(s, scale_code, prepared, RULE)
    if RULE.on_ordinary and RULE.has_outer and RULE.outer_order == "encode":
        divisor, inv_scale = prepared, reciprocal_rn(prepared)
    if RULE.bits == 6:
        store_sixes(codes, a, b, c, d, inv_scale, s, block, exists, RULE)
    else:
        keep = mask_unless_poisoned(s, -1)
        random_bits = words_of_pairs(a, b, inv_scale, divisor, keep, RULE, JOB.packed)
        if PARTS == 4:
            random_bits = side_by_side(
                random_bits, words_of_pairs(c, d, inv_scale, divisor, keep, RULE, JOB.packed)
            )
        store_words(codes, random_bits, block, exists)


@triton.jit
def segments_tile(
    x, codes, scale, zero, block, exists, stride, RULE: tl.constexpr, JOB: tl.constexpr, SIZE: tl.constexpr
):
    """Packed 4-bit integers with zero points, of 16-bit floats, 32 of a block in each thread; see `int_asymmetric`."""
    a, b = load_segments(x, block, SIZE, 0), load_segments(x, block, SIZE, 1)
    c, d = load_segments(x, block, SIZE, 2), load_segments(x, block, SIZE, 3)
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    largest, low, high = range_of_segments(a, b, c, d, IS_BF16, SIZE)
    _, s, _, inv_scale, z = choose_scales(
        largest, float_of(low), float_of(high), None, scale, zero, block, exists, stride, RULE, JOB
    )
    store_segments(codes, a, b, c, d, inv_scale, s, z, block, IS_BF16, SIZE)


@triton.jit
def loaded_scales(scale, zero, outer, block, exists, RULE: tl.constexpr):
    """(given scale, what elements are divided by, the same of the outer scale, zero point).

    Elements are divided by a scale that is raised to the floor, so that a scale of 0 makes no NaN.
    """
    s = loaded_scale(read(scale + block, exists), RULE.level)
    e, divisor_outer = s, outer
    if RULE.house and not RULE.power_of_two:
        e = floored(s, RULE.level)
        if RULE.has_outer:
            divisor_outer = floored(outer, RULE.outer)
    z = s
    if RULE.zero != "":
        z = loaded_zero(read(zero + block, exists), RULE)
    return s, e, divisor_outer, z


@triton.jit
def _general_tile(
    v, g, random_bits, codes, y, at, inside, block, exists, e, s, z, divisor_outer, outer, RULE: tl.constexpr,
    JOB: tl.constexpr,
):  # fmt: skip
    """Codes, values or masked gradients by the rules of any record."""
    divisor = e if RULE.codes_from == "exact" or JOB.source == "given" else s
    bits = None
    if RULE.rounding == "stochastic":
        bits = read(random_bits + at, inside)
    made = element_codes(v, divisor, divisor_outer, z, bits, RULE)
    if JOB.packed:
        store_packed(codes, made, block, exists, RULE.bits)
    elif JOB.codes:
        tl.store(codes + at, made.to(codes.dtype.element_ty), mask=inside)
    if JOB.gradient:
        dy = read(g + at, inside)
        lost = saturated(v, made, divisor, divisor_outer, RULE)
        tl.store(y + at, passed_on(dy, lost, RULE.dtype), mask=inside)
    elif JOB.output != "":
        PRECISION: tl.constexpr = JOB.output if RULE.dequantize == "target" else "float32"
        value = values(made, combined(s, outer, RULE, PRECISION), z, RULE, PRECISION)
        tl.store(y + at, narrow(value, JOB.output, RULE.dequantize == "float32"), mask=inside)


@triton.jit
def _outer(outer, outer_statistic, RULE: tl.constexpr, JOB: tl.constexpr):
    """The scale over all elements, float32; 1 where there is none."""
    if not RULE.has_outer:
        return tl.full((), 1.0, tl.float32)
    elif JOB.outer == "statistic":
        made = outer_scale(tl.load(outer_statistic), RULE)
        if tl.program_id(0) == 0:
            tl.store(outer, made)
        return made
    else:
        return loaded_scale(tl.load(outer), RULE.outer)
