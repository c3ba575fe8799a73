"""Which variant a product gets, where it is faster than `linear_small`: as measured on an H100 (int4 in groups of 128, int8 by
rows; 1, 8 and 16 rows; four shapes of an 8-billion-parameter model).

What costs: a cluster (2 to 5 us where its programs do not all run at once), x in every program (so few rows alone gain), phases
of fewer than four warps. Eight-bit weights have twice the bytes and gain nothing.
"""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.linear_skinny.variants import STEP, Form, Variant, fitted

#: Elements and the most rows of x that gain; the most rows that a variant takes.
SERVED, GAINING, MOST_ROWS, TILES = ("int4",), 2, 16, (8, 16)
#: Multiprocessors; programs that there should be at least; the most parts of K; steps of one that call for another.
FULL, ENOUGH, MOST_SPLITS, LONG = 132, 64, 8, 64
#: Blocks of 64 rows of a program, and warps that share a block's stages.
BLOCKS, PHASES = 1, 4


def gains(form: Form, count: int) -> bool:
    """Whether so many rows are multiplied faster than by `linear_small`."""
    return form.element in SERVED and count <= GAINING


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k), multiples of 128; None where x is too long."""
    tokens = next(size for size in TILES if count <= size)
    steps, programs, splits = k // STEP, n // (64 * BLOCKS), 1
    while (
        splits < MOST_SPLITS
        and steps >= 2 * splits
        and (programs * splits < ENOUGH or is_long(steps, programs, splits))
    ):
        splits *= 2
    at_once = 1 if programs * splits <= FULL else 2
    return fitted(form, (tokens, BLOCKS, PHASES, splits), count, steps, at_once)


def is_long(steps: int, programs: int, splits: int) -> bool:
    """Whether twice the parts of K would be shorter without more programs than multiprocessors."""
    return steps > LONG * splits and 2 * programs * splits <= FULL


__all__ = ["GAINING", "MOST_ROWS", "TILES", "choose", "gains"]
