"""Random bits for stochastic rounding: Philox 4x32-10 by counter, as Triton draws them.

Word i of stream s under a seed is output i mod 4 of philox(seed, counter = (low 32 bits of i // 4, high 32 bits, s, 0)), so any
element's word can be computed anywhere, in any order: on a GPU the same bits come from `tl.philox`, whose four results go to
four neighbouring elements. Row and column copies of a tensor use different streams, so that their errors are independent.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), Philox4x32 with 10 rounds.
"""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF
U64 = npt.NDArray[np.uint64]


def philox(seed: int, counter: tuple[U64, U64, U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Four 32-bit words (in uint64) per counter of four 32-bit words (in uint64), under a 64-bit seed."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, seed >> 32 & MASK
    low = np.uint64(MASK)
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIER[0]), c2 * np.uint64(MULTIPLIER[1])
        c0 = (second >> np.uint64(32)) ^ c1 ^ np.uint64(k0)
        c2 = (first >> np.uint64(32)) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & low, first & low
        k0, k1 = k0 + WEYL[0] & MASK, k1 + WEYL[1] & MASK
    return c0, c1, c2, c3


def random_bits(shape: int | tuple[int, ...], *, seed: int, stream: int = 0) -> npt.NDArray[np.uint32]:
    """uint32 words of the given shape, in C order.

    seed: 0 to 2**64 - 1; stream: 0 to 2**32 - 1. For torch use `torch.from_numpy`, for JAX
    `jax.numpy.asarray`. Raises ValueError for numbers outside these ranges.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    for name, value, bits in (("seed", seed, 64), ("stream", stream, 32)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is an integer from 0 to 2**{bits} - 1, got {value!r}")
    count = prod(shape)
    index = np.arange(-(-count // 4), dtype=np.uint64)
    zero = np.zeros_like(index)
    words = philox(seed, (index & np.uint64(MASK), index >> np.uint64(32), zero + np.uint64(stream), zero))
    return np.stack(words, axis=-1).reshape(-1)[:count].astype(np.uint32).reshape(shape)
