"""`random_words`: the words of `reference.random_bits`, drawn where they are used."""

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from fast.launch.launcher import interpreted

#: Counters of a program; each gives four words.
TILE, WARPS = 512, 4


@triton.jit(do_not_specialize=["seed_low", "seed_high", "stream"])
def random_words_kernel(out, count, seed_low, seed_high, stream, TILE: tl.constexpr):
    """Words 4 i to 4 i + 3 are those of counter (low half of i, high half, stream, 0)."""
    i = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    seed = seed_low.to(tl.uint64) | (seed_high.to(tl.uint64) << 32)
    zero = (i * 0).to(tl.uint32)
    low, high = (i & 0xFFFFFFFF).to(tl.uint32), (i >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, zero + stream.to(tl.uint32), zero)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (TILE, 4))
    at = i[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + at, words, mask=at < count)


def random_words(shape: tuple[int, ...], seed: int, stream: int, device: torch.device) -> torch.Tensor:
    """uint32 words of a shape on a device. seed: 0 to 2**64 - 1; stream: 0 to 2**32 - 1."""
    out = torch.empty(shape, dtype=torch.uint32, device=device)
    count = prod(shape)
    if count:
        options = {} if interpreted() else {"num_warps": WARPS}
        grid = (-(-count // (4 * TILE)),)
        with torch.cuda.device(out.get_device()):
            random_words_kernel[grid](out, count, seed & 0xFFFFFFFF, seed >> 32, stream, TILE=TILE, **options)
    return out


__all__ = ["random_words"]
