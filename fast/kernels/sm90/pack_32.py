"""Packed integers of 2 to 7 bits in groups of 32: as many words as a code has bits, made of quads, integers of four codes.

The words of a group lie in one thread after they are made. Stored from there, a warp's would lie as many words apart as a code
has bits, and every 32-byte sector would be written in that many parts. So the words of a group, filled up to a power of two,
are stored as a tile in which neighbouring lanes have neighbouring words, and lanes beyond the group store nothing.

A thread loads all 32 elements of a group: then nothing else changes places, and few threads choose the scale of a block.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from fast.kernels.sm90.bit_tricks import combined_digits, joined, joined2, joined4, quarters


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
