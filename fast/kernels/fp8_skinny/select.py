"""Which variant a product gets: one wave of programs, each with a multiprocessor of its own, and as many warps as registers
allow."""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.fp8_skinny.variants import PIECE, SLAB, TURN, Variant

#: The most rows of x, and those of a tile.
MOST_ROWS, TOKENS = 16, (8, 16)
#: Multiprocessors, and programs that leave nearly none without one; warps of a program, and of those turns under way.
FULL, ENOUGH, WARPS, EACH, MOST_SLABS = 132, 120, 28, 1, 14
#: Pieces of x that a warp quantizes at most.
MOST_KEPT = 2
#: The most rows of codes, and of bfloat16, that products of `fast` multiply by this kernel: those that were measured to gain.
GAINING_CODES, GAINING_VALUES = 0, 0


@lru_cache(maxsize=1024)
def choose(count: int, n: int, k: int, quantizes: bool = False) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none is one wave, or x is too long.

    quantizes: whether x is bfloat16.
    """
    slabs = next(
        (
            one
            for one in range(1, MOST_SLABS + 1)
            if n % (SLAB * one) == 0 and ENOUGH <= n // SLAB // one <= FULL
        ),
        0,
    )
    if not slabs:
        return None
    tokens = next(size for size in TOKENS if count <= size)
    phases = min(WARPS // slabs, max(1, k // TURN))
    kept = -(-count * (k // PIECE) // (slabs * phases)) if quantizes else 0
    if kept > MOST_KEPT:
        return None
    one = Variant(tokens, slabs, phases, EACH, True, True, kept)
    return one if one.takes(count, n, k) else None


def gains(count: int, quantizes: bool) -> bool:
    """Whether so many rows, of bfloat16 or codes, were measured to be faster than by a kernel that quantizes in front."""
    return count <= (GAINING_VALUES if quantizes else GAINING_CODES)


__all__ = ["MOST_ROWS", "choose", "gains"]
