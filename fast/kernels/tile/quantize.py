"""Scales and codes of a tile, and what else an operation writes of it: values, masked gradients.

Stochastic rounding of MX floats is the rule of `elements.round_shift`, without decomposing every element. It adds random bits
to the significand where it is cut, and cuts: of elements that are normal in the format to the float32 pattern itself, whose
exponent takes the carry; below them to a fixed-point value of 24 fraction bits. Each is at most the other's code where it does
not apply, so the larger one is the code. Only for scales that were computed from the tile, as in `fast_codes`: where a block
is not poisoned its elements are finite.

Saturation masks mark blocks with saturated elements when x is quantized, so that only their gradients are masked. Under a zero
point the ends of a block's range are rounded separately. Only where both lie half way between two codes may one of them land
beyond the last code: few blocks saturate, above all those with a minimum and a maximum of one magnitude. Scaling and rounding
keep the order of elements, so a block has saturated elements where its minimum or its maximum saturates. The gradients of
marked blocks are read and written again, with 0 where the element saturated; all others are left as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import MAGNITUDE, NAN, bits_of, float_of, is_nan, narrow, order_key, read, widened
from fast.kernels.rules.elements import TO_INTEGER, store_packed
from fast.kernels.rules.scales import double_scale, floored, loaded_scale, outer_scale
from fast.kernels.rules.statistics import block_absmax, bound, value_range
from fast.kernels.rules.values import (
    combined,
    element_codes,
    loaded_zero,
    passed_on,
    reciprocal,
    saturated,
    values,
)
from fast.kernels.sm90.bf16x2 import floats, set_aside
from fast.kernels.sm90.bit_tricks import bytes_of, mask_unless_poisoned, reciprocal_rn, store_words
from fast.kernels.sm90.fp4_fp6 import (
    larger_pair,
    largest_of_block,
    largest_of_pairs,
    load_pairs,
    side_by_side,
    store_sixes,
    words_of_pairs,
    words_of_strip,
)
from fast.kernels.sm90.integers import load_segments, range_of_segments, store_segments
from fast.kernels.tile.fast_codes import (
    finished,
    multiplier,
    of_blocks,
    rounded_values,
    store_codes,
    store_elements,
    store_packed_of,
)
from fast.kernels.tile.scales import choose_scales


@triton.jit
def _range(tile, inside, statistic, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr):
    """(pattern of the largest magnitude, minimum, maximum) of each block."""
    MINMAX: tl.constexpr = SCHEME.level.statistic != "absmax"
    if OP.source == "statistic" and OP.parts > 1:
        part = tl.arange(0, OP.parts)
        of_parts = tl.load(statistic + part, mask=part < stride, other=0)
        largest = tl.max(of_parts, axis=0) + tl.zeros_like(block)
    elif OP.source == "statistic":
        largest = read(statistic + block, exists)
        if MINMAX:
            low = order_key(tl.load(statistic + stride + block, mask=exists, other=0))
            high = order_key(tl.load(statistic + 2 * stride + block, mask=exists, other=0))
    elif MINMAX:
        largest, low, high = value_range(tile, inside, SCHEME.signs_nan, SCHEME.with_zero, SCHEME.has_ptx)
    else:
        largest = block_absmax(widened(tile, SCHEME.signs_nan), SCHEME.has_ptx)
    if SCHEME.ranged:
        return largest, float_of(low), float_of(high)
    elif MINMAX:
        return (
            largest,
            bound(low, largest, SCHEME.with_zero, True),
            bound(high, largest, SCHEME.with_zero, False),
        )
    else:
        return largest, float_of(largest), float_of(largest)


@triton.jit
def quantize_tile(
    tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    SCHEME: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Choose the scales of a tile's blocks, then write what the operation asks for. g: gradients, where it masks those."""
    VALUED: tl.constexpr = OP.output != "" and SCHEME.same_values
    if SCHEME.has_same and OP.source != "given" and (OP.codes or VALUED):
        _tile_of_ordinary_blocks(
            tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first,
            stride,
            SCHEME, OP,
        )  # fmt: skip
    else:
        _tile(
            tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first,
            stride,
            SCHEME, OP,
        )  # fmt: skip


@triton.jit
def _tile_of_ordinary_blocks(
    tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    SCHEME: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """A tile by the sequences of `SCHEME.same` where all of its blocks are ordinary, else by the rules of the record."""
    later = set_aside(tile, SCHEME.has_ptx and SCHEME.zero != "")
    g_outer = load_outer(outer, outer_statistic, SCHEME, OP)
    largest, low, high = _range(tile, inside, statistic, block, exists, stride, SCHEME, OP)
    if are_ordinary(largest, g_outer, exists, SCHEME):
        _, s, scale_code, prepared, z = choose_scales(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, SCHEME.same, OP
        )
        v = floats(later, SCHEME.has_ptx) if SCHEME.zero != "" else widened(tile)
        _store_by_fast_path(
            codes, y, at, inside, block, exists, v, g_outer, s, scale_code, prepared, z, SCHEME.same, OP
        )
    else:
        e, s, scale_code, prepared, z = choose_scales(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, SCHEME, OP
        )
        v = widened(tile, SCHEME.signs_nan)
        general_tile(
            v, g, random_bits, codes, y, at, inside, block, exists, e, s, z, g_outer, g_outer, SCHEME, OP
        )


@triton.jit
def are_ordinary(largest, outer, exists, SCHEME: tl.constexpr):
    """Whether all blocks of a tile are ordinary (`scheme.ordinary_blocks`), by the patterns of their largest magnitudes."""
    S: tl.constexpr = SCHEME.same
    beyond = largest - S.least
    if S.zero_blocks:
        beyond = tl.where(largest == 0, 0, beyond)
    beyond = tl.where(exists, beyond, 0).to(tl.uint32, bitcast=True)
    result = tl.max(tl.reshape(beyond, (beyond.numel,)), axis=0) <= S.span
    if SCHEME.has_outer:
        result = result & ((bits_of(outer) - S.outer_least).to(tl.uint32, bitcast=True) <= S.outer_span)
    return result


@triton.jit
def _store_by_fast_path(
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
    SCHEME: tl.constexpr,
    OP: tl.constexpr,
):
    """Codes and values by the sequences of `fast_codes`, under scales that come from the tensor."""
    divisor, inv_scale = s, multiplier(s, scale_code, prepared, SCHEME)
    if SCHEME.on_ordinary and SCHEME.has_outer and SCHEME.outer_order == "encode":
        divisor, inv_scale = prepared, reciprocal_rn(prepared)
    if OP.codes:
        store_codes(codes, at, inside, block, exists, v, inv_scale, divisor, z, SCHEME, OP.packed)
    if OP.output != "":
        c = combined(s, outer, SCHEME, "float32")
        if SCHEME.on_ordinary and SCHEME.kind == "float" and not SCHEME.has_outer:
            # A scale of 0, of a block of zeros: 0 / 0 is NaN, which `rounded_values` does not keep.
            c = float_of(tl.where(c == 0.0, NAN, bits_of(c)))
        value = rounded_values(v, inv_scale, divisor, z, SCHEME)
        tl.store(y + at, finished(value * c, c, OP.output), mask=inside)


@triton.jit
def _tile(
    tile, g, random_bits, codes, scale, outer, zero, statistic, outer_statistic, y, at, inside, block, exists, first, stride,
    SCHEME: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """A tile by the sequences of the record for any block, or by its rules."""
    later = set_aside(tile, SCHEME.has_ptx and SCHEME.zero != "")
    g_outer = load_outer(outer, outer_statistic, SCHEME, OP)
    if OP.source == "given" and SCHEME.two_level:
        s = double_scale(scale, outer, zero, block, exists, SCHEME, "float32")
        divisor_outer, scale_code, prepared, z, e = g_outer, s, s, s, s
        if SCHEME.block_nan and SCHEME.codes_from != "exact" and not OP.exact:
            e = floored(s, SCHEME.level)
    elif OP.source == "given":
        s, e, divisor_outer, z = loaded_scales(scale, zero, g_outer, block, exists, SCHEME)
        if SCHEME.codes_from == "exact":
            e = s
        scale_code, prepared = s, s
    else:
        divisor_outer = g_outer
        largest, low, high = _range(tile, inside, statistic, block, exists, stride, SCHEME, OP)
        e, s, scale_code, prepared, z = choose_scales(
            largest, low, high, g_outer, scale, zero, block, exists & first, stride, SCHEME, OP
        )
        if OP.saturation == "mask":
            store_saturation_mask(codes, low, high, s, z, prepared, block, exists & first, SCHEME)
    # After the range, which is taken of pairs: floats would wait for it in twice the registers.
    if SCHEME.zero != "" and not SCHEME.signs_nan:
        v = floats(later, SCHEME.has_ptx)
    else:
        v = widened(tile, SCHEME.signs_nan)
    # The sequences make values as default schemes do.
    VALUES: tl.constexpr = OP.output != "" and SCHEME.dequantize == "float32"
    if SCHEME.fast_path != "" and OP.source != "given" and (OP.codes or VALUES):
        _store_by_fast_path(
            codes, y, at, inside, block, exists, v, g_outer, s, scale_code, prepared, z, SCHEME, OP
        )
    elif SCHEME.fast_stochastic and OP.source != "given" and OP.codes:
        inv_scale = multiplier(s, scale_code, prepared, SCHEME)
        bits = read(random_bits + at, inside)
        store_stochastic(codes, at, inside, block, exists, v, inv_scale, bits, s, SCHEME, OP.packed)
    elif OP.codes or OP.output != "" or OP.gradient:
        general_tile(
            v,
            g,
            random_bits,
            codes,
            y,
            at,
            inside,
            block,
            exists,
            e,
            s,
            z,
            divisor_outer,
            g_outer,
            SCHEME,
            OP,
        )


@triton.jit
def loaded_scales(scale, zero, outer, block, exists, SCHEME: tl.constexpr):
    """(given scale, what elements are divided by, the same of the outer scale, zero point).

    Elements are divided by a scale that is raised to the floor, so that a scale of 0 makes no NaN.
    """
    s = loaded_scale(read(scale + block, exists), SCHEME.level)
    e, divisor_outer = s, outer
    if SCHEME.block_nan and not SCHEME.power_of_two:
        e = floored(s, SCHEME.level)
        if SCHEME.has_outer:
            divisor_outer = floored(outer, SCHEME.outer)
    z = s
    if SCHEME.zero != "":
        z = loaded_zero(read(zero + block, exists), SCHEME)
    return s, e, divisor_outer, z


@triton.jit
def general_tile(
    v, g, random_bits, codes, y, at, inside, block, exists, e, s, z, divisor_outer, outer, SCHEME: tl.constexpr,
    OP: tl.constexpr,
):  # fmt: skip
    """Codes, values or masked gradients by the rules of any record."""
    divisor = e if SCHEME.codes_from == "exact" or OP.source == "given" else s
    bits = None
    if SCHEME.rounding == "stochastic":
        bits = read(random_bits + at, inside)
    result = element_codes(v, divisor, divisor_outer, z, bits, SCHEME)
    if OP.packed:
        store_packed_of(codes, at, result, block, exists, SCHEME.bits)
    elif OP.codes:
        store_elements(codes + at, result.to(codes.dtype.element_ty), inside)
    if OP.gradient:
        dy = read(g + at, inside)
        lost = saturated(v, result, divisor, divisor_outer, SCHEME)
        tl.store(y + at, passed_on(dy, lost, SCHEME.dtype), mask=inside)
    elif OP.output != "":
        PRECISION: tl.constexpr = OP.output if SCHEME.dequantize == "target" else "float32"
        value = values(result, combined(s, outer, SCHEME, PRECISION), z, SCHEME, PRECISION)
        tl.store(y + at, narrow(value, OP.output, SCHEME.dequantize == "float32"), mask=inside)


@triton.jit
def load_outer(outer, outer_statistic, SCHEME: tl.constexpr, OP: tl.constexpr):
    """The scale over all elements, float32; 1 where there is none."""
    if not SCHEME.has_outer:
        return tl.full((), 1.0, tl.float32)
    elif OP.outer == "statistic":
        result = outer_scale(tl.load(outer_statistic), SCHEME)
        if tl.program_id(0) == 0:
            tl.store(outer, result)
        return result
    else:
        return loaded_scale(tl.load(outer), SCHEME.outer)


# Codes of 16-bit tiles that are read in pairs, each block or segment in one thread: 4-bit and 6-bit floats, 4-bit integers.


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
    result = words_of_strip(both, inv_scale, divisor, mask_unless_poisoned(s, -1), SCHEME, OP.packed)
    store_elements(codes.to(tl.pointer_type(tl.int32), bitcast=True) + words, result, None)


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
    """Packed 4-bit integers with zero points, of 16-bit floats, 32 of a block in each thread; see `sm90.integers`."""
    a, b = load_segments(x, block, SIZE, 0), load_segments(x, block, SIZE, 1)
    c, d = load_segments(x, block, SIZE, 2), load_segments(x, block, SIZE, 3)
    IS_BF16: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    largest, low, high = range_of_segments(a, b, c, d, IS_BF16, SIZE)
    _, s, _, inv_scale, z = choose_scales(
        largest, float_of(low), float_of(high), None, scale, zero, block, exists, stride, SCHEME, OP
    )
    store_segments(codes, a, b, c, d, inv_scale, s, z, block, IS_BF16, SIZE)


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


@triton.jit
def stochastic_codes(y, random_bits, E: tl.constexpr):
    """int32 codes of scaled elements y by the top 24 bits of random bits (uint32); sign kept, saturating."""
    M: tl.constexpr = E.mantissa
    LEAST: tl.constexpr = 2.0**E.emin
    UNIT: tl.constexpr = 2.0 ** (24 + M - E.emin)
    rest = (bits_of(y) & MAGNITUDE) - ((E.emin + 126) << 23)
    normal = (rest + (random_bits >> (9 + M)).to(tl.int32)) >> (23 - M)
    # Exact: what lies below the 24 bits is dropped, by the rule as by the conversion.
    fixed = (tl.minimum(tl.abs(y), LEAST) * UNIT).to(tl.int32)
    small = (fixed + (random_bits >> 8).to(tl.int32)) >> 24
    code = tl.minimum(tl.maximum(normal, small), E.max_code)
    return code | ((bits_of(y) >> (32 - E.bits)) & E.sign_mask)


@triton.jit
def store_stochastic(
    codes,
    at,
    inside,
    block,
    exists,
    v,
    inv_scale,
    random_bits,
    scale,
    SCHEME: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Codes of a tile under scales (P, 1), packed where the operation asks for it."""
    result = stochastic_codes(v * inv_scale, random_bits, SCHEME.element)
    result = tl.where(is_nan(scale), SCHEME.poison_code, result)
    if PACKED:
        store_packed(codes, result, block, exists, SCHEME.bits)
    else:
        tl.store(codes + at, bytes_of(result).to(tl.uint8, bitcast=True), mask=inside)
