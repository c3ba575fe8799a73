"""The dense tensor of kept values and metadata, one line of octets; see `compress` for the floor, which is the same."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.sparsity.groups import bytes_by
from fast.kernels.sparsity.octets import (
    read_fours,
    read_pairs,
    words_at,
    write_fours,
    write_group,
    write_pairs,
)


@triton.jit
def decompress_kernel(
    values, metadata, w, count, BYTES: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr
):
    """w of `count` octets."""
    OCTETS: tl.constexpr = TILE // 8
    first = tl.program_id(0).to(tl.int64) * OCTETS
    left = tl.minimum(count - first, OCTETS).to(tl.int32)
    w, values, metadata = words_at(w, first * 2 * BYTES), words_at(values, first * BYTES), metadata + first
    if BYTES == 1:
        byte = _read_ones(metadata, left, 2, MASKED, OCTETS).to(tl.int32)
        v = _read_ones(values, left, 2, MASKED, OCTETS)
        a = bytes_by(v, 0, _byte_selector(byte, 0x10))
        write_pairs(w, a, bytes_by(v, 0, _byte_selector(byte >> 4, 0x32)), left, 2, MASKED, OCTETS)
    elif BYTES == 2:
        byte = _read_ones(metadata, left, 1, MASKED, OCTETS).to(tl.int32)
        a, b = read_pairs(values, left, 1, MASKED, OCTETS)
        even, odd = _half_selector(byte), _half_selector(byte >> 4)
        a0, a1, b0 = bytes_by(a, 0, even), bytes_by(a, 0, even >> 16), bytes_by(b, 0, odd)
        write_fours(w, a0, a1, b0, bytes_by(b, 0, odd >> 16), left, MASKED, OCTETS)
    else:
        byte = _read_ones(metadata, left, 1, MASKED, OCTETS).to(tl.int32)
        a0, a1, b0, b1 = read_fours(values, left, MASKED, OCTETS)
        _write_placed(w, a0, a1, byte, left, 0, MASKED, OCTETS)
        _write_placed(w, b0, b1, byte >> 4, left, 1, MASKED, OCTETS)


@triton.jit
def _read_ones(pointer, left, NEIGHBOURS: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr):
    """One element of each octet."""
    at = tl.max_contiguous(tl.arange(0, OCTETS), [NEIGHBOURS])
    if MASKED:
        return tl.load(pointer + at, mask=at < left, other=0)
    else:
        return tl.load(pointer + at)


@triton.jit
def _byte_selector(nibble, BYTES: tl.constexpr):
    """Which byte of (values, 0) each element of a group of bytes is. BYTES: those of its values, a digit each.

    Digit 4 is a byte of zeros. Where both indices are one, the second value wins, as in the reference.
    """
    first, second = (nibble << 2) & 12, nibble & 12
    low = 0x4444 ^ ((4 ^ (BYTES & 15)) << first)
    return (low & ~(15 << second)) | ((BYTES >> 4) << second)


@triton.jit
def _half_selector(nibble):
    """The same for a group of halves in 32 bits: the digits of two words."""
    first, second = (nibble << 3) & 24, (nibble << 1) & 24
    low = 0x44444444 ^ (0x54 << first)
    return (low & ~(255 << second)) | (0x32 << second)


@triton.jit
def _write_placed(
    w, low, high, nibble, left, GROUP: tl.constexpr, MASKED: tl.constexpr, OCTETS: tl.constexpr
):
    """A group of 32-bit elements."""
    first, second = nibble & 3, (nibble >> 2) & 3
    w0 = tl.where(second == 0, high, tl.where(first == 0, low, 0))
    w1 = tl.where(second == 1, high, tl.where(first == 1, low, 0))
    w2 = tl.where(second == 2, high, tl.where(first == 2, low, 0))
    w3 = tl.where(second == 3, high, tl.where(first == 3, low, 0))
    write_group(w, w0, w1, w2, w3, left, GROUP, MASKED, OCTETS)


__all__ = ["decompress_kernel"]
