"""Which variant of `sm90_sparse24_w4a16_gemv` a product gets: layers of a block of a model of 8 billion parameters, and small
weights.

Rules of measured times (reports/LOG.md, "Times that docstrings of the 2:4 kernels held"):

* Stages of 512 columns before those of 256; parts of K of at most eight stages.
* Two parts of K whose programs share a multiprocessor before all of K by one, as one multiplies while the other begins or ends;
  of fewer than three tiles each, one wave of twice as many. Else one wave, where the sums of its tiles fit.
* At 16 rows, whose x a warp reads long, few tiles are divided along K.
* 17 to 24 rows at once, in stages of 256 columns, before chunks of 16. More rows are chunks of 16, not of 24 or 32.

Two products of one x have the variant of one weight with the rows of both.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from fast.kernels.sm90_sparse24_w4a16_gemv.variants import (
    GATED,
    ONE,
    STAGES,
    TILE,
    Form,
    Variant,
    fitted,
    rows_of_tiles,
)
from fast.launch.hopper import AT_ONCE

#: Rows of x of a program at most: two tiles of the tensor core's 8.
MOST_ROWS = 16
#: Rows of x of a tile.
TOKENS = (8, 16)
#: Rows of x in chunks of MOST_ROWS at most: of more the dense weight is quicker.
MOST_CHUNKED = 64
#: Rows of x of programs that take three tiles of x at once.
THREE = 24
#: Columns of a stage of such programs.
THREE_COLUMNS = 256
#: Tiles of the weight that such a program has at most.
THREE_TILES = 16
#: Parts of K that such programs are tried with.
THREE_SPLITS = (1, 2, 4, 8)
#: Warps that such a program has at least.
THREE_WARPS = 7
#: Programs along K.
SPLITS = (1, 2, 4)
#: Tiles of programs that share a multiprocessor in many waves.
SHORT = 2
#: Tiles of each of two parts of K that share a multiprocessor in one wave, at least.
SEVERAL = 3
#: Tiles of the weight that a program has at most.
MOST_TILES = 16
#: Warps that programs have where they can, and the most of those that share a multiprocessor.
FEW_WARPS = 8


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to MOST_CHUNKED) and a weight (n, k); None where none divides k or fits.

    Chunks of MOST_ROWS rows have the variant of one of them by a weight of as many times the rows.
    """
    chunks = -(-count // MOST_ROWS)
    if chunks == 1:
        return next(candidates(form, count, n, k), None)
    if count <= THREE and form.products == ONE and (three := _of_three(form, n, k)) is not None:
        return three
    one = choose(form, MOST_ROWS, chunks * rows_of_tiles(n), k)
    if one is None:
        return None
    tiles = min(one.tiles, -(-n // TILE))
    return one._replace(chunks=chunks, tiles=tiles, ahead=min(one.ahead, tiles))


def _of_three(form: Form, n: int, k: int) -> Variant | None:
    """The variant for up to THREE rows at once whose programs have the fewest tiles one after the other; None: none fits."""
    found = {}
    for splits, tiles in product(THREE_SPLITS, range(1, THREE_TILES + 1)):
        one = fitted(form, THREE, THREE_COLUMNS, splits, tiles, k)
        if one is not None and one.phases >= THREE_WARPS and 4 * tiles % splits == 0:
            clusters = -(-n // (TILE * tiles))
            waves = -(-clusters // AT_ONCE[splits])
            found[one] = (waves * (tiles + 1), splits)
    return min(found, key=found.__getitem__, default=None)


def candidates(form: Form, count: int, n: int, k: int) -> Iterator[Variant]:
    """Variants whose programs have no more tiles than there are, what is preferred first; of a gate and what it gates an even
    number."""
    tokens, tiles = next(size for size in TOKENS if count <= size), -(-n // TILE)
    for columns in sorted(STAGES, reverse=True):
        for splits, (at_once, size) in _parted(tokens, k // columns, tiles):
            even = size + size % 2 if form.products == GATED else size
            one = fitted(form, tokens, columns, splits, even, k, at_once)
            if one is not None and (at_once == 1 or one.phases <= FEW_WARPS):
                yield one


def _parted(tokens: int, stages: int, tiles: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Programs along K, none without a stage, each with programs of a multiprocessor and tiles of a program."""
    if AT_ONCE[1] < tiles <= 2 * AT_ONCE[2] * MOST_TILES and 2 <= stages <= 2 * FEW_WARPS:
        shared = -(-tiles // (2 * AT_ONCE[2]))
        yield 2, ((2, shared) if shared >= SEVERAL else (1, -(-tiles // AT_ONCE[2])))
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
    fewer = range(min(wave - 1, MOST_TILES), 0, -1)
    yield from ((1, size) for size in sorted(fewer, key=lambda size: -(-tiles // (size * room)) * (size + 1)))
    yield from ((2, size) for size in range(min(wave, tiles, MOST_TILES), 0, -1))


__all__ = ["MOST_CHUNKED", "MOST_ROWS", "candidates", "choose"]
