"""Which variant a product gets: the shortest time by a model of one multiprocessor of an H200, which no times were fitted to.

A multiprocessor gets its programs' weights and x from the second-level cache, and all of them the weight from the memory, while
warps decode and multiply what is there, by the instructions that the compiler makes. What is not hidden: the last tile, the
addition of parts of K, and the beginning of programs that wait for others to end.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from fast.kernels.sparse_mm.select import AT_ONCE
from fast.kernels.sparse_skinny.variants import STAGES, TILE, Form, Variant, fitted

#: The most rows of x, and those of a tile.
MOST_ROWS, TOKENS = 16, (8, 16)
#: Programs along K, and programs of a multiprocessor, that are tried; the most tiles.
SPLITS, PROGRAMS, MOST_TILES = (1, 2, 4), (1, 2), 16
#: Bytes a nanosecond of the memory, and of the second-level cache for one multiprocessor; its cycles a nanosecond.
MEMORY, CACHE, CLOCK = 4200.0, 50.0, 1.7
#: Instructions of 16 rows by 32 columns, and for each 8 tokens more; instructions a cycle; warps that have so many.
DECODING, EACH_TOKENS, RATE, BUSY = 20.0, 4.0, 2.8, 12
#: Nanoseconds of adding parts of K, and of programs that begin when others have ended.
PARTS, AGAIN = {1: 0.0, 2: 500.0, 4: 1200.0}, 1500.0


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none divides k or fits."""
    return min(
        candidates(form, count, n, k), key=lambda one: nanoseconds(one, form, count, n, k), default=None
    )


def candidates(form: Form, count: int, n: int, k: int) -> Iterator[Variant]:
    """Variants whose programs have no more tiles than there are."""
    tokens = next(size for size in TOKENS if count <= size)
    for columns, splits, at_once in product(STAGES, SPLITS, PROGRAMS):
        if splits > k // columns:
            continue
        for tiles in range(1, min(MOST_TILES, -(-n // TILE)) + 1):
            one = fitted(form, tokens, columns, splits, tiles, k, at_once)
            if one is not None:
                yield one


def nanoseconds(one: Variant, form: Form, count: int, n: int, k: int) -> float:
    """How long a product takes, by the model."""
    room, programs = AT_ONCE[one.splits] * one.splits, one.programs(n)
    side_by_side = min(one.at_once, -(-programs // room))
    waves = -(-programs // (room * one.at_once))
    tile = one.phases * form.part(one.columns)
    tiles = waves * side_by_side * one.tiles
    brought = tiles * tile + waves * side_by_side * 2 * count * k // one.splits
    stored = n * k // TILE // one.columns * form.part(one.columns)
    products = one.phases * one.columns // 32
    warps = side_by_side * one.phases
    cycles = products * (DECODING + EACH_TOKENS * one.tokens / 8) / RATE * max(1.0, BUSY / warps)
    hidden = max(stored / MEMORY, brought / CACHE, tiles * cycles / CLOCK)
    return hidden + side_by_side * cycles / CLOCK + PARTS[one.splits] + (waves - 1) * AGAIN


__all__ = ["MOST_ROWS", "candidates", "choose", "nanoseconds"]
