"""Which tiles of `linear_bits` a product gets."""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.linear_bits.variants import STEP, Form, Variant, fitted, longest

#: Rows of x at most, and multiprocessors of the GPUs that tiles are chosen for.
MOST_ROWS, PROCESSORS = 128, 132
#: Parts of K at most, and stages that each has at least: the ring has to be filled first.
MOST_SPLITS, STAGES_EACH = 8, 4
#: What a further wave of programs costs beside its work, as its first stages are waited for again.
WAVE = 0.1
#: By rows of x at most: tiles, of which `cost` takes one, the first of equals. Programs of seven slabs, 112 rows, are one for
#: each multiprocessor where a weight has 14336 rows; small ones fill the last wave of others. With many rows each program reads
#: all of x through the L2 cache (a megabyte at 128 rows of 4096), so programs have many rows of the weight.
TILES = (
    (2, (Variant(8, 7, 1, 4, 1, 4, 5, 1), Variant(8, 1, 1, 8, 1, 4, 4, 4), Variant(8, 2, 1, 4, 1, 4, 3, 3))),
    (8, (Variant(8, 7, 1, 4, 1, 4, 5, 1), Variant(8, 2, 1, 4, 1, 4, 3, 3))),
    (16, (Variant(16, 7, 1, 2, 1, 2, 6, 1), Variant(16, 4, 1, 2, 1, 2, 4, 2))),
    (32, (Variant(32, 7, 1, 2, 1, 2, 4, 1), Variant(32, 4, 1, 2, 1, 2, 3, 2))),
    (48, (Variant(48, 7, 1, 2, 1, 1, 5, 1), Variant(48, 8, 1, 2, 1, 1, 4, 1))),
    (64, (Variant(64, 7, 1, 2, 1, 1, 5, 1), Variant(64, 8, 1, 2, 1, 1, 4, 1))),
    (96, (Variant(96, 7, 1, 2, 1, 1, 4, 1), Variant(96, 8, 1, 2, 1, 1, 3, 1))),
    (128, (Variant(128, 7, 1, 2, 1, 1, 4, 1), Variant(128, 8, 1, 2, 1, 1, 3, 1))),
)  # fmt: skip


@lru_cache(maxsize=4096)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none fits."""
    tiles = next(tiles for most, tiles in TILES if count <= most)
    fitting = [one for tile in tiles if (one := placed(tile, form, count, n, k)) is not None]
    return min(fitting, key=lambda one: cost(one, count, n), default=None)


def cost(variant: Variant, count: int, n: int) -> float:
    """Rows of the weight, times parts of K, that the busiest multiprocessor has; more where programs come in waves."""
    programs = variant.programs(count, n)
    waves = -(-programs // (PROCESSORS * variant.at_once))
    return -(-programs // PROCESSORS) * variant.rows / variant.splits * (1 + WAVE * (waves - 1))


def placed(variant: Variant, form: Form, count: int, n: int, k: int) -> Variant | None:
    """A variant as a product has room for it: steps, phases and stages at most its own, parts of K as many as gain.

    Where multiprocessors have room for twice as many programs, each is made two along K, a cluster.
    """
    steps = longest(form, k, variant.steps)
    # Warps that share rows take units in turn, which a short stage has fewer of.
    one = variant._replace(steps=steps, phases=min(variant.phases, steps * STEP // form.unit))
    stages = k // (STEP * steps)
    while (
        2 * one.splits <= MOST_SPLITS
        and 2 * one.programs(count, n) <= PROCESSORS * one.at_once
        and stages >= 2 * one.splits * STAGES_EACH
    ):
        one = one._replace(splits=2 * one.splits)
    return fitted(form, one, k)


__all__ = ["MOST_ROWS", "TILES", "choose", "cost", "placed"]
