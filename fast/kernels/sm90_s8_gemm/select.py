"""Which variant a shape gets, and which shapes are left to other kernels: rounds of tiles on the multiprocessors there are.

It is faster than Triton's tiles from 512 rows of large weights on; tiles that leave three of ten multiprocessors without one
lose (times: reports/LOG.md).

A tile of 256 tokens keeps the tensor core busy for 1024 cycles a stage, and by two programs that share tokens 32 KiB are read
in them; one of 128 for 512, with 24 KiB, which is more than the second-level cache was seen to deliver to the 2:4 kernel
(`sm90_sparse24_gemm.select`). So narrow tiles are taken where they leave fewer multiprocessors without one.
"""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.sm90_s8_gemm.variants import FEATURES, Variant, fitted
from fast.launch.hopper import MULTIPROCESSORS

#: Time of a tile by its tokens, that of 256 being 1.
TILES = {256: 1.0, 128: 0.6}
#: Programs of a cluster, which share tokens.
PAIR = 2
#: Rows from which on the kernel is asked for.
LEAST = 256
#: The part of the multiprocessors that has to have a tile.
BUSY = 0.7


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, stored: bool, multiprocessors: int = MULTIPROCESSORS
) -> Variant | None:
    """The variant for so many tokens and features; None where another kernel is to be taken. stored: see `Variant`."""
    some = [width for width in TILES if programs_of(width, tokens, features) >= BUSY * multiprocessors]
    if tokens < LEAST or not some:
        return None
    return fitted(
        min(some, key=lambda width: time_of(width, tokens, features, multiprocessors)), PAIR, stored
    )


def programs_of(width: int, tokens: int, features: int, pair: int = PAIR) -> int:
    """Tiles of so many tokens, those included that a cluster has beyond the features."""
    return -(-tokens // width) * -(-features // (FEATURES * pair)) * pair


def time_of(width: int, tokens: int, features: int, multiprocessors: int = MULTIPROCESSORS) -> float:
    """Rounds of tiles, each as long as a tile."""
    at_once = max(1, multiprocessors // PAIR) * PAIR
    return -(-programs_of(width, tokens, features) // at_once) * TILES[width]


__all__ = ["BUSY", "LEAST", "PAIR", "TILES", "choose", "programs_of", "time_of"]
