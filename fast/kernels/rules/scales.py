"""Scales and zero points from a block's statistic: `reference.quantize.scales` and `reference.quantize.scales` as
device functions.

Statistics come as patterns of magnitudes and as float32 minima and maxima, shape (blocks, 1); scales leave as float32, NaN
canonical, beside the code or value that is stored. `L` is a `Level`, `SCHEME` a `SchemeConstants`.

Scales that are quantized themselves, about their mean and in groups, are `reference.quantize.scales.second_level`. The mean is
a tree of averages of neighbours. Programs leave the averages of aligned parts of it, as many passes as it takes, and the last
pass, whose programs quantize the groups, goes on from there: each makes the same mean of the same few averages.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.bits import (
    INFINITY,
    LARGEST,
    MAGNITUDE,
    MANTISSA,
    NAN,
    bits_of,
    canonical,
    float_of,
    is_nan,
    normalized,
    read,
    rounded,
)
from fast.kernels.rules.elements import decode, e4m3_value, encode, nearest_integer, nonnegative_code
from fast.kernels.rules.statistics import MOST_LEVELS, absmax
from fast.kernels.sm90.bit_tricks import quotient, round_to_dtype


@triton.jit
def raised(v, KIND: tl.constexpr, L: tl.constexpr):
    """max(v, floor) for non-negative v where the record floors at this place; NaN stays: its pattern is the largest."""
    if L.floor_kind == KIND:
        v = float_of(tl.maximum(bits_of(v), L.floor))
    return v


@triton.jit
def floored(v, L: tl.constexpr):
    """The floor on stored scales."""
    if L.floor_kind == "zero":
        v = float_of(tl.where(bits_of(v) == 0, L.floor, bits_of(v)))
    return raised(v, "stored", L)


@triton.jit
def power_scale(largest, L: tl.constexpr, POISON_INFINITY: tl.constexpr):
    """The e8m0 code of a pattern of the largest magnitude."""
    if L.simple_power:
        # Added bits carry into the exponent field where the rule rounds up. Zero and subnormal maxima end at 0.
        code = tl.maximum(((largest + L.carry) >> 23) - L.target_exponent, 0)
        if L.target_exponent == 0:
            code = tl.minimum(code, 254)
    else:
        code = _general_power(largest, L)
    if POISON_INFINITY:
        return tl.where(largest >= INFINITY, 255, code)
    else:
        # Infinity counts as 2**128: its exponent field says so.
        return tl.where(largest > INFINITY, 255, code)


@triton.jit
def _general_power(largest, L: tl.constexpr):
    """The code of a maximum by its exponent, subnormal ones normalised."""
    if L.rule == "rceil_log2":
        ratio = bits_of(tl.div_rn(float_of(largest), L.target)) & MAGNITUDE
        exponent, significand = normalized(ratio)
        exponent = tl.where(largest == INFINITY, 127, exponent + _above(exponent, significand & MANTISSA, L))
    else:
        exponent, significand = normalized(largest)
        if L.rule == "even":
            exponent, significand = normalized(tl.minimum(largest + L.even_carry, INFINITY))
        if L.rule == "ceil":
            exponent += ((significand & MANTISSA) > 0).to(tl.int32)
        elif L.rule == "rceil":
            exponent += ((significand & MANTISSA) > L.target_fraction).to(tl.int32)
        exponent -= L.target_exponent
    code = tl.minimum(tl.maximum(exponent + 127, 0), 254)
    return tl.where(largest == 0, 0, code)


@triton.jit
def power_value(code):
    """float32 of an e8m0 code."""
    b = tl.where(code == 0, 0x00400000, code << 23)
    return float_of(tl.where(code == 255, NAN, b))


@triton.jit
def _above(exponent, fraction, L: tl.constexpr):
    """1 where the float32 logarithm lies above its integer (`reference.arrays.softfloat`)."""
    return (fraction > _steps(tl.maximum(exponent, -149), L)).to(tl.int32)


@triton.jit
def _steps(exponent, L: tl.constexpr):
    steps = tl.zeros_like(exponent) + L.steps[0][1]
    for i in tl.static_range(1, len(L.steps)):
        steps = tl.where(exponent >= L.steps[i][0], L.steps[i][1], steps)
    return steps


@triton.jit
def _floor_power(v, L: tl.constexpr):
    """2**floor(log2(v)) with the logarithm rounded to float32; 0, infinity and NaN pass."""
    b = bits_of(v)
    exponent, significand = normalized(b)
    near = (0x1000000 - significand) <= _steps(exponent + 1, L)
    exponent += near.to(tl.int32)
    subnormal = 1 << tl.minimum(tl.maximum(exponent + 149, 0), 22)
    power = tl.where(exponent < -126, subnormal, (tl.maximum(exponent, -127) + 127) << 23)
    return float_of(tl.where((b == 0) | (b >= INFINITY), b, power))


@triton.jit
def ratio(largest, low, high, L: tl.constexpr, BLOCK_NAN: tl.constexpr):
    """The scale before it is rounded for storage, without any outer scale."""
    statistic = _statistic(largest, low, high, L, BLOCK_NAN)
    statistic = raised(statistic, "statistic", L)
    if L.statistic == "minmax_split":
        result = statistic
    elif L.target == 1.0 and L.stored == "decode":
        # A statistic that is an element, or was rounded as one, is its own quotient.
        result = rounded(statistic, L.compute)
    elif L.quick:
        result = round_to_dtype(quotient(statistic, L.target, L.target_reciprocal), L.compute)
    elif L.stored == "encode":
        result = _encoding(statistic, L)
    else:
        result = rounded(tl.div_rn(statistic, L.target), L.compute)
    result = _to_power(result, L)
    if L.ordinary:
        return result
    elif BLOCK_NAN:
        return float_of(tl.where(largest >= INFINITY, NAN, bits_of(result)))
    else:
        return float_of(tl.where(largest > INFINITY, NAN, bits_of(result)))


@triton.jit
def _encoding(statistic, L: tl.constexpr):
    """target / statistic, in one rounding or as target * (1 / statistic)."""
    if L.by_reciprocal:
        reciprocal_rn = rounded(tl.div_rn(1.0, statistic), L.compute)
        result = rounded(reciprocal_rn * L.target, L.compute)
    else:
        result = rounded(tl.div_rn(L.target, statistic), L.compute)
    if L.floor_quotient is not None:
        # That quotient is rounded once from the exact decimal floor.
        result = float_of(tl.where(bits_of(statistic) == L.floor, L.floor_quotient, bits_of(result)))
    return result


@triton.jit
def _statistic(largest, low, high, L: tl.constexpr, BLOCK_NAN: tl.constexpr):
    if L.statistic == "absmax" or L.statistic == "absmax_elements":
        return float_of(largest)
    elif L.statistic == "minmax_split" and L.ordinary:
        # The smallest integer is a power of two; low <= 0 <= high.
        a = round_to_dtype(low * (1.0 / L.element_min), L.compute)
        return tl.maximum(
            tl.abs(a), round_to_dtype(quotient(tl.abs(high), L.target, L.target_reciprocal), L.compute)
        )
    elif L.statistic == "minmax_split":
        a = bits_of(canonical(rounded(tl.div_rn(low, L.element_min), L.compute))) & MAGNITUDE
        b = bits_of(canonical(rounded(tl.div_rn(high, L.target), L.compute))) & MAGNITUDE
        return float_of(tl.maximum(a, b))
    elif L.ordinary:
        return round_to_dtype(high - low, L.compute)
    else:
        width = canonical(rounded(high - low, L.compute))
        if BLOCK_NAN:
            width = finite(width)
        return width


@triton.jit
def finite(v):
    """+infinity as the largest float32."""
    return float_of(tl.where(bits_of(v) == INFINITY, LARGEST, bits_of(v)))


@triton.jit
def _to_power(v, L: tl.constexpr):
    if L.rule == "ratio_pow2":
        b = bits_of(v)
        if L.stored == "encode":
            up = b
        else:
            up = b + MANTISSA
        v = float_of(tl.where(b < INFINITY, up & INFINITY, b))
    elif L.rule == "ratio_pow2_log2":
        v = _floor_power(v, L)
    return v


@triton.jit
def outer_scale(largest, SCHEME: tl.constexpr):
    """The scale over all elements, from the pattern of their largest magnitude."""
    L: tl.constexpr = SCHEME.outer
    b = bits_of(canonical(ratio(largest, None, None, L, SCHEME.block_nan)))
    if L.nonfinite is not None:
        b = tl.where(b >= INFINITY, L.nonfinite, b)
    if L.stored == "encode":
        b = tl.where(b == INFINITY, LARGEST, b)
    return floored(float_of(b), L)


@triton.jit
def exact_scale(largest, low, high, outer, SCHEME: tl.constexpr):
    """The block scale before storage rounding, relative to the outer scale if there is one; NaN canonical."""
    L: tl.constexpr = SCHEME.level
    if not SCHEME.has_outer:
        return canonical(ratio(largest, low, high, L, SCHEME.block_nan))
    elif SCHEME.outer_order == "folded":
        multiplier = rounded(outer * L.one_over_target, L.compute)
        return finite(canonical(rounded(float_of(largest) * multiplier, L.compute)))
    elif SCHEME.outer_order == "encode":
        return canonical(outer * ratio(largest, low, high, L, SCHEME.block_nan))
    else:
        result = ratio(largest, low, high, L, SCHEME.block_nan)
        return canonical(tl.div_rn(result, outer))


@triton.jit
def stored_scale(exact, L: tl.constexpr):
    """(code in storage, the scale it stands for): rounded to the storage format, raised to the record's floor."""
    v = raised(exact, "scale", L)
    if L.ordinary and L.storage == "float32":
        v = floored(v, L)
        return v, v
    elif L.ordinary and L.in_dtype:
        v = floored(v, L)
        return in_storage(v, L), v
    elif L.storage == "float32":
        v = canonical(floored(v, L))
        return v, v
    elif L.floor_kind == "zero":
        code = encode(v, None, L.storage_element)
        v = floored(canonical(decode(code, L.storage_element)), L)
        return encode(v, None, L.storage_element), v
    elif L.storage == "e4m3" and L.floor_kind == "stored":
        # A given outer scale may be negative: what is below zero is below the floor.
        v = nonnegative(v)
        code = tl.where(is_nan(v), 127, tl.maximum(nonnegative_code(v, L.storage_element), L.floor_code))
        return code, canonical(e4m3_value(code))
    else:
        code = encode(v, None, L.storage_element)
        if L.floor_kind == "stored":
            # Codes of non-negative values order as the values do, NaN last.
            code = tl.maximum(code, L.floor_code)
        return code, canonical(decode(code, L.storage_element))


@triton.jit
def in_storage(v, L: tl.constexpr):
    """The 16-bit code of a scale that has been rounded to its storage format."""
    if L.compute == "bfloat16":
        return bits_of(v) >> 16
    else:
        return v.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def nonnegative(v):
    """v, +0 where it has a minus sign; NaN canonical."""
    return float_of(tl.maximum(bits_of(canonical(v)), 0))


@triton.jit
def loaded_scale(stored, L: tl.constexpr):
    """float32 of a stored scale."""
    if L.storage == "float32":
        return canonical(stored)
    else:
        return canonical(decode(stored.to(tl.int32), L.storage_element))


@triton.jit
def zero_point(low, exact, SCHEME: tl.constexpr):
    """The zero point: int32 codes, or a float32 rounded to its storage."""
    L: tl.constexpr = SCHEME.level
    scale = raised(raised(exact, "scale", L), "stored", L)
    if SCHEME.zero == "value" and SCHEME.on_ordinary:
        return round_to_dtype(low + round_to_dtype(scale * SCHEME.middle, L.compute), SCHEME.zero_storage)
    elif SCHEME.zero == "value":
        result = rounded(low + rounded(scale * SCHEME.middle, L.compute), L.compute)
        return canonical(rounded(result, SCHEME.zero_storage))
    else:
        steps = rounded(tl.div_rn(low, scale), L.compute)
        code = tl.minimum(tl.maximum(SCHEME.low - nearest_integer(steps), SCHEME.low), SCHEME.high)
        return tl.where(is_nan(steps), 0, code)


@triton.jit
def averages(v, HAS_PTX: tl.constexpr):
    """Rows of (P, S), S a power of two, averaged to (P, 1): neighbours first, as `reference.quantize.scales.mean`."""
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
    if SCHEME.block_nan:
        v = tl.where((bits_of(v) & MAGNITUDE) < INFINITY, v, 0.0)
    return v


@triton.jit
def leave_averages(scales, averaged, at, inside, part, exists, SCHEME: tl.constexpr):
    """The averages of parts of the scales, or of averages before them; what lies beyond the last scale is 0."""
    result = averages(averaged_scales(read(scales + at, inside), SCHEME), SCHEME.has_ptx)
    tl.store(averaged + part, result, mask=exists)


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
    result = canonical(
        ratio(absmax(shifted, SCHEME.block_nan, SCHEME.has_ptx), None, None, L, SCHEME.block_nan)
    )
    tl.store(outer + group, result, mask=exists)
    scale_code = _codes(rounded(shifted * result, L.compute), SCHEME.level.storage_element)
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
    result = rounded(tl.div_rn(decode(code, SCHEME.level.storage_element), divisor), DTYPE)
    result = canonical(rounded(result + canonical(tl.load(center)), DTYPE))
    if SCHEME.dequantize == "float32":
        # A scale that was rounded up may lie beyond the largest float32.
        result = finite(result)
    return result


# Where scales of a matrix lie: row by row, or in the tiles of 128 rows by 4 columns of `reference.quantize.stored`.


@triton.jit
def scale_place(row, block, blocks, TILED: tl.constexpr):
    """Index of the scale of a block of a row, of `blocks` in each row."""
    if TILED:
        tile = (row >> 7) * ((blocks + 3) >> 2) + (block >> 2)
        return tile * 512 + (row & 31) * 16 + ((row >> 5) & 3) * 4 + (block & 3)
    else:
        return row * blocks + block
