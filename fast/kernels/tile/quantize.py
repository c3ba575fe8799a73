"""Scales and codes of a tile, and what else an operation writes of it: values, masked gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import bits_of, float_of, narrow, order_key, read, widened
from fast.kernels.rules.scaled import element_codes
from fast.kernels.rules.scales import floored, loaded_scale, outer_scale
from fast.kernels.rules.second_level import double_scale
from fast.kernels.rules.statistics import block_absmax, bound, value_range
from fast.kernels.rules.values import combined, loaded_zero, passed_on, saturated, values
from fast.kernels.sm90.bf16x2 import floats, set_aside
from fast.kernels.sm90.division import reciprocal_rn
from fast.kernels.tile.block_scales import choose_scales
from fast.kernels.tile.fast_codes import multiplier, store_codes
from fast.kernels.tile.fast_values import finished, rounded_values
from fast.kernels.tile.saturation import store_saturation_mask
from fast.kernels.tile.stochastic_rounding import store_stochastic
from fast.kernels.tile.strips import store_elements, store_packed_of


@triton.jit
def _range(tile, inside, statistic, block, exists, stride, SCHEME: tl.constexpr, OP: tl.constexpr):
    """(pattern of the largest magnitude, minimum, maximum) of each block."""
    MINMAX: tl.constexpr = SCHEME.level.statistic != "absmax"
    if OP.source == "statistic":
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
    made = tl.max(tl.reshape(beyond, (beyond.numel,)), axis=0) <= S.span
    if SCHEME.has_outer:
        made = made & ((bits_of(outer) - S.outer_least).to(tl.uint32, bitcast=True) <= S.outer_span)
    return made


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
        if SCHEME.house and SCHEME.codes_from != "exact" and not OP.exact:
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
    if SCHEME.house and not SCHEME.power_of_two:
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
    made = element_codes(v, divisor, divisor_outer, z, bits, SCHEME)
    if OP.packed:
        store_packed_of(codes, at, made, block, exists, SCHEME.bits)
    elif OP.codes:
        store_elements(codes + at, made.to(codes.dtype.element_ty), inside)
    if OP.gradient:
        dy = read(g + at, inside)
        lost = saturated(v, made, divisor, divisor_outer, SCHEME)
        tl.store(y + at, passed_on(dy, lost, SCHEME.dtype), mask=inside)
    elif OP.output != "":
        PRECISION: tl.constexpr = OP.output if SCHEME.dequantize == "target" else "float32"
        value = values(made, combined(s, outer, SCHEME, PRECISION), z, SCHEME, PRECISION)
        tl.store(y + at, narrow(value, OP.output, SCHEME.dequantize == "float32"), mask=inside)


@triton.jit
def load_outer(outer, outer_statistic, SCHEME: tl.constexpr, OP: tl.constexpr):
    """The scale over all elements, float32; 1 where there is none."""
    if not SCHEME.has_outer:
        return tl.full((), 1.0, tl.float32)
    elif OP.outer == "statistic":
        made = outer_scale(tl.load(outer_statistic), SCHEME)
        if tl.program_id(0) == 0:
            tl.store(outer, made)
        return made
    else:
        return loaded_scale(tl.load(outer), SCHEME.outer)
