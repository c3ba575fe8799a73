"""Which variant a shape gets, and which shapes are left to other kernels: rounds of tiles on the multiprocessors there are.

A tile of 256 tokens keeps the tensor core busy for 1024 cycles a stage, and by two programs that share tokens 32 KiB are read
in them; one of 128 for 512, with 24 KiB, which is more than the second-level cache was seen to deliver to the 2:4 kernel
(`sm90_sparse24_gemm.select`). So narrow tiles are taken where they leave fewer multiprocessors without one.
"""

from __future__ import annotations

from functools import lru_cache

from fast.cost import Coefficients, Time, quickest
from fast.kernels.sm90_s8_gemm.variants import FEATURES, Variant, fitted
from fast.launch.hopper import MULTIPROCESSORS, at_once

C = Coefficients("sm90_s8_gemm")


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, stored: bool, multiprocessors: int = MULTIPROCESSORS
) -> Variant | None:
    """The variant for so many tokens and features; None where another kernel is to be taken. stored: see `Variant`."""
    times = {}
    for tile in C.tiles:
        programs = programs_of(tile["tokens"], tokens, features)
        if programs >= C.busy * multiprocessors:
            rounds = -(-programs // (C.pair * at_once(C.pair, multiprocessors)))
            times[tile["tokens"]] = Time(rounds, 1, tile["time"]).total
    width = quickest(times.items())
    return None if tokens < C.least or width is None else fitted(width, C.pair, stored)


def programs_of(width: int, tokens: int, features: int, pair: int | None = None) -> int:
    """Tiles of so many tokens, those included that a cluster has beyond the features."""
    pair = pair or C.pair
    return -(-tokens // width) * -(-features // (FEATURES * pair)) * pair


__all__ = ["choose", "programs_of"]
