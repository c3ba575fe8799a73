"""The one rounding rule: an integer significand loses its low `shift` bits; and the random bits of stochastic rounding.

Every encoder and every scale comes down to this function, so a mode means the same everywhere. With
t = significand / 2**shift, exactly:

=============  ======================================================================================
nearest_even   nearest integer to t, ties to even
nearest_away   nearest integer to t, ties away from zero
toward_zero    t truncated
up, down       toward plus, minus infinity: the magnitude rounds up where the sign agrees
to_odd         t truncated, last bit set if anything was lost
stochastic     floor(t + r), r = the top `shift` bits of the element's random word as a fraction
=============  ======================================================================================

Stochastic rounding uses at most 24 random bits, in the carry form of LLVM's cvt.rs (gfloat calls it StochasticFastest). A
value so small that more than 24 bits are lost is truncated to 24 first, so its probability of rounding up is exact to 2**-24.

Random bits come from Philox 4x32-10 by counter, as Triton draws them. Word i of stream s under a seed is output i mod 4 of
philox(seed, counter = (low 32 bits of i // 4, high 32 bits, s, 0)), so any element's word can be computed anywhere, in any
order: on a GPU the same bits come from `tl.philox`, whose four results go to four neighbouring elements. Row and column
copies of a tensor use different streams, so that their errors are independent.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011), Philox4x32 with 10 rounds.
"""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from reference.arrays.errors import choice
from reference.arrays.namespace import Array, Namespace

MODES = ("nearest_even", "nearest_away", "toward_zero", "up", "down", "to_odd", "stochastic")
# What a value rounded beyond the largest finite one becomes; see `reference.formats.encode`.
OVERFLOWS = ("saturate", "nonfinite", "inf", "nan")
STOCHASTIC_BITS = 24
# From here on a 24-bit significand rounds to 0, or to 1 in the modes that look at the lost bits.
LARGEST_SHIFT = 25


def check_mode(mode: str, random_bits: Array | None) -> str:
    """The mode's name if it exists and comes with random bits exactly when it needs them."""
    choice(mode, MODES, "rounding")
    if (mode == "stochastic") != (random_bits is not None):
        need = "needs random_bits, one uint32 per element" if mode == "stochastic" else "takes no random_bits"
        raise ValueError(f"rounding {mode!r} {need}; see reference.random_bits")
    return mode


def round_shift(
    ns: Namespace,
    significand: Array,
    shift: Array,
    negative: Array,
    mode: str,
    random_bits: Array | None = None,
) -> Array:
    """Integer nearest to significand / 2**shift in the given mode; 0 <= significand < 2**24, shift >= 1, int32."""
    if mode == "stochastic":
        return _stochastic(significand, shift, random_bits, ns)
    shift = ns.minimum(shift, LARGEST_SHIFT)
    floor = significand >> shift
    if mode == "nearest_even":
        return (significand + ((1 << (shift - 1)) - 1) + (floor & 1)) >> shift
    if mode == "nearest_away":
        return (significand + (1 << (shift - 1))) >> shift
    if mode == "toward_zero":
        return floor
    inexact = ns.astype((floor << shift) != significand, "int32")
    if mode == "to_odd":
        return floor | inexact
    grows = negative if mode == "down" else ~negative
    return floor + (inexact & ns.astype(grows, "int32"))


def _stochastic(significand: Array, shift: Array, random_bits: Array | None, ns: Namespace) -> Array:
    excess = ns.minimum(ns.maximum(shift - STOCHASTIC_BITS, 0), 31)
    shift = ns.minimum(shift, STOCHASTIC_BITS)
    # The word's top 24 bits as a non-negative int32, of which the top `shift` are used.
    word = (ns.bitcast(random_bits, "int32") >> 8) & 0xFFFFFF
    return ((significand >> excess) + (word >> (STOCHASTIC_BITS - shift))) >> shift


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
