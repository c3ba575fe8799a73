"""Kept values and metadata of a tensor from one read; see `groups`, `marks` and `octets`.

Floor: of an octet all bytes are read, half are written, and one byte of metadata: 13 bytes for elements of 8 bits, 25 for 16,
49 for 32; with a mask 8 more. Rows do not matter, as their lengths are multiples of eight: the tensor is one line of octets. A
program has 8 KiB of it, four warps four loads of 16 bytes a thread each, all issued before the first is used.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.sparsity.groups import (
    ONE,
    TWO,
    index_bits,
    kept_bytes,
    kept_halves,
    kept_words,
    metadata_of_halves,
    more_than_two,
)
from fast.kernels.sparsity.marks import marks_of_bytes, marks_of_halves, marks_of_words
from fast.kernels.sparsity.octets import (
    read_fours,
    read_group,
    read_pairs,
    words_at,
    write_fours,
    write_ones,
    write_pairs,
)

BYTES_OF_PROGRAM, WARPS = 8192, 4


@triton.jit
def compress_kernel(
    w, mask, values, metadata, refused, count,
    RULE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr, BYTES: tl.constexpr,
    MASKED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """values, metadata of `count` octets. refused: one int32 that becomes 1 where a group has more than two marks."""
    OCTETS: tl.constexpr = TILE // 8
    first = tl.program_id(0).to(tl.int64) * OCTETS
    left = tl.minimum(count - first, OCTETS).to(tl.int32)
    w, values, metadata = words_at(w, first * 2 * BYTES), words_at(values, first * BYTES), metadata + first
    if RULE == "mask":
        mask = words_at(mask, first * 2)
    if BYTES == 1:
        _bytes_tile(w, mask, values, metadata, refused, left, RULE, KIND, SIGNED, MASKED, OCTETS)
    elif BYTES == 2:
        _halves_tile(w, mask, values, metadata, refused, left, RULE, SIGNED, NAN_KEY, MASKED, OCTETS)
    else:
        _words_tile(w, mask, values, metadata, refused, left, RULE, SIGNED, NAN_KEY, MASKED, OCTETS)


@triton.jit
def _bytes_tile(
    w, mask, values, metadata, refused, left,
    RULE: tl.constexpr, KIND: tl.constexpr, SIGNED: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """A tile of 8-bit elements."""
    a, b = read_pairs(w, left, 2, MASKED, OCTETS)
    ma, mb = a, b
    if RULE == "mask":
        ma, mb = read_pairs(mask, left, 2, MASKED, OCTETS)
    k0, k1, k2, k3, a, b = marks_of_bytes(a, b, ma, mb, RULE, KIND, SIGNED)
    byte = metadata_of_halves(index_bits(k0, k1, k2, k3, TWO))
    write_ones(values, kept_bytes(a, b, byte), left, 2, MASKED, OCTETS)
    write_ones(metadata, byte.to(tl.uint8), left, 2, MASKED, OCTETS)
    # A thread's two octets say it together: of one address the compiler would give each thread one element.
    wide, wider = tl.split(tl.reshape(more_than_two(k0, k1, k2, k3), (OCTETS // 2, 2)))
    _refuse(refused, (wide | wider) & TWO, RULE)


@triton.jit
def _halves_tile(
    w, mask, values, metadata, refused, left,
    RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """A tile of 16-bit elements."""
    a0, a1, b0, b1 = read_fours(w, left, MASKED, OCTETS)
    ma, mb = a0, b0
    if RULE == "mask":
        ma, mb = read_pairs(mask, left, 1, MASKED, OCTETS)
    k0, k1, k2, k3, a0, a1, b0, b1 = marks_of_halves(a0, a1, b0, b1, ma, mb, RULE, SIGNED, NAN_KEY)
    byte = metadata_of_halves(index_bits(k0, k1, k2, k3, TWO))
    even, odd = kept_halves(a0, a1, byte), kept_halves(b0, b1, byte >> 4)
    write_pairs(values, even, odd, left, 1, MASKED, OCTETS)
    write_ones(metadata, byte.to(tl.uint8), left, 1, MASKED, OCTETS)
    _refuse(refused, more_than_two(k0, k1, k2, k3) & TWO, RULE)


@triton.jit
def _words_tile(
    w, mask, values, metadata, refused, left,
    RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr,
):  # fmt: skip
    """A tile of 32-bit elements: the even groups, the odd groups."""
    a0, a1, a2, a3 = read_group(w, left, 0, MASKED, OCTETS)
    b0, b1, b2, b3 = read_group(w, left, 1, MASKED, OCTETS)
    ma, mb = a0, b0
    if RULE == "mask":
        ma, mb = read_pairs(mask, left, 1, MASKED, OCTETS)
    even, wide, a0, a1 = _kept_of_group(a0, a1, a2, a3, ma, RULE, SIGNED, NAN_KEY)
    odd, wider, b0, b1 = _kept_of_group(b0, b1, b2, b3, mb, RULE, SIGNED, NAN_KEY)
    write_fours(values, a0, a1, b0, b1, left, MASKED, OCTETS)
    write_ones(metadata, (even | (odd << 4)).to(tl.uint8), left, 1, MASKED, OCTETS)
    _refuse(refused, (wide | wider) & ONE, RULE)


@triton.jit
def _kept_of_group(x0, x1, x2, x3, m, RULE: tl.constexpr, SIGNED: tl.constexpr, NAN_KEY: tl.constexpr):
    """Metadata of a group of 32-bit elements, marks of more than two, and what is kept."""
    k0, k1, k2, k3, x0, x1, x2, x3 = marks_of_words(x0, x1, x2, x3, m, RULE, SIGNED, NAN_KEY)
    nibble = (index_bits(k0, k1, k2, k3, ONE) >> 28) & 15
    low, high = kept_words(x0, x1, x2, x3, nibble)
    return nibble, more_than_two(k0, k1, k2, k3), low, high


@triton.jit
def _refuse(refused, marks, RULE: tl.constexpr):
    """Note that some group has too many. Who notes it is no matter, so nothing is added up over threads."""
    if RULE != "largest":
        tl.store(refused + tl.zeros_like(marks), 1, mask=marks != 0)


__all__ = ["BYTES_OF_PROGRAM", "WARPS", "compress_kernel"]
