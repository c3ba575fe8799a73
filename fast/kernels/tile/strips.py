"""Tiles of two-dimensional blocks side by side: rows of all blocks in memory, one block after the other in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fast.kernels.rules.packing import pairs, store_packed
from fast.kernels.sm90.bit_tricks import store_words


@triton.jit
def of_blocks(strip):
    """(rows, P, columns) as P blocks, (P, rows * columns); no element leaves its thread."""
    return tl.reshape(tl.permute(strip, (1, 0, 2)), (strip.shape[1], strip.shape[0] * strip.shape[2]))


@triton.jit
def store_elements(pointers, made, inside):
    """Elements of a tile (P, S) at pointers of the same shape, or of a strip (rows, P, columns), where all exist."""
    if len(pointers.shape) == 3:
        blocks = tl.reshape(made, (pointers.shape[1], pointers.shape[0], pointers.shape[2]))
        tl.store(pointers, tl.permute(blocks, (1, 0, 2)))
    else:
        tl.store(pointers, made, mask=inside)


@triton.jit
def store_words_of(codes, at, words, block, exists):
    """Words of eight codes of a tile, (P, S / 8), behind a pointer to bytes; at: of the words of a strip, else not used."""
    if len(at.shape) == 3:
        store_elements(codes.to(tl.pointer_type(tl.int32), bitcast=True) + at, words, None)
    else:
        store_words(codes, words, block, exists)


@triton.jit
def store_packed_of(codes, at, made, block, exists, BITS: tl.constexpr):
    """int32 codes of a tile, packed; of a strip, whose codes have four bits, as words."""
    if len(at.shape) == 3:
        store_words_of(codes, at, pairs(pairs(pairs(made, 4), 8), 16), block, exists)
    else:
        store_packed(codes, made, block, exists, BITS)
