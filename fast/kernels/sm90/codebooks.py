"""Codebooks of 16 entries between -1 and 1: codes by a cubic and one comparison, values by a look-up.

Sixteen comparisons an element are more than there is time for. Here a cubic of y, rounded to an integer, gives a code that is
right or one too low; the midpoint above it, looked up, decides, compared exactly. A look-up is a shuffle: each lane of a warp
holds an entry of the table.

Stretched levels are one apart, as many below zero as above, and the code of one is a rounding. Level k of 2**B is k - (2**B -
1) / 2, so that midpoints are integers and x belongs to the code ceil(x) + 2**(B - 1) - 1: on a midpoint the lower of two
levels, as in every codebook of `reference`. Between the first and the last level a sum with 1.5 * 2**23 + 2**(B - 1) - 1,
rounded upwards, counts that code for every float32, subnormal ones too (rounded to nearest it would lose what separates a
small value from zero).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl

from fast.kernels.sm90.bit_tricks import TO_INTEGER, joined
from reference.formats.formats import Format

# 1.5 * 2**23 plus the cubic's value at 0, and its coefficients. `has_cubic` says for which codebooks they serve.
CENTER = 7
LINEAR, CUBIC = tl.constexpr(11.7291069), tl.constexpr(-4.26267259)
NUMBER = tl.constexpr(12582912.0 + CENTER)
# Differences of float32 values beyond 2**-8 are at least 2**-31: times this they saturate to 1.
SHARP = tl.constexpr(4294967296.0)
# More than the cubic moves between neighbours on a grid of `GRID` points, with a slope below 12, and float32 rounds away.
ERROR, GRID = 1e-3, 50_001


def has_cubic(fmt: Format, thresholds: Sequence[float] = ()) -> bool:
    """Whether the cubic serves: for y from -1 to 1, and a little beyond, its integer is the code or one below it.

    thresholds: the largest value of each code but the last, where that is not the midpoint.
    """
    if fmt.kind != "codebook" or fmt.bits != 4 or fmt.max > 1 or fmt.min < -1:
        return False
    values = fmt.values.astype(np.float64)
    middle = np.asarray(thresholds) if len(thresholds) else (values[1:] + values[:-1]) / 2
    if np.abs(middle).min() < 2.0**-8:
        return False
    y = np.linspace(-1 - 2.0**-20, 1 + 2.0**-20, GRID)
    result = CENTER + y * (LINEAR.value + CUBIC.value * y * y)
    code = np.searchsorted(middle, y)
    least, most = np.maximum(code - 1, 0), np.minimum(code, 14)
    return bool(np.all((result > least - 0.5 + ERROR) & (result < most + 0.5 - ERROR)))


@triton.jit
def _values(E: tl.constexpr):
    """The codebook, an entry in each lane."""
    lane = tl.arange(0, 1 << E.bits)
    result = tl.full((1 << E.bits,), E.values[0], tl.float32)
    for i in tl.static_range(1, len(E.values)):
        result = tl.where(lane == i, E.values[i], result)
    return result


@triton.jit
def _bounds(E: tl.constexpr):
    """-`SHARP` times the midpoint above each code."""
    lane = tl.arange(0, 1 << E.bits)
    result = tl.full((1 << E.bits,), E.thresholds[0] * -SHARP, tl.float32)
    for i in tl.static_range(1, len(E.thresholds)):
        result = tl.where(lane == i, E.thresholds[i] * -SHARP, result)
    return result


@triton.jit
def looked_up(numbers, index):
    """The entries of a table, a power of two of them, that the low bits of an int32 tensor say."""
    flat = tl.reshape(index & (numbers.numel - 1), (index.numel,))
    return tl.reshape(tl.gather(numbers, flat, 0), index.shape)


@triton.jit
def codebook_floats(y, E: tl.constexpr):
    """float32 values in whose patterns the low four bits are the codes of y: -1 to 1, or rounded a little beyond."""
    near = tl.fma(y, tl.fma(y * y, CUBIC, LINEAR), NUMBER)
    bound = looked_up(_bounds(E), near.to(tl.int32, bitcast=True))
    return tl.inline_asm_elementwise(
        "{ .reg .f32 s; fma.rn.sat.f32 s, $1, 0f4F800000, $3; add.rn.f32 $0, $2, s; }",
        "=f,f,f,f", [y, near, bound], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def codebook_values(code, E: tl.constexpr):
    """float32 of int32 codes, whatever lies above their bits."""
    return looked_up(_values(E), code)


@triton.jit
def codebook_word_values(words, E: tl.constexpr):
    """float32 (P, 8 S) of words of eight codes (P, S)."""
    code = joined(
        words, words >> 4, words >> 8, words >> 12, words >> 16, words >> 20, words >> 24, words >> 28
    )
    return codebook_values(code, E)


def is_stretched(fmt: Format) -> bool:
    """Whether the codebook's levels are 2 to 128 halves of odd integers, one apart, around zero."""
    levels = (1 << fmt.bits) if fmt.kind == "codebook" and fmt.bits < 8 else 0
    return levels > 1 and np.array_equal(fmt.values, np.arange(levels) - (levels - 1) / 2)


@triton.jit
def stretched_floats(y, E: tl.constexpr):
    """1.5 * 2**23 plus the codes of y, float32; 0 for NaN."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 c; max.f32 c, $1, $2; min.f32 c, c, $3; add.rp.f32 $0, c, $4; }",
        "=f,f,f,f,f", [y, -E.max_value, E.max_value, TO_INTEGER + (E.max_value - 0.5)],
        dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def stretched_values(numbers, E: tl.constexpr):
    """The levels of such floats."""
    return (numbers - TO_INTEGER) - E.max_value
