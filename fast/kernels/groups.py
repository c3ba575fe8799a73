"""Packed codes of 3, 5 and 7 bits: 32 of them fill as many words as a code has bits.

Words of a group lie in one thread after they are made. Stored from there, each word would be a write of its own: a warp's
words are as many words apart as a code has bits, and an H200 takes writes of parts of a sector at less than half its rate. So
the words of a group, filled up to 4 or 8, are stored as a tile in which neighbouring lanes have neighbouring words, and lanes
beyond the group store nothing.
"""

import triton
import triton.language as tl

from fast.kernels.words import joined, joined2, joined4, quarters

# Codes of a group.
GROUP = tl.constexpr(32)


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
        e, f, g, h = _word(parts, 4, BITS), _word(parts, 5, BITS), _word(parts, 6, BITS), _word(parts, 7, BITS)
        words = joined(a, b, c, d, e, f, g, h)
    return tl.reshape(words, (a.shape[0], a.shape[1], words.shape[1] // a.shape[1]))


@triton.jit
def _word(parts, K: tl.constexpr, BITS: tl.constexpr):
    """Word K of quads; beyond the last word, the last."""
    return word_of(parts, K if K < BITS else BITS - 1, 4 * BITS)


@triton.jit
def load_groups(x, block, SIZE: tl.constexpr):
    """Numbers (P, SIZE) of whole blocks, 32 neighbours a thread, read 8 at a time."""
    a, b = _run(x, block, SIZE, 0), _run(x, block, SIZE, 1)
    c, d = _run(x, block, SIZE, 2), _run(x, block, SIZE, 3)
    return tl.reshape(tl.permute(_after(_after(a, b), _after(c, d)), (1, 0, 2)), (block.shape[0], SIZE))


@triton.jit
def _places(block, COUNT: tl.constexpr):
    """Numbers of the COUNT groups of blocks (P, 1), as (COUNT, P, 1): lanes take neighbours of the first axis before others."""
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
    """Write words (P, G, 4 or 8) of G groups a block behind a pointer to bytes; block, exists: (P, 1)."""
    G: tl.constexpr = words.shape[1]
    i = tl.arange(0, words.shape[2])[None, None, :]
    at = out.to(tl.pointer_type(tl.int32), bitcast=True) + _places(block, G) * BITS + i
    every = tl.reshape(exists, (1, block.shape[0]))[:, :, None]
    tl.store(at, tl.permute(words, (1, 0, 2)), mask=every & (i < BITS))


@triton.jit
def store_quads(out, quads, block, exists, BITS: tl.constexpr):
    """Write quads (P, S), four codes each as a number of 4 * BITS bits, S a multiple of eight."""
    a, b, c, d = quarters(quads)
    a, e = _halves_of(a)
    b, f = _halves_of(b)
    c, g = _halves_of(c)
    d, h = _halves_of(d)
    store_groups(out, _words((a, b, c, d, e, f, g, h), BITS), block, exists, BITS)


@triton.jit
def _halves_of(tile):
    """The elements with even and with odd numbers of (P, S)."""
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
    """j * BITS // 4 for j from 0 to 3, without a division, whose multiples the compiler takes for neighbours."""
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
