"""Which tiles of `linear_bits` a product gets."""

from __future__ import annotations

from functools import lru_cache

from fast.kernels.linear_bits.variants import Form, Variant, fitted, longest

MOST_ROWS = 128
#: Multiprocessors; programs that all of them should have, two each, as one waits for its copies while the other multiplies.
PROCESSORS, FULL = 132, 200
#: Parts of K at most, and stages that each should have.
MOST_SPLITS, STAGES_EACH = 4, 8
#: By rows of x at most: tokens, slabs, height, phases, steps of a stage, stages, programs of a multiprocessor. With few rows the
#: weight is all that is read, and small programs fill the last wave; with more each program reads all rows of x through the L2
#: cache, so programs get taller. A warp of 32 rows halves what is read of x in shared memory.
TILES = (
    (2, (8, 1, 1, 8, 4, 4, 4)),
    (8, (8, 2, 1, 4, 2, 4, 3)),
    (16, (16, 4, 1, 2, 2, 4, 2)),
    (32, (32, 4, 1, 2, 2, 3, 2)),
    (128, (64, 4, 2, 1, 1, 3, 2)),
)  # fmt: skip


@lru_cache(maxsize=4096)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none takes it.

    Where tiles are fewer than FULL, parts of K are programs of their own, a cluster.
    """
    tokens, slabs, height, phases, steps, stages, at_once = next(
        tile for most, tile in TILES if count <= most
    )
    steps = longest(form, k, steps)
    # Warps that share rows take units in turn, which a short stage has fewer of.
    phases = min(phases, steps * 128 // (32 if form.group == 32 else 64))
    one = Variant(tokens, slabs, height, phases, 1, steps, stages, at_once)
    splits = 1
    while (
        2 * splits <= MOST_SPLITS
        and one.programs(count, n) * splits < FULL
        and k // (128 * steps) >= 2 * splits * STAGES_EACH
    ):
        splits *= 2
    return fitted(form, one._replace(splits=splits), k) or fitted(form, one._replace(splits=splits, at_once=1), k)


__all__ = ["MOST_ROWS", "TILES", "choose"]
