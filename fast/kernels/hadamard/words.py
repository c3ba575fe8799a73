"""Random words where they are used: those of `reference.random_bits`, four neighbouring elements at a time."""

from __future__ import annotations

import triton
import triton.language as tl

FIRST, SECOND = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
WEYL_FIRST, WEYL_SECOND = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def four_words(index, seed_low, seed_high, stream, WIDE: tl.constexpr):
    """The words of elements 4 index to 4 index + 3, four tensors. WIDE: index is int64 and may be 2**32 or more.

    `tl.philox` makes each product twice, for its high and its low half; here one instruction makes both.
    """
    c0 = index.to(tl.uint32)
    c3 = c0 * 0
    c1 = (index >> 32).to(tl.uint32) if WIDE else c3
    c2 = c3 + stream.to(tl.uint32)
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        first, second = c0.to(tl.uint64) * FIRST, c2.to(tl.uint64) * SECOND
        c0, c2 = (second >> 32).to(tl.uint32) ^ c1 ^ k0, (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = second.to(tl.uint32), first.to(tl.uint32)
        k0, k1 = k0 + WEYL_FIRST, k1 + WEYL_SECOND
    return c0, c1, c2, c3


@triton.jit
def beside(index, loaded, HAS_PTX: tl.constexpr):
    """The same int32 index, in the threads that have `loaded` (int32).

    What is computed of it is computed there too. Otherwise Triton computes words in the layout of `arange`, and moves each
    through shared memory.
    """
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [index, loaded], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return index


__all__ = ["beside", "four_words"]
