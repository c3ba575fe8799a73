"""Which variant a product gets: the shortest time by a model of one multiprocessor of an H200, which no times were fitted to.

A multiprocessor reads its programs' weights and rows of x, and its share of the memory's rate; beside that warps read what
was copied from shared memory, 128 bytes a cycle: of 16 rows by 32 columns three times that of codes and metadata, and of x four
times for 8 tokens, which serve all tiles of a warp. The shorter of both is hidden but for a part. What else costs: rounds, which
begin when the one `ahead` rounds before is there, and their barriers; parts of K; programs behind others; few warps.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from fast.kernels.sparse_skinny.variants import STAGES, TILE, Form, Variant, fitted, rounds_of

#: The most rows of x, and those of a tile.
MOST_ROWS, TOKENS = 16, (8, 16)
#: Tiles of a warp, warps across rows, phases and parts of K that are tried; warps of a program.
HEIGHTS, SLABS, PHASES, SPLITS, WARPS = (1, 2, 4, 7), (1, 2, 4, 7), (1, 2, 4, 7, 8, 14, 16), (1, 2), (4, 28)
#: Multiprocessors; bytes a nanosecond of the memory for one of them, and from the second-level cache; cycles a nanosecond.
MULTIPROCESSORS, MEMORY, CACHE, CLOCK = 132, 31.8, 50.0, 1.7
#: What is not hidden; nanoseconds of a round's barrier, of adding two parts of K, from a copy's beginning to its end, of programs
#: that begin when others have ended; warps that keep a multiprocessor busy.
EXPOSED, ROUND, PARTS, LATENCY, AGAIN, BUSY = 0.4, 120.0, 600.0, 700.0, 1500.0, 12


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none divides k or fits."""
    return min(
        candidates(form, count, n, k), key=lambda one: nanoseconds(one, form, count, n, k), default=None
    )


def candidates(form: Form, count: int, n: int, k: int) -> Iterator[Variant]:
    """Variants with one or two programs on a multiprocessor."""
    tokens = next(size for size in TOKENS if count <= size)
    for columns, height, slabs, phases, splits in product(STAGES, HEIGHTS, SLABS, PHASES, SPLITS):
        if not WARPS[0] <= slabs * phases <= WARPS[1] or phases * splits > max(1, k // columns):
            continue
        for at_once in (1, 2):
            one = fitted(form, (tokens, columns, height, slabs, phases, splits), count, k, at_once)
            if one is not None:
                yield one


def nanoseconds(one: Variant, form: Form, count: int, n: int, k: int) -> float:
    """How long a product takes, by the model."""
    waves = -(-one.programs(n) // MULTIPROCESSORS)
    rounds = rounds_of(k, one.columns, one.phases, one.splits)
    # Tiles by stages of the programs of a multiprocessor: of all phases in the longest part of K.
    tiles = waves * rounds * one.phases * one.slabs * one.height
    inputs = waves * 2 * count * k // one.splits
    weight = n * k // TILE // one.columns * form.tile(one.columns)
    read = max(weight / MULTIPROCESSORS / MEMORY, (tiles * form.tile(one.columns) + inputs) / CACHE)
    products, columns = tiles * one.columns // 32, one.tokens // 8
    used = products * (3 + 4 * columns / one.height) / CLOCK
    if one.ahead < rounds:
        read = max(read, (rounds * LATENCY + read) / one.ahead)
    warps = min(waves, one.at_once) * one.slabs * one.phases
    hidden = max(read, used * max(1.0, BUSY / warps)) + EXPOSED * min(read, used)
    again = -(-one.programs(n) // (one.at_once * MULTIPROCESSORS)) - 1
    return hidden + rounds * ROUND + (one.splits - 1) * PARTS + again * AGAIN


__all__ = ["MOST_ROWS", "candidates", "choose", "nanoseconds"]
