"""What is kept of groups of four, by logic on words: several groups at a time, no comparison and no branch.

An octet is eight neighbours: two groups, one byte of metadata. Element i of a group has a word of its own. For elements of 8
and 16 bits the low half of that word is the even group's, the high half the odd group's (two lanes); elements of 32 bits have
one word for each group (one lane). Whether an element is kept is the top bit of its lane, a mark. Other bits of marks mean
nothing.

Why: at the copy rate the bytes of an octet leave time for 45 (8-bit elements) or 86 (bfloat16) integer operations. Six
subtractions and four majorities rank two groups, where comparisons and selections would take some sixty (reports/LOG.md).

16 bytes a thread are read and written, and nothing moves between threads. A tile is read as words of four bytes, of which a
thread gets four neighbours, and they are split into the words of octets: two octets of 8-bit elements, one of 16 bits. An
octet of 32-bit elements is two groups of 16 bytes; each is read by itself, and the second finds its sector in the first-level
cache. Results are said to have no more neighbours than a thread makes: for wider stores the compiler would exchange them
through shared memory.

Which elements are marked: RULE "largest": the two largest magnitudes of each group, a NaN above all others, as
`reference.prune` ranks them. "nonzero": elements that are neither +0 nor, where SIGNED says that the dtype has one, -0.
"mask": those whose byte in a mask is 1.

Functions give the four marks, and the words with zeros in the place of what may not be stored: a group with less than two marks
stores elements that it does not keep.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: One above infinity: what every NaN counts as. int8 and uint8 have none.
NAN_KEYS = {"bfloat16": 0x7F81, "float16": 0x7C01, "float32": 0x7F800001, "int8": 0, "uint8": 0}


@triton.jit
def byte_lanes(a, b):
    """Four words of the four bytes of two words: each byte on top of its lane."""
    k0, k1 = bytes_by(a, b, 0x4400), bytes_by(a, b, 0x5511)
    return k0, k1, bytes_by(a, b, 0x6622), bytes_by(a, b, 0x7733)


@triton.jit
def half_lanes(a0, a1, b0, b1):
    """Four words of the halves of four words, those of groups a and b: an element of each group."""
    k0, k1 = bytes_by(a0, b0, 0x5410), bytes_by(a0, b0, 0x7632)
    return k0, k1, bytes_by(a1, b1, 0x5410), bytes_by(a1, b1, 0x7632)


@triton.jit
def nonzero(w, BITS: tl.constexpr, SIGNED: tl.constexpr):
    """Marks in the top bits of elements of BITS bits, and the word without -0. Adding carries into the top bit, not beyond."""
    if BITS == 8:
        below = tl.full((), 0x7F7F7F7F, tl.int32)
    elif BITS == 16:
        below = tl.full((), 0x7FFF7FFF, tl.int32)
    else:
        below = tl.full((), 0x7FFFFFFF, tl.int32)
    marks = (w & below) + below
    if SIGNED:
        return marks, w & (marks | below)
    else:
        return marks | w, w


@triton.jit
def magnitude_lanes(a, b, KIND: tl.constexpr):
    """Keys of the four bytes of two words, each in its lane. Magnitudes are made four at a time: 128 fits a byte."""
    if KIND == "int8":
        a, b = _magnitudes(a), _magnitudes(b)
    k0, k1, k2, k3 = byte_lanes(a, b)
    return k0 & 0x00FF00FF, k1 & 0x00FF00FF, k2 & 0x00FF00FF, k3 & 0x00FF00FF


@triton.jit
def _magnitudes(w):
    """|x| of four int8: the byte, or its complement and one more, so no byte carries into the next."""
    one = (w >> 7) & 0x01010101
    return (w ^ (one * 255)) + one


@triton.jit
def half_key(k, NAN_KEY: tl.constexpr):
    """Keys of two lanes of 16-bit floats."""
    return smaller_halves(k & ~TWO, NAN_KEY * 0x10001)


@triton.jit
def word_key(k, NAN_KEY: tl.constexpr):
    """The key of a float32."""
    return tl.minimum(k & ~ONE, NAN_KEY)


@triton.jit
def marks_of_bytes(a, b, ma, mb, RULE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr):
    """8-bit elements: words of both groups, words of a mask. Marks of two lanes, words."""
    if RULE == "largest":
        k0, k1, k2, k3 = magnitude_lanes(a, b, KIND)
        k0, k1, k2, k3 = two_largest(k0, k1, k2, k3, TWO)
    elif RULE == "nonzero":
        marks_a, a = nonzero(a, 8, SIGNED)
        marks_b, b = nonzero(b, 8, SIGNED)
        k0, k1, k2, k3 = byte_lanes(marks_a, marks_b)
    else:
        k0, k1, k2, k3 = byte_lanes(ma << 7, mb << 7)
        a, b = a & (ma * 255), b & (mb * 255)
    return k0, k1, k2, k3, a, b


@triton.jit
def marks_of_halves(a0, a1, b0, b1, ma, mb, RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr):
    """16-bit elements: words of both groups, words of a mask. Marks of two lanes, words."""
    if RULE == "largest":
        k0, k1, k2, k3 = half_lanes(a0, a1, b0, b1)
        k0, k1, k2, k3 = two_largest(
            half_key(k0, NAN_KEY), half_key(k1, NAN_KEY), half_key(k2, NAN_KEY), half_key(k3, NAN_KEY), TWO
        )
    elif RULE == "nonzero":
        m0, a0 = nonzero(a0, 16, SIGNED)
        m1, a1 = nonzero(a1, 16, SIGNED)
        m2, b0 = nonzero(b0, 16, SIGNED)
        m3, b1 = nonzero(b1, 16, SIGNED)
        k0, k1, k2, k3 = half_lanes(m0, m1, m2, m3)
    else:
        k0, k1, k2, k3 = byte_lanes(ma << 7, mb << 7)
        ma, mb = ma * 255, mb * 255
        a0, a1 = a0 & bytes_by(ma, ma, 0x1100), a1 & bytes_by(ma, ma, 0x3322)
        b0, b1 = b0 & bytes_by(mb, mb, 0x1100), b1 & bytes_by(mb, mb, 0x3322)
    return k0, k1, k2, k3, a0, a1, b0, b1


@triton.jit
def marks_of_words(x0, x1, x2, x3, m, RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr):
    """32-bit elements of one group, the word of its mask. Marks of one lane, words."""
    if RULE == "largest":
        k0, k1, k2, k3 = two_largest(
            word_key(x0, NAN_KEY), word_key(x1, NAN_KEY), word_key(x2, NAN_KEY), word_key(x3, NAN_KEY), ONE
        )
    elif RULE == "nonzero":
        k0, x0 = nonzero(x0, 32, SIGNED)
        k1, x1 = nonzero(x1, 32, SIGNED)
        k2, x2 = nonzero(x2, 32, SIGNED)
        k3, x3 = nonzero(x3, 32, SIGNED)
    else:
        k0, k1, k2, k3 = m << 31, m << 23, m << 15, m << 7
        x0, x1, x2, x3 = x0 & (k0 >> 31), x1 & (k1 >> 31), x2 & (k2 >> 31), x3 & (k3 >> 31)
    return k0, k1, k2, k3, x0, x1, x2, x3


@triton.jit
def words_at(pointer, offset):
    """A pointer to words of four bytes, `offset` words on."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True) + offset


@triton.jit
def read_pairs(pointer, left, NEIGHBOURS: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """Two tensors: the words of octets of two words. left: octets that exist. NEIGHBOURS: octets of a thread in a row."""
    at = tl.max_contiguous(tl.arange(0, 2 * OCTETS), [2 * NEIGHBOURS])
    w = tl.load(pointer + at, mask=at < 2 * left, other=0) if MASKED else tl.load(pointer + at)
    return tl.split(tl.reshape(w, (OCTETS, 2)))


@triton.jit
def read_fours(pointer, left, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """Four tensors: the words of octets of four words."""
    at = tl.arange(0, 4 * OCTETS)
    w = tl.load(pointer + at, mask=at < 4 * left, other=0) if MASKED else tl.load(pointer + at)
    return split_fours(w, OCTETS)


@triton.jit
def read_group(pointer, left, GROUP: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """Four tensors: the words of group GROUP (0, 1) of octets of eight words."""
    octet = tl.arange(0, OCTETS)[:, None]
    at = octet * 8 + GROUP * 4 + tl.arange(0, 4)[None, :]
    w = tl.load(pointer + at, mask=octet < left, other=0) if MASKED else tl.load(pointer + at)
    return split_fours(w, OCTETS)


@triton.jit
def split_fours(w, OCTETS: tl.constexpr):
    """(4 OCTETS,) or (OCTETS, 4) as four tensors."""
    even, odd = tl.split(tl.reshape(w, (OCTETS, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def joined_fours(w0, w1, w2, w3, OCTETS: tl.constexpr):
    """The inverse: (OCTETS, 4)."""
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (OCTETS, 4))


@triton.jit
def write_ones(pointer, w, left, NEIGHBOURS: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """One element of each octet; a thread has NEIGHBOURS octets beside each other."""
    at = tl.max_contiguous(tl.arange(0, OCTETS), [NEIGHBOURS])
    if MASKED:
        tl.store(pointer + at, w, mask=at < left)
    else:
        tl.store(pointer + at, w)


@triton.jit
def write_pairs(pointer, w0, w1, left, NEIGHBOURS: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """Two words of each octet."""
    at = tl.max_contiguous(tl.arange(0, 2 * OCTETS), [2 * NEIGHBOURS])
    w = tl.reshape(tl.join(w0, w1), (2 * OCTETS,))
    if MASKED:
        tl.store(pointer + at, w, mask=at < 2 * left)
    else:
        tl.store(pointer + at, w)


@triton.jit
def write_fours(pointer, w0, w1, w2, w3, left, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """Four words of each octet."""
    at = tl.arange(0, 4 * OCTETS)
    w = tl.reshape(joined_fours(w0, w1, w2, w3, OCTETS), (4 * OCTETS,))
    if MASKED:
        tl.store(pointer + at, w, mask=at < 4 * left)
    else:
        tl.store(pointer + at, w)


@triton.jit
def write_group(
    pointer, w0, w1, w2, w3, left, GROUP: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr
):
    """The words of group GROUP (0, 1) of octets of eight words."""
    octet = tl.arange(0, OCTETS)[:, None]
    at = octet * 8 + GROUP * 4 + tl.arange(0, 4)[None, :]
    w = joined_fours(w0, w1, w2, w3, OCTETS)
    if MASKED:
        tl.store(pointer + at, w, mask=octet < left)
    else:
        tl.store(pointer + at, w)


#: Top bits of one lane, and of two.
ONE, TWO = tl.constexpr(-0x80000000), tl.constexpr(-0x7FFF8000)


@triton.jit
def bytes_by(a, b, selector):
    """Four of the eight bytes of two words: those that the four lowest hexadecimal digits of the selector name."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def smaller_halves(a, b):
    """The smaller of the unsigned halves of words."""
    return tl.inline_asm_elementwise(
        "min.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def majority(a, b, c):
    """Bits that at least two of three have: one instruction."""
    return (a & b) | (c & (a | b))


@triton.jit
def two_largest(k0, k1, k2, k3, TOP: tl.constexpr):
    """Marks of the two largest of keys below the top bit of their lane; of equal ones the first is larger.

    (a | TOP) - b keeps the top bit where a >= b, and borrows nothing from the next lane. An element is kept if it is not
    smaller than two of the others.
    """
    a, b, c = k0 | TOP, k1 | TOP, k2 | TOP
    over01, over02, over03 = a - k1, a - k2, a - k3
    over12, over13, over23 = b - k2, b - k3, c - k3
    kept0, kept1 = majority(over01, over02, over03), majority(~over01, over12, over13)
    kept2, kept3 = majority(~over02, ~over12, over23), majority(~over03, ~over13, ~over23)
    return kept0, kept1, kept2, kept3


@triton.jit
def more_than_two(k0, k1, k2, k3):
    """Marks of groups with three or four marks."""
    return (k0 & k1 & (k2 | k3)) | (k2 & k3 & (k0 | k1))


@triton.jit
def index_bits(k0, k1, k2, k3, TOP: tl.constexpr):
    """The four bits of metadata of groups with at most two marks in the four top bits of their lane, and zeros below.

    Unused places name the first of 2, 3 that is free, as the reference fills them.
    """
    early, both = k0 | k1, k0 & k1
    first_low, first_high = ~k0 & k1, ~early
    second_low, second_high = both | ~(early & (k2 | ~k3)), ~both
    # Masks follow the shifts, which copy the sign.
    if TOP == ONE:
        first = ((first_low >> 3) & 0x10000000) | ((first_high >> 2) & 0x20000000)
        return first | ((second_low >> 1) & 0x40000000) | (second_high & TOP)
    else:
        first = ((first_low >> 3) & 0x10001000) | ((first_high >> 2) & 0x20002000)
        return first | ((second_low >> 1) & 0x40004000) | (second_high & TOP)


@triton.jit
def metadata_of_halves(bits):
    """The byte of an octet, from `index_bits` of two lanes."""
    return ((bits >> 12) & 0x0F) | ((bits >> 24) & 0xF0)


@triton.jit
def kept_bytes(a, b, byte):
    """The kept elements of an octet of 8 bits: words of its groups, and its metadata. One word."""
    pairs = (byte | (byte << 4)) & 0x0F0F
    return bytes_by(a, b, ((pairs | (pairs << 2)) & 0x3333) | 0x4400)


@triton.jit
def kept_halves(low, high, nibble):
    """The kept elements of a group of 16 bits: its two words, and its metadata in the four low bits. One word."""
    indices = (nibble | (nibble << 6)) & 0x0303
    # Index i stands for the bytes 2 i and 2 i + 1.
    return bytes_by(low, high, indices * 0x22 + 0x1010)


@triton.jit
def kept_words(x0, x1, x2, x3, nibble):
    """The kept elements of a group of 32 bits, from its metadata."""
    first, second = nibble & 3, (nibble >> 2) & 3
    low = tl.where(first == 0, x0, tl.where(first == 1, x1, x2))
    return low, tl.where(second == 1, x1, tl.where(second == 2, x2, x3))


__all__ = [
    "NAN_KEYS",
    "ONE",
    "TWO",
    "bytes_by",
    "half_key",
    "index_bits",
    "kept_bytes",
    "kept_halves",
    "kept_words",
    "magnitude_lanes",
    "marks_of_bytes",
    "marks_of_halves",
    "marks_of_words",
    "metadata_of_halves",
    "more_than_two",
    "read_fours",
    "read_group",
    "read_pairs",
    "smaller_halves",
    "two_largest",
    "word_key",
    "words_at",
    "write_fours",
    "write_group",
    "write_ones",
    "write_pairs",
]
