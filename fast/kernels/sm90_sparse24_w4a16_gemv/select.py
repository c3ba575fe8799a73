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

from fast.cost import Coefficients, Time, quickest
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

C = Coefficients("sm90_sparse24_w4a16_gemv")
#: Rows of x of a program at most: two tiles of the tensor core's 8.
MOST_ROWS = 16
#: Rows of x of a tile.
TOKENS = (8, 16)


@lru_cache(maxsize=1024)
def choose(form: Form, count: int, n: int, k: int) -> Variant | None:
    """The variant for `count` rows of x (1 to 64) and a weight (n, k); None where none divides k or fits.

    Chunks of MOST_ROWS rows have the variant of one of them by a weight of as many times the rows.
    """
    chunks = -(-count // MOST_ROWS)
    if chunks == 1:
        return next(candidates(form, count, n, k), None)
    if count <= C.three["rows"] and form.products == ONE and (three := _of_three(form, n, k)) is not None:
        return three
    one = choose(form, MOST_ROWS, chunks * rows_of_tiles(n), k)
    if one is None:
        return None
    tiles = min(one.tiles, -(-n // TILE))
    return one._replace(chunks=chunks, tiles=tiles, ahead=min(one.ahead, tiles))


def _of_three(form: Form, n: int, k: int) -> Variant | None:
    """The variant for three tiles of rows at once whose programs have the fewest tiles in turn; None where none fits."""
    times, three = [], C.three
    for splits, tiles in product(three["splits"], range(1, three["tiles"] + 1)):
        one = fitted(form, three["rows"], three["columns"], splits, tiles, k)
        if one is not None and one.phases >= three["warps"] and 4 * tiles % splits == 0:
            clusters = -(-n // (TILE * tiles))
            times.append((one, Time(-(-clusters // AT_ONCE[splits]), tiles, 1, 1).total))
    return quickest(times)


def candidates(form: Form, count: int, n: int, k: int) -> Iterator[Variant]:
    """Variants whose programs have no more tiles than there are, what is preferred first; of a gate and what it gates an even
    number."""
    tokens, tiles = next(size for size in TOKENS if count <= size), -(-n // TILE)
    for columns in sorted(STAGES, reverse=True):
        for splits, (at_once, size) in _parted(tokens, k // columns, tiles):
            even = size + size % 2 if form.products == GATED else size
            one = fitted(form, tokens, columns, splits, even, k, at_once)
            if one is not None and (at_once == 1 or one.phases <= C.warps):
                yield one


def _parted(tokens: int, stages: int, tiles: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Programs along K, none without a stage, each with programs of a multiprocessor and tiles of a program."""
    if AT_ONCE[1] < tiles <= 2 * AT_ONCE[2] * C.most_tiles and 2 <= stages <= 2 * C.warps:
        shared = -(-tiles // (2 * AT_ONCE[2]))
        yield 2, ((2, shared) if shared >= C.several else (1, -(-tiles // AT_ONCE[2])))
    least = 2 if tokens == TOKENS[1] and tiles <= AT_ONCE[2] else 1
    for splits in sorted(C.splits, key=lambda one: (-(-stages // one) > C.warps, one < least, one)):
        if splits <= stages:
            yield from ((splits, sizes) for sizes in _sizes(tokens, splits, tiles))


def _sizes(tokens: int, splits: int, tiles: int) -> Iterator[tuple[int, int]]:
    """Programs of a multiprocessor, and tiles of a program."""
    room = AT_ONCE[splits]
    wave, two = -(-tiles // room), tokens == TOKENS[0] and splits == 1
    if two and wave <= 2:
        yield 2, 1
    if wave <= C.most_tiles:
        yield 1, wave
    if two and tiles >= C.short:
        yield 2, C.short
    fewer = range(min(wave - 1, C.most_tiles), 0, -1)
    yield from ((1, size) for size in sorted(fewer, key=lambda size: -(-tiles // (size * room)) * (size + 1)))
    yield from ((2, size) for size in range(min(wave, tiles, C.most_tiles), 0, -1))


__all__ = ["MOST_ROWS", "C", "candidates", "choose"]
