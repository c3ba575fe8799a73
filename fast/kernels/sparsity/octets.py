"""Octets as the kernels read and write them: 16 bytes a thread, and nothing moves between threads.

A tile is read as words of four bytes, of which a thread gets four neighbours, and they are split into the words of octets: two
octets of 8-bit elements, one of 16 bits. An octet of 32-bit elements is two groups of 16 bytes; each is read by itself, and the
second finds its sector in the first-level cache. Results are said to have no more neighbours than a thread makes: for wider
stores the compiler would exchange them through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


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


__all__ = [
    "read_fours", "read_group", "read_pairs", "words_at", "write_fours", "write_group", "write_ones", "write_pairs",
]  # fmt: skip
