"""Tiles of codes to little-endian bytes and back, as `reference.pack` lays them out.

A tile is (blocks, elements) with the elements of a block contiguous in memory and whole bytes per block. Neighbours are
combined in pairs, so that codes that lie in one thread stay there. Odd widths in blocks of 32 or more go by `pack_32`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.sm90.bit_tricks import combined_digits
from fast.kernels.sm90.integers import load_quads, store_quads


@triton.jit
def pairs(codes, BITS: tl.constexpr):
    """Neighbouring codes of BITS bits as one of twice the width: (P, S) -> (P, S / 2), the even index in the low bits."""
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], codes.shape[1] // 2, 2)))
    return low | (high << BITS)


@triton.jit
def store_packed(out, codes, block, inside, BITS: tl.constexpr):
    """Write a tile's codes behind out; block: (P, 1) block indices, inside: which of them exist."""
    SIZE: tl.constexpr = codes.shape[1]
    if BITS == 4:
        byte = pairs(codes, 4)
        at = block * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        tl.store(out + at, byte.to(tl.uint8), mask=inside)
    elif BITS == 2:
        byte = pairs(pairs(codes, 2), 4)
        at = block * (SIZE // 4) + tl.arange(0, SIZE // 4)[None, :]
        tl.store(out + at, byte.to(tl.uint8), mask=inside)
    elif BITS == 6:
        _store_six(out, pairs(pairs(codes, 6), 12), block, inside)
    elif SIZE % 32 == 0:
        store_quads(out, combined_digits(codes, BITS, 4), block, inside, BITS)
    else:
        _store_bytes(
            out, pairs(pairs(pairs(codes.to(tl.int64), BITS), 2 * BITS), 4 * BITS), block, inside, BITS
        )


@triton.jit
def _store_six(out, triples, block, inside):
    """Sixteen 6-bit codes, four times 24 bits, as three words."""
    COUNT: tl.constexpr = triples.shape[1] // 4
    even, odd = tl.split(tl.reshape(triples, (triples.shape[0], 2 * COUNT, 2)))
    first, third = tl.split(tl.reshape(even, (even.shape[0], COUNT, 2)))
    second, fourth = tl.split(tl.reshape(odd, (odd.shape[0], COUNT, 2)))
    word = (
        out.to(tl.pointer_type(tl.int32), bitcast=True)
        + block * (3 * COUNT)
        + 3 * tl.arange(0, COUNT)[None, :]
    )
    tl.store(word, first | (second << 24), mask=inside)
    tl.store(word + 1, ((second >> 8) & 0xFFFF) | (third << 16), mask=inside)
    tl.store(word + 2, ((third >> 16) & 0xFF) | (fourth << 8), mask=inside)


@triton.jit
def _store_bytes(out, octets, block, inside, BITS: tl.constexpr):
    """Eight codes, BITS bytes."""
    COUNT: tl.constexpr = octets.shape[1]
    at = out + block * (COUNT * BITS) + BITS * tl.arange(0, COUNT)[None, :]
    for byte in tl.static_range(BITS):
        tl.store(at + byte, ((octets >> (8 * byte)) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def load_packed(source, block, inside, SIZE: tl.constexpr, BITS: tl.constexpr):
    """int32 codes (P, SIZE) of blocks packed behind `source`."""
    if BITS == 4:
        at = block * (SIZE // 2) + tl.arange(0, SIZE // 2)[None, :]
        byte = tl.load(source + at, mask=inside, other=0).to(tl.int32)
        return tl.reshape(tl.join(byte & 15, byte >> 4), (byte.shape[0], SIZE))
    elif BITS == 2:
        at = block * (SIZE // 4) + tl.arange(0, SIZE // 4)[None, :]
        byte = tl.load(source + at, mask=inside, other=0).to(tl.int32)
        half = tl.reshape(tl.join(byte & 15, byte >> 4), (byte.shape[0], SIZE // 2))
        return tl.reshape(tl.join(half & 3, half >> 2), (byte.shape[0], SIZE))
    elif BITS == 6:
        return _load_six(source, block, inside, SIZE)
    elif SIZE % 32 == 0:
        quad = load_quads(source, block, inside, SIZE, BITS) & ((1 << (4 * BITS)) - 1)
        return _halves(_halves(quad, 2 * BITS), BITS)
    else:
        return _load_bytes(source, block, inside, SIZE, BITS)


@triton.jit
def _load_bytes(source, block, inside, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Eight codes from BITS bytes, as one integer."""
    COUNT: tl.constexpr = SIZE // 8
    at = source + block * (COUNT * BITS) + BITS * tl.arange(0, COUNT)[None, :]
    octet = tl.zeros((block.shape[0], COUNT), tl.int64)
    for byte in tl.static_range(BITS):
        octet |= tl.load(at + byte, mask=inside, other=0).to(tl.int64) << (8 * byte)
    quad = _halves(octet, 4 * BITS)
    return _halves(_halves(quad, 2 * BITS).to(tl.int32), BITS)


@triton.jit
def _halves(codes, BITS: tl.constexpr):
    """Elements (P, S) as two of BITS bits each, (P, 2 S), the low bits first: the inverse of `pairs`."""
    low, high = codes & ((1 << BITS) - 1), codes >> BITS
    return tl.reshape(tl.join(low, high), (codes.shape[0], 2 * codes.shape[1]))


@triton.jit
def _load_six(source, block, inside, SIZE: tl.constexpr):
    """Three words hold sixteen codes."""
    COUNT: tl.constexpr = SIZE // 16
    word = (
        source.to(tl.pointer_type(tl.int32), bitcast=True)
        + block * (3 * COUNT)
        + 3 * tl.arange(0, COUNT)[None, :]
    )
    a = tl.load(word, mask=inside, other=0)
    b = tl.load(word + 1, mask=inside, other=0)
    c = tl.load(word + 2, mask=inside, other=0)
    first, second = a & 0xFFFFFF, ((a >> 24) & 0xFF) | ((b & 0xFFFF) << 8)
    third, fourth = ((b >> 16) & 0xFFFF) | ((c & 0xFF) << 16), (c >> 8) & 0xFFFFFF
    even = tl.reshape(tl.join(first, third), (first.shape[0], 2 * COUNT))
    odd = tl.reshape(tl.join(second, fourth), (first.shape[0], 2 * COUNT))
    triple = tl.reshape(tl.join(even, odd), (first.shape[0], 4 * COUNT))
    half = tl.reshape(tl.join(triple & 0xFFF, triple >> 12), (first.shape[0], 8 * COUNT))
    return tl.reshape(tl.join(half & 63, half >> 6), (first.shape[0], SIZE))
