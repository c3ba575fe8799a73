"""What is kept of groups of four, by logic on words: several groups at a time, no comparison and no branch.

An octet is eight neighbours: two groups, one byte of metadata. Element i of a group has a word of its own. For elements of 8
and 16 bits the low half of that word is the even group's, the high half the odd group's (two lanes); elements of 32 bits have
one word for each group (one lane). Whether an element is kept is the top bit of its lane, a mark. Other bits of marks mean
nothing.

Why: at the copy rate the bytes of an octet leave time for 45 (8-bit elements) or 86 (bfloat16) integer operations. Six
subtractions and four majorities rank two groups, where comparisons and selections would take some sixty (reports/LOG.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    "ONE", "TWO", "bytes_by", "index_bits", "kept_bytes", "kept_halves", "kept_words", "metadata_of_halves", "more_than_two",
    "smaller_halves", "two_largest",
]  # fmt: skip
