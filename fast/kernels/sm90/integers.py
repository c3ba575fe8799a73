"""Packed integers of 2 to 7 bits in groups of 32: as many words as a code has bits, made of quads, integers of four codes.

The words of a group lie in one thread after they are made. Stored from there, a warp's would lie as many words apart as a code
has bits, and every 32-byte sector would be written in that many parts. So the words of a group, filled up to a power of two,
are stored as a tile in which neighbouring lanes have neighbouring words, and lanes beyond the group store nothing.

A thread loads all 32 elements of a group: then nothing else changes places, and few threads choose the scale of a block.

Integers with zero points take minima and maxima of 16-bit floats in pairs. Comparison instructions run at half the rate of
float ones on Hopper, and in float32 a range takes two of them for every element. In 16 bits one instruction compares two
elements. It keeps NaN, as 0x7fff, and puts -0 below +0, so a minimum is a maximum of elements with their signs flipped: what
lanes exchange is one word, (maximum, -minimum).
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from fast.kernels.bits import INFINITY, LARGEST, MAGNITUDE, bits_of, float_of, high_float, is_nan, low_float
from fast.kernels.sm90.bit_tricks import (
    TO_INTEGER,
    combined_digits,
    divided,
    joined,
    joined2,
    joined4,
    negative_by_product,
    quarters,
    quotient,
    reciprocal_rn,
    round_to_dtype,
)
from fast.kernels.sm90.fp4_fp6 import side_by_side

# Pairs of a row that a lane has side by side where 8-bit codes are stored 16 at a time.
GROUP = tl.constexpr(8)
# Elements of a block that a thread has where codes are packed: 16 bytes of them.
SEGMENT = tl.constexpr(32)
# 2**23 and four digits of 15.
TOP = tl.constexpr(8388608.0 + 65535.0)


def _of_pairs(name: str) -> tuple[tl.constexpr, tl.constexpr]:
    """An instruction for pairs of bfloat16 and of float16."""
    return tl.constexpr(f"{name}.bf16x2 $0, $1, $2;"), tl.constexpr(f"{name}.f16x2 $0, $1, $2;")


SMALLER_BFLOAT16, SMALLER_FLOAT16 = _of_pairs("min.NaN")
LARGER_BFLOAT16, LARGER_FLOAT16 = _of_pairs("max.NaN")


@triton.jit
def smaller_bfloat16(a, b):
    """The smaller elements of two pairs; NaN if either is."""
    return tl.inline_asm_elementwise(SMALLER_BFLOAT16, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def smaller_float16(a, b):
    """The same for float16."""
    return tl.inline_asm_elementwise(SMALLER_FLOAT16, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def larger_bfloat16(a, b):
    """The larger elements of two pairs; NaN if either is."""
    return tl.inline_asm_elementwise(LARGER_BFLOAT16, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def larger_float16(a, b):
    """The same for float16."""
    return tl.inline_asm_elementwise(LARGER_FLOAT16, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def pairs_of(tile):
    """Neighbours of a tile (P, S) of 16-bit floats as int32 (P, S / 2): the registers that they were loaded to."""
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
def range_of_pairs(below, above, IS_BF16: tl.constexpr, SIDE: tl.constexpr):
    """Patterns of the largest magnitude, the minimum and the maximum of each row, (P, 1); all are NaN where it has one.

    below, above: the row's pairs (P, W), with 0 or an infinity where none is. SIDE: how many a lane has side by side.
    """
    ROWS: tl.constexpr = below.shape[0]
    COUNT: tl.constexpr = below.shape[1] // SIDE
    below, above = tl.reshape(below, (ROWS, COUNT, SIDE)), tl.reshape(above, (ROWS, COUNT, SIDE))
    if IS_BF16:
        least, most = tl.reduce(below, 2, smaller_bfloat16), tl.reduce(above, 2, larger_bfloat16)
        first, second = crossed(least, most)
        word = tl.reduce(larger_bfloat16(first, second), 1, larger_bfloat16, keep_dims=True)
    else:
        least, most = tl.reduce(below, 2, smaller_float16), tl.reduce(above, 2, larger_float16)
        first, second = crossed(least, most)
        word = tl.reduce(larger_float16(first, second), 1, larger_float16, keep_dims=True)
    low, high = bits_of(negative_by_product(high_float(word, IS_BF16))), bits_of(low_float(word, IS_BF16))
    return tl.maximum(low & MAGNITUDE, high & MAGNITUDE), low, high


@triton.jit
def range_of_tile(below, above):
    """The same of tiles of 16-bit floats, (P, S), that differ in elements that do not exist."""
    SIDE: tl.constexpr = GROUP if below.shape[1] >= 2 * GROUP else below.shape[1] // 2
    return range_of_pairs(pairs_of(below), pairs_of(above), below.dtype == tl.bfloat16, SIDE)


@triton.jit
def scale_of_range(largest, low, high, SCHEME: tl.constexpr):
    """(scale, multiplier of the elements, zero point) of blocks with these extremes, which need not hold zero yet.

    (high - low) / target, raised to the record's floor; 1 / scale; SCHEME.low - round(low / scale),
    each correctly rounded. Where
    the scale is brought to [1, 2) short divisions do. low / scale is at least -target, but for a rounding, so no zero point
    needs a limit. largest: pattern of the largest magnitude; NaN and infinity poison their block.
    """
    L: tl.constexpr = SCHEME.level
    bad = largest >= INFINITY
    below, above = tl.maximum(negative_by_product(low), 0.0), tl.maximum(high, 0.0)
    width = round_to_dtype(tl.minimum(above + below, float_of(tl.full((), LARGEST, tl.int32))), L.compute)
    # Below 2**-126, where the product may be wrong, is the floor.
    ratio = round_to_dtype(quotient(width, L.target, L.target_reciprocal), L.compute)
    scale = tl.maximum(ratio, float_of(tl.full((), L.floor, tl.int32)))
    if not SCHEME.on_ordinary:
        scale = tl.where(bad, float("nan"), scale)
    unit = float_of((254 << 23) - (bits_of(scale) & INFINITY))
    mantissa = scale * unit
    inverse_mantissa = reciprocal_rn(mantissa)
    steps = round_to_dtype(divided(below * unit, mantissa, inverse_mantissa), L.compute)
    zero = bits_of(steps + TO_INTEGER) - (0x4B400000 - SCHEME.low)
    if SCHEME.on_ordinary:
        # A scale that was rounded down may leave more steps than there are codes.
        return (
            scale,
            round_to_dtype(inverse_mantissa * unit, SCHEME.arithmetic),
            tl.minimum(zero, SCHEME.high),
        )
    else:
        return scale, inverse_mantissa * unit, tl.where(bad, 0, zero)


def _nibbles(low: str, high: str) -> tl.constexpr:
    """Eight codes of the pairs $1 to $4 with the multiplier $5, the offset $6 and the top $7; see `_word`.

    low, high: x of pair $`at`.
    """
    text = ""
    for i in range(8):
        take, into = (low, high)[i % 2].format(at=i // 2 + 1), "lh"[i // 4]
        # -16**(i + 1) as a pattern of float32.
        weight = 0xBF800000 + (4 * (i % 4 + 1) << 23)
        text += f"""{take} mul.rn.f32 x, x, $5; add.rn.f32 x, x, 0f4B400000;
        fma.rn.sat.f32 x, x, 0f3D800000, $6; fma.rn.sat.f32 x, x, 0fBF800000, 0f3F700000;
        fma.rn.f32 {into}, x, 0f{weight:08X}, {into if i % 4 else "$7"}; """
    return tl.constexpr(
        f"""{{ .reg .b16 p, q; .reg .b32 t, a; .reg .f32 x, l, h; {text}
        mov.b32 t, l; mov.b32 a, h; prmt.b32 t, t, a, 0x5410; xor.b32 $0, t, 0x88888888; }}"""
    )


NIBBLES_BFLOAT16 = _nibbles(
    "shl.b32 t, ${at}, 16; mov.b32 x, t;", "and.b32 t, ${at}, 0xFFFF0000; mov.b32 x, t;"
)
NIBBLES_FLOAT16 = _nibbles(
    "mov.b32 {{p, q}}, ${at}; cvt.f32.f16 x, p;", "mov.b32 {{p, q}}, ${at}; cvt.f32.f16 x, q;"
)


@triton.jit
def _segments(block, SIZE: tl.constexpr):
    """Indices of the segments of blocks, (P * SIZE / SEGMENT, 1)."""
    COUNT: tl.constexpr = SIZE // SEGMENT
    return tl.reshape(block * COUNT + tl.arange(0, COUNT)[None, :], (block.shape[0] * COUNT, 1))


@triton.jit
def load_segments(x, block, SIZE: tl.constexpr, PART: tl.constexpr):
    """Pairs (int32) of a quarter of each segment of each block, (P * SIZE / SEGMENT, 4)."""
    at = _segments(block, SIZE) * (SEGMENT // 2) + (4 * PART + tl.arange(0, 4)[None, :])
    return tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + at)


@triton.jit
def range_of_segments(a, b, c, d, IS_BF16: tl.constexpr, SIZE: tl.constexpr):
    """`range_of_pairs` of blocks, of the four parts of their segments."""
    if IS_BF16:
        least = smaller_bfloat16(smaller_bfloat16(a, b), smaller_bfloat16(c, d))
        most = larger_bfloat16(larger_bfloat16(a, b), larger_bfloat16(c, d))
    else:
        least = smaller_float16(smaller_float16(a, b), smaller_float16(c, d))
        most = larger_float16(larger_float16(a, b), larger_float16(c, d))
    COUNT: tl.constexpr = SIZE // SEGMENT
    SHAPE: tl.constexpr = (a.shape[0] // COUNT, 4 * COUNT)
    return range_of_pairs(tl.reshape(least, SHAPE), tl.reshape(most, SHAPE), IS_BF16, 4)


@triton.jit
def store_segments(
    codes, a, b, c, d, inv_scale, scale, zero, block, IS_BF16: tl.constexpr, SIZE: tl.constexpr
):
    """Packed 4-bit codes of blocks with these multipliers, scales and zero points, (P, 1)."""
    offset = zero.to(tl.float32) * 0.0625 + (8.0 - TO_INTEGER) * 0.0625
    top = tl.where(is_nan(scale), TOP + 0x8888, TOP)
    inv_scale, offset, top = _spread(inv_scale, SIZE), _spread(offset, SIZE), _spread(top, SIZE)
    words = side_by_side(
        side_by_side(
            _asymmetric_word(a, inv_scale, offset, top, IS_BF16),
            _asymmetric_word(b, inv_scale, offset, top, IS_BF16),
        ),
        side_by_side(
            _asymmetric_word(c, inv_scale, offset, top, IS_BF16),
            _asymmetric_word(d, inv_scale, offset, top, IS_BF16),
        ),
    )
    at = _segments(block, SIZE) * 4 + tl.arange(0, 4)[None, :]
    tl.store(codes.to(tl.pointer_type(tl.int32), bitcast=True) + at, words)


@triton.jit
def _spread(v, SIZE: tl.constexpr):
    """A value of each block (P, 1) for each of its segments."""
    COUNT: tl.constexpr = SIZE // SEGMENT
    return tl.reshape(tl.broadcast_to(v, (v.shape[0], COUNT)), (v.shape[0] * COUNT, 1))


@triton.jit
def _asymmetric_word(pairs, inv_scale, offset, top, IS_BF16: tl.constexpr):
    """Words of eight codes (S, 1) of pairs (S, 4).

    Codes come from the adder as in `fast_codes`, the last step of which puts them into a sum: the top 2**23 + 15 * 0x1111 less
    the sum of (15 - n) * 16**i is 2**23 and four digits n, which count from 0. In poisoned blocks every n is 0, and the top 8
    * 0x1111 higher: codes of 0.
    """
    p, q, r, s = quarters(pairs)
    return tl.inline_asm_elementwise(
        NIBBLES_BFLOAT16 if IS_BF16 else NIBBLES_FLOAT16, "=r,r,r,r,r,f,f,f", [p, q, r, s, inv_scale, offset, top],
        dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def integer_quads(numbers, keep, BITS: tl.constexpr, SIGNED: tl.constexpr):
    """Patterns of n + 1.5 * 2**23 with n of 2 to 7 bits (int32, (P, S)) as quads (P, S / 4), and-ed with keep (P, 1)."""
    ONES: tl.constexpr = ((1 << (4 * BITS)) - 1) // ((1 << BITS) - 1)
    # Signed digits are added up with an offset, which turns one bit of each.
    BIAS: tl.constexpr = (1 << (BITS - 1)) * ONES if SIGNED else 0
    # What the patterns of 1.5 * 2**23 add up to, modulo 2**32, as a signed integer.
    PATTERNS: tl.constexpr = (0x4B400000 * ONES + (1 << 31)) % (1 << 32) - (1 << 31)
    return ((combined_digits(numbers, BITS, 4) + (BIAS - PATTERNS)) ^ BIAS) & _fours(keep, numbers)


@triton.jit
def _fours(of_blocks, numbers):
    """What belongs to a block, for each four of its elements, where `combined_digits` leaves their sum; no instruction."""
    every = tl.broadcast_to(of_blocks, numbers.shape)
    return tl.max(tl.reshape(every, (numbers.shape[0], numbers.shape[1] // 4, 4)), axis=2)


@triton.jit
def word_of(parts, K: tl.constexpr, WIDTH: tl.constexpr):
    """Word K of a stream of non-negative int32 parts of WIDTH bits each, the first one in the low bits."""
    FIRST: tl.constexpr = 32 * K // WIDTH
    word = parts[FIRST] >> (32 * K - WIDTH * FIRST)
    for i in tl.static_range(FIRST + 1, (32 * K + 31) // WIDTH + 1):
        word |= parts[i] << (WIDTH * i - 32 * K)
    return word


@triton.jit
def _words(parts, BITS: tl.constexpr):
    """Eight quads (P, G) as words (P, G, 2, 4 or 8), of which the first BITS count."""
    a, b, c, d = _word(parts, 0, BITS), _word(parts, 1, BITS), _word(parts, 2, BITS), _word(parts, 3, BITS)
    if BITS == 2:
        words = joined2(a, b)
    elif BITS == 3:
        words = joined4(a, b, c, d)
    else:
        e, f = _word(parts, 4, BITS), _word(parts, 5, BITS)
        g, h = _word(parts, 6, BITS), _word(parts, 7, BITS)
        words = joined(a, b, c, d, e, f, g, h)
    return tl.reshape(words, (a.shape[0], a.shape[1], words.shape[1] // a.shape[1]))


@triton.jit
def _word(parts, K: tl.constexpr, BITS: tl.constexpr):
    """Word K of quads; beyond the last word, the last."""
    return word_of(parts, K if K < BITS else BITS - 1, 4 * BITS)


@triton.jit
def load_groups(x, block, SIZE: tl.constexpr):
    """Elements (P, SIZE) of whole blocks, 32 neighbours a thread, read 8 at a time."""
    a, b = _run(x, block, SIZE, 0), _run(x, block, SIZE, 1)
    c, d = _run(x, block, SIZE, 2), _run(x, block, SIZE, 3)
    return tl.reshape(tl.permute(_after(_after(a, b), _after(c, d)), (1, 0, 2)), (block.shape[0], SIZE))


@triton.jit
def _places(block, COUNT: tl.constexpr):
    """Indices of the COUNT groups of blocks (P, 1), as (COUNT, P, 1): of axes that are not contiguous lanes take the first."""
    return (tl.reshape(block, (1, block.shape[0])) * COUNT + tl.arange(0, COUNT)[:, None])[:, :, None]


@triton.jit
def _run(x, block, SIZE: tl.constexpr, K: tl.constexpr):
    """Run K of each 32 neighbours: (SIZE / 32, P, 8)."""
    return tl.load(x + 32 * _places(block, SIZE // 32) + (8 * K + tl.arange(0, 8))[None, None, :])


@triton.jit
def _after(a, b):
    """(G, P, S) twice as (G, P, 2 S), a first."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 1, 3, 2)), (a.shape[0], a.shape[1], 2 * a.shape[2]))


@triton.jit
def store_groups(out, words, block, exists, BITS: tl.constexpr):
    """Write words (P, G, 2, 4 or 8) of G groups a block behind a pointer to bytes; block, exists: (P, 1)."""
    G: tl.constexpr = words.shape[1]
    i = tl.arange(0, words.shape[2])[None, None, :]
    at = out.to(tl.pointer_type(tl.int32), bitcast=True) + _places(block, G) * BITS + i
    every = tl.reshape(exists, (1, block.shape[0]))[:, :, None]
    tl.store(at, tl.permute(words, (1, 0, 2)), mask=every & (i < BITS))


@triton.jit
def store_quads(out, quads, block, exists, BITS: tl.constexpr):
    """Write quads (P, S), four codes each as an integer of 4 * BITS bits, S a multiple of eight."""
    a, b, c, d = quarters(quads)
    a, e = _halves_of(a)
    b, f = _halves_of(b)
    c, g = _halves_of(c)
    d, h = _halves_of(d)
    store_groups(out, _words((a, b, c, d, e, f, g, h), BITS), block, exists, BITS)


@triton.jit
def _halves_of(tile):
    """The elements with even and with odd index of (P, S)."""
    return tl.split(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 2, 2)))


@triton.jit
def load_quads(source, block, exists, SIZE: tl.constexpr, BITS: tl.constexpr):
    """The inverse of `store_quads`: int32 (P, SIZE / 4), with more above the 4 * BITS bits.

    A thread takes eight codes: it shifts them out of the words that hold them, which its neighbours read as well.
    """
    G: tl.constexpr = SIZE // 32
    j = tl.arange(0, 4)[:, None, None]
    row = tl.reshape(block, (1, block.shape[0])) * G + tl.arange(0, G)[:, None]
    at = source.to(tl.pointer_type(tl.uint32), bitcast=True) + (row * BITS)[None, :, :] + _first_word(j, BITS)
    every = tl.broadcast_to(tl.reshape(exists, (1, 1, block.shape[0])), at.shape)
    shift = (8 * BITS * j) & 31
    a = tl.load(at, mask=every, other=0).to(tl.uint64)
    b = tl.load(at + 1, mask=every & (shift + 8 * BITS > 32), other=0).to(tl.uint64)
    bits = (a | (b << 32)) >> shift
    low = bits.to(tl.int32)
    if BITS == 7:
        c = tl.load(at + 2, mask=every & (shift + 8 * BITS > 64), other=0).to(tl.uint64)
        bits = (bits & 0xFFFFFFFF) | (((b | (c << 32)) >> shift) << 32)
    high = (bits >> (4 * BITS)).to(tl.int32)
    return tl.reshape(tl.permute(tl.join(low, high), (2, 1, 0, 3)), (block.shape[0], SIZE // 4))


@triton.jit
def _first_word(j, BITS: tl.constexpr):
    """j * BITS // 4 for j from 0 to 3."""
    if BITS == 2:
        return (j > 1).to(tl.int32)
    elif BITS == 3:
        return j - (j > 0).to(tl.int32)
    elif BITS == 5:
        return j
    elif BITS == 6:
        return j + (j > 1).to(tl.int32)
    else:
        return 2 * j - (j > 0).to(tl.int32)


def _fields(bits: int) -> tl.constexpr:
    """float32 of the four two's complement fields of `bits` bits at the low end of $4.

    A field that ends below bit 23 stays in its place: beside the exponent of 2**23 it counts units, and a product moves it.
    """
    text = ""
    for i in range(4):
        place = bits * i
        word = "$4"
        if place + bits > 23:
            text += f"shr.u32 w, $4, {place}; "
            place, word = 0, "w"
        mask, bias = ((1 << bits) - 1) << place, 1 << (bits - 1)
        text += f"lop3.b32 t, {word}, 0x{mask:X}, 0x{0x4B000000 | bias << place:08X}, 0x6A; mov.b32 x, t; "
        text += f"fma.rn.f32 ${i}, x, 0f{(127 - place) << 23:08X}, 0f{_pattern(-(2.0 ** (23 - place) + bias)):08X}; "
    return tl.constexpr(f"{{ .reg .b32 t, w; .reg .f32 x; {text} }}")


def _pattern(value: float) -> int:
    """The bits of a float32."""
    return int.from_bytes(struct.pack("<f", value), "little")


FIELDS2, FIELDS3, FIELDS5, FIELDS6, FIELDS7 = (_fields(bits) for bits in (2, 3, 5, 6, 7))


@triton.jit
def quad_values(quads, BITS: tl.constexpr):
    """float32 (P, 4 S) of four two's complement codes each, whatever lies above their bits."""
    text: tl.constexpr = (
        FIELDS2 if BITS == 2 else FIELDS3 if BITS == 3 else FIELDS5 if BITS == 5 else FIELDS6
        if BITS == 6 else FIELDS7
    )  # fmt: skip
    a, b, c, d = tl.inline_asm_elementwise(
        text, "=&f,=&f,=&f,=&f,r", [quads], dtype=(tl.float32,) * 4, is_pure=True, pack=1
    )
    return joined4(a, b, c, d)
