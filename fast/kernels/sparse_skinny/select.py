"""Which variant a product gets: as measured on an H100 (int4 in groups of 128; 1 to 16 rows; four shapes of a model of 8
billion parameters, up to 14 variants each).

Stages of 512 columns before those of 256, as few parts of K as warps allow. Up to 8 rows by all of K, two programs a
multiprocessor of one or two tiles each, in several waves where there are many: 13.5 us of (14336, 4096) at one row, where one
wave of seven tiles takes 14.8, since programs that begin bring what others have not multiplied yet. Else one wave: two would
read x again and wait for their clusters.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from fast.kernels.sparse_mm.select import AT_ONCE
from fast.kernels.sparse_skinny.variants import STAGES, TILE, Form, Variant, fitted

#: The most rows of x, and those of a tile.
MOST_ROWS, TOKENS = 16, (8, 16)
#: Programs along K, and tiles of programs that share a multiprocessor; the most tiles.
SPLITS, SHORT, MOST_TILES = (1, 2, 4), 2, 16
#: Warps of programs that share a multiprocessor.
FEW_WARPS = 8


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none divides k or fits."""
    return next(candidates(form, count, n, k), None)


def candidates(form: Form, count: int, n: int, k: int) -> Iterator[Variant]:
    """Variants whose programs have no more tiles than there are, what is preferred first."""
    tokens, tiles = next(size for size in TOKENS if count <= size), -(-n // TILE)
    for columns, splits in product(sorted(STAGES, reverse=True), SPLITS):
        if splits > k // columns:
            continue
        for at_once, size in _sizes(tokens, splits, tiles):
            one = fitted(form, tokens, columns, splits, size, k, at_once)
            if one is not None and (at_once == 1 or one.phases <= FEW_WARPS):
                yield one


def _sizes(tokens: int, splits: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Programs of a multiprocessor, and tiles of a program."""
    room = AT_ONCE[splits]
    if tokens == TOKENS[0] and splits == 1:
        short = 1 if tiles <= 2 * room else SHORT
        yield from ((2, size) for size in dict.fromkeys((short, SHORT, 1, 2 * SHORT)) if size <= tiles)
    wave = min(-(-tiles // room), MOST_TILES)
    yield from ((1, size) for size in range(wave, 0, -1))
    yield from ((2, size) for size in range(min(wave, tiles), 0, -1))


__all__ = ["MOST_ROWS", "candidates", "choose"]
