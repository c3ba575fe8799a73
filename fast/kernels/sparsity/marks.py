"""Marks of the elements that are kept, by each rule, from the words of octets; see `groups` for what a mark is.

RULE "largest": the two largest magnitudes of each group, a NaN above all others, as `reference.prune` ranks them. "nonzero":
elements that are neither +0 nor, where SIGNED says that the dtype has one, -0. "mask": those whose byte in a mask is 1.

Functions give the four marks, and the words with zeros in the place of what may not be stored: a group with less than two marks
stores elements that it does not keep.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.sparsity.groups import ONE, TWO, bytes_by, smaller_halves, two_largest

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


__all__ = [
    "NAN_KEYS", "half_key", "half_lanes", "magnitude_lanes", "marks_of_bytes", "marks_of_halves", "marks_of_words", "word_key",
]  # fmt: skip
