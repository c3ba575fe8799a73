"""Which variant a product gets: as measured on an H100 (int4 in groups of 128; 1 to 16 rows; four shapes of a model of 8
billion parameters, up to 14 variants each).

Stages of 512 columns before those of 256; parts of K of at most eight stages: 12.7 us of (4096, 14336) at eight rows in four
parts of seven, 13.4 in two of fourteen. One wave of programs, each with a multiprocessor of its own: 10.4 us of (14336, 4096)
at one row, 11.4 in two waves of two programs at once. Two at once where that is all there is, and in many waves. At 16 rows,
whose x a warp reads long, few tiles are divided along K: 4.2 us of (1024, 4096), else 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fast.kernels.sparse_mm.select import AT_ONCE
from fast.kernels.sparse_skinny.variants import STAGES, TILE, Form, Variant, fitted

#: The most rows of x, and those of a tile.
MOST_ROWS, TOKENS = 16, (8, 16)
#: Programs along K, and tiles of programs that share a multiprocessor in many waves; the most tiles.
SPLITS, SHORT, MOST_TILES = (1, 2, 4), 2, 16
#: Warps that programs have where they can, and the most of those that share a multiprocessor.
FEW_WARPS = 8


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_ROWS) and a weight (n, k); None where none divides k or fits."""
    return next(candidates(form, count, n, k), None)


def candidates(form: Form, count: int, n: int, k: int) -> Iterator[Variant]:
    """Variants whose programs have no more tiles than there are, what is preferred first."""
    tokens, tiles = next(size for size in TOKENS if count <= size), -(-n // TILE)
    for columns in sorted(STAGES, reverse=True):
        for splits, (at_once, size) in _parted(tokens, k // columns, tiles):
            one = fitted(form, tokens, columns, splits, size, k, at_once)
            if one is not None and (at_once == 1 or one.phases <= FEW_WARPS):
                yield one


def _parted(tokens: int, stages: int, tiles: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Programs along K, none without a stage, each with programs of a multiprocessor and tiles of a program."""
    least = 2 if tokens == TOKENS[1] and tiles <= AT_ONCE[2] else 1
    for splits in sorted(SPLITS, key=lambda one: (-(-stages // one) > FEW_WARPS, one < least, one)):
        if splits <= stages:
            yield from ((splits, sizes) for sizes in _sizes(tokens, splits, tiles))


def _sizes(tokens: int, splits: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Programs of a multiprocessor, and tiles of a program."""
    room = AT_ONCE[splits]
    wave, two = -(-tiles // room), tokens == TOKENS[0] and splits == 1
    if two and wave <= 2:
        yield 2, 1
    if wave <= MOST_TILES:
        yield 1, wave
    if two and tiles >= SHORT:
        yield 2, SHORT
    yield from ((1, size) for size in range(min(wave - 1, MOST_TILES), 0, -1))
    yield from ((2, size) for size in range(min(wave, tiles, MOST_TILES), 0, -1))


__all__ = ["MOST_ROWS", "candidates", "choose"]
