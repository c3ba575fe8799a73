"""Which variant a product gets: as many programs as fill the multiprocessors twice, parts of K where rows are too few."""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.linear_skinny.variants import STEP, Form, Variant, fitted

#: The most rows of x, of a tile of it, and of x that programs of one block of the weight take: each reads all of x.
MOST_ROWS, TILES, ONE_BLOCK = 32, (8, 16, 32), 8
#: Multiprocessors; programs that there should be at least; the most parts of K, and the fewest steps of one.
FULL, ENOUGH, MOST_SPLITS, FEWEST_STEPS = 132, 200, 8, 2
#: Warps that share a block's steps.
PHASES = 2
#: Stages with which two programs of a multiprocessor are better than one.
FEWEST_STAGES = 4


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k), multiples of 128; None where x is too long."""
    tokens = next(size for size in TILES if count <= size)
    blocks = 1 if tokens <= ONE_BLOCK else 2
    steps, programs, splits = k // STEP, n // (64 * blocks), 1
    while splits < MOST_SPLITS and programs * splits < ENOUGH and steps // (2 * splits) >= FEWEST_STEPS:
        splits *= 2
    sizes = tokens, blocks, PHASES, splits
    two, one = (fitted(form, sizes, count, steps, at_once) for at_once in (2, 1))
    return two if two is not None and two.stages >= min(FEWEST_STAGES, one.stages if one else 0) else one


__all__ = ["MOST_ROWS", "choose"]
