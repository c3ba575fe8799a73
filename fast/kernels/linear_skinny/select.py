"""Which variant a product gets, where it is faster than `linear_small`: as measured on an H200 and an H100 (int4 g128, int8 by
rows; 1 to 16 rows; four shapes of an 8-billion-parameter model).

What costs: clusters of more than two programs, x in every program (so few rows alone gain), phases of fewer than four warps.
Eight-bit weights have twice the bytes and gain nothing.
"""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.linear_skinny.variants import STEP, Form, Variant, fitted

#: Elements that gain, up to how many rows of x, and of weights of at most SMALL elements; the most rows that a variant takes.
SERVED, GAINING, GAINING_SMALL, SMALL = ("int4",), 2, 4, 1 << 24
MOST_ROWS, TILES = 16, (8, 16)
#: Multiprocessors; programs that there should be at least; the most parts of K, and the fewest steps of one.
FULL, ENOUGH, MOST_SPLITS, FEWEST_STEPS = 132, 128, 8, 8
#: Blocks of 64 rows of a program, and warps that share a block's stages.
BLOCKS, PHASES = 1, 4


def gains(form: Form, count: int, n: int, k: int) -> bool:
    """Whether so many rows are multiplied faster than by `linear_small`."""
    return form.element in SERVED and count <= (GAINING_SMALL if n * k <= SMALL else GAINING)


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k), multiples of 128; None where x is too long."""
    tokens = next(size for size in TILES if count <= size)
    steps, programs, splits = k // STEP, n // (64 * BLOCKS), 1
    while splits < MOST_SPLITS and programs * splits < ENOUGH and steps // (2 * splits) >= FEWEST_STEPS:
        splits *= 2
    at_once = 1 if programs * splits <= FULL else 2
    return fitted(form, (tokens, BLOCKS, PHASES, splits), count, steps, at_once)


__all__ = ["GAINING", "MOST_ROWS", "TILES", "choose", "gains"]
