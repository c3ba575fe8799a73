"""Integers with zero points: minima and maxima of 16-bit numbers in pairs, and what is made of a range once for a block.

Comparison instructions run at half the rate of float ones on Hopper, and in float32 a range takes two of them for every
element. In 16 bits one instruction compares two numbers. It keeps NaN, as 0x7fff, and puts -0 below +0, so a minimum is a
maximum of numbers with their signs flipped: what lanes exchange is one word, (maximum, -minimum).
"""

import struct

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, LARGEST, MAGNITUDE, bits_of, float_of, high_float, is_nan, low_float
from fast.kernels.fours import side_by_side
from fast.kernels.words import TO_INTEGER, corrected, divided, inverse, negated, quarters

# Words of a row that are compared before minimum and maximum share one: 16 numbers, as many as a lane has side by side.
GROUP = tl.constexpr(8)
# Elements of a block that `nibbles` has in a thread.
SEGMENT = tl.constexpr(32)
# 2**23 and four digits of 15.
TOP = tl.constexpr(8388608.0 + 65535.0)


@triton.jit
def smaller_bfloat16(a, b):
    """The smaller of both pairs; NaN if either is."""
    return tl.inline_asm_elementwise(
        "min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_bfloat16(a, b):
    """The larger of both pairs; NaN if either is."""
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def smaller_float16(a, b):
    """The same for float16."""
    return tl.inline_asm_elementwise(
        "min.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_float16(a, b):
    """The same for float16."""
    return tl.inline_asm_elementwise(
        "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def pairs_of(tile):
    """Neighbours of a tile (P, S) of 16-bit numbers as int32 (P, S / 2): the registers that they were loaded to."""
    low, high = tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))
    return tl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def crossed(smallest, largest):
    """(maximum of a pair, -minimum of a pair) as two words that one more maximum joins."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 n; xor.b32 n, $2, 0x80008000;
        prmt.b32 $0, $3, n, 0x5410; prmt.b32 $1, $3, n, 0x7632; }""",
        "=&r,=&r,r,r", [smallest, largest], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def range_of_pairs(below, above, BRAIN: tl.constexpr):
    """Patterns of the minimum and the maximum of each row, (P, 1); NaN where it has one.

    below, above: the row's pairs (P, W), those that do not exist infinite or, where the range is to hold it, zero.
    """
    ROWS: tl.constexpr = below.shape[0]
    SIDE: tl.constexpr = GROUP if below.shape[1] > GROUP else below.shape[1]
    SHAPE: tl.constexpr = (ROWS, below.shape[1] // SIDE, SIDE)
    if BRAIN:
        least = tl.reduce(tl.reshape(below, SHAPE), 2, smaller_bfloat16)
        most = tl.reduce(tl.reshape(above, SHAPE), 2, larger_bfloat16)
        first, second = crossed(least, most)
        word = tl.reduce(larger_bfloat16(first, second), 1, larger_bfloat16, keep_dims=True)
    else:
        least = tl.reduce(tl.reshape(below, SHAPE), 2, smaller_float16)
        most = tl.reduce(tl.reshape(above, SHAPE), 2, larger_float16)
        first, second = crossed(least, most)
        word = tl.reduce(larger_float16(first, second), 1, larger_float16, keep_dims=True)
    return bits_of(negated(high_float(word, BRAIN))), bits_of(low_float(word, BRAIN))


@triton.jit
def scale_of_range(largest, low, high, RULE: tl.constexpr):
    """(scale, multiplier of the elements, zero point) of blocks with these extremes, which need not hold zero yet.

    (high - low) / target, raised to the record's floor; 1 / scale; RULE.low - round(low / scale), each correctly rounded. Where
    the scale is brought to [1, 2) short divisions do. low / scale is at least -target, but for a rounding, so no zero point
    needs a limit. largest: pattern of the largest magnitude; NaN and infinity poison their block.
    """
    L: tl.constexpr = RULE.level
    bad = largest >= INFINITY
    below, above = tl.maximum(negated(low), 0.0), tl.maximum(high, 0.0)
    width = tl.minimum(above + below, float_of(tl.full((), LARGEST, tl.int32)))
    # Below 2**-126, where the product may be wrong, is the floor.
    scale = tl.maximum(corrected(width, L.target, L.inverse), float_of(tl.full((), L.floor, tl.int32)))
    scale = tl.where(bad, float("nan"), scale)
    unit = float_of((254 << 23) - (bits_of(scale) & INFINITY))
    mantissa = scale * unit
    inverse_mantissa = inverse(mantissa)
    steps = divided(below * unit, mantissa, inverse_mantissa)
    zero = bits_of(steps + TO_INTEGER) - (0x4B400000 - RULE.low)
    return scale, inverse_mantissa * unit, tl.where(bad, 0, zero)


def _nibbles() -> tl.constexpr:
    """Eight codes of the pairs $1 to $4 with the multiplier $5, the offset $6 and the sum's start $7; see `nibbles`."""
    text = ""
    for i in range(8):
        take = "shl.b32 t, ${}, 16;" if i % 2 == 0 else "and.b32 t, ${}, 0xFFFF0000;"
        weight = float(-(16 ** (i % 4 + 1)))
        into, start = ("l", "$7") if i < 4 else ("h", "$7")
        text += f"""{take.format(i // 2 + 1)} mov.b32 x, t; mul.rn.f32 x, x, $5; add.rn.f32 x, x, 0f4B400000;
        fma.rn.sat.f32 x, x, 0f3D800000, $6; fma.rn.sat.f32 x, x, 0fBF800000, 0f3F700000;
        fma.rn.f32 {into}, x, {_pattern(weight)}, {into if i % 4 else start}; """
    return tl.constexpr(
        f"""{{ .reg .b32 t, a, b; .reg .f32 x, l, h; {text}
        mov.b32 a, l; mov.b32 b, h; prmt.b32 t, a, b, 0x5410; xor.b32 $0, t, 0x88888888; }}"""
    )


def _pattern(value: float) -> str:
    """A float32 constant as PTX spells it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


NIBBLES = _nibbles()


@triton.jit
def load_segments(x, block, SIZE: tl.constexpr, PART: tl.constexpr):
    """Pairs of bfloat16 (int32) of a quarter of each segment of each block, (P * SIZE / SEGMENT, 4)."""
    COUNT: tl.constexpr = SIZE // SEGMENT
    segment = tl.reshape(block * COUNT + tl.arange(0, COUNT)[None, :], (block.shape[0] * COUNT, 1))
    at = segment * (SEGMENT // 2) + (4 * PART + tl.arange(0, 4)[None, :])
    return tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + at)


@triton.jit
def range_of_segments(a, b, c, d, SIZE: tl.constexpr):
    """(pattern of the largest magnitude, minimum, maximum) of blocks of bfloat16, (P, 1), of `load_segments`' parts."""
    COUNT: tl.constexpr = SIZE // SEGMENT
    least = smaller_bfloat16(smaller_bfloat16(a, b), smaller_bfloat16(c, d))
    most = larger_bfloat16(larger_bfloat16(a, b), larger_bfloat16(c, d))
    first, second = crossed(
        tl.reduce(least, 1, smaller_bfloat16, keep_dims=True), tl.reduce(most, 1, larger_bfloat16, keep_dims=True)
    )
    both = tl.reshape(larger_bfloat16(first, second), (a.shape[0] // COUNT, COUNT))
    both = tl.reduce(both, 1, larger_bfloat16, keep_dims=True)
    low, high = negated(high_float(both, True)), low_float(both, True)
    return tl.maximum(bits_of(low) & MAGNITUDE, bits_of(high) & MAGNITUDE), low, high


@triton.jit
def store_segments(codes, a, b, c, d, m, scale, zero, block, SIZE: tl.constexpr):
    """Packed 4-bit codes of blocks with these multipliers, scales and zero points, (P, 1)."""
    COUNT: tl.constexpr = SIZE // SEGMENT
    offset = zero.to(tl.float32) * 0.0625 + (8.0 - TO_INTEGER) * 0.0625
    top = tl.where(is_nan(scale), TOP + 34952.0, TOP)
    m, offset, top = _spread(m, COUNT), _spread(offset, COUNT), _spread(top, COUNT)
    words = side_by_side(
        side_by_side(_word(a, m, offset, top), _word(b, m, offset, top)),
        side_by_side(_word(c, m, offset, top), _word(d, m, offset, top)),
    )
    segment = tl.reshape(block * COUNT + tl.arange(0, COUNT)[None, :], (block.shape[0] * COUNT, 1))
    to = codes.to(tl.pointer_type(tl.int32), bitcast=True) + segment * 4 + tl.arange(0, 4)[None, :]
    tl.store(to, words)


@triton.jit
def _spread(v, COUNT: tl.constexpr):
    """A number of each block (P, 1) for each of its segments."""
    return tl.reshape(tl.broadcast_to(v, (v.shape[0], COUNT)), (v.shape[0] * COUNT, 1))


@triton.jit
def _word(pairs, m, offset, top):
    """Words of eight codes (S, 1) of pairs (S, 4).

    As `hot._in_range`, code by code, but what is left over 16 goes into a sum: top less the sum of (15 - n) * 16**i is the
    sum of n * 16**i, n from 0 on, above 2**23.
    """
    p, q, r, s = quarters(pairs)
    return tl.inline_asm_elementwise(
        NIBBLES, "=r,r,r,r,r,f,f,f", [p, q, r, s, m, offset, top], dtype=tl.int32, is_pure=True, pack=1
    )
