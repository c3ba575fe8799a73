"""Which variant a shape gets: the shortest time by a model of the fullest multiprocessor, fitted to measured times.

A tile takes its stages, and with parts of K what it takes to add them. Persistent programs have tiles of one or two sizes
(`schedule.py`); with parts of K, programs that do not fit the GPU at once make another round. The model only has to order
variants (devices and times: reports/LOG.md, "Times that docstrings of `sm90_w4a16_gemm` held").
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fast.kernels.sm90_w4a16_gemm.schedule import grid_of, least_of, longest, scheduled
from fast.kernels.sm90_w4a16_gemm.variants import ATOM, FEATURES, Variant, Weight, fitted
from fast.launch.hopper import AT_ONCE, MULTIPROCESSORS

#: Rows up to which tiles are those of FEW: what one of its tiles holds.
MOST_FEW = 128
#: Tokens of tiles, for up to MOST_FEW rows.
FEW = (64, 96, 128)
#: Tokens of tiles, for more rows.
TILES = (128, 160, 192, 224, 256)
#: Tokens of small tiles beside those of TILES.
SMALL = (64, 128, 192)
#: Nanoseconds of a stage of 64 columns in a tile of 64, 128, 192 and 256 tokens, by what is decoded. Where zero points or
#: groups were not timed they are those of the element without, see `stage`.
STAGES = {
    Weight("int4"): (403.0, 494.0, 606.0, 701.0), Weight("int4", True): (426.0, 512.0, 631.0, 729.0),
    Weight("int4", False, 2): (370.0, 460.0, 566.0, 676.0), Weight("int4", True, 2): (447.0, 544.0, 659.0, 755.0),
    Weight("int8"): (384.0, 466.0, 576.0, 674.0), Weight("e4m3"): (343.0, 438.0, 553.0, 677.0),
    Weight("e2m1", False, 2): (359.0, 462.0, 540.0, 689.0), Weight("e2m1", False, 4): (452.0, 541.0, 633.0, 734.0),
    Weight("e4m3_mx", False, 2): (364.0, 444.0, 530.0, 655.0), Weight("nf4"): (380.0, 503.0, 623.0, 736.0),
}  # fmt: skip
#: Programs along the features and along K of a cluster.
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4))
#: Nanoseconds of a tile without stages.
TILE = 70.0
#: Nanoseconds of adding parts of K.
PARTS = 2000.0
#: Nanoseconds of adding parts of K, for each token of the tile.
PART_TOKEN = 20.0
#: Nanoseconds that pairs of programs cost once.
PAIR = 3000.0
#: Time of two sizes of tiles in one kernel over that of one size.
MIXED = 1.02
#: Nanoseconds of a stage that warpgroups which take turns save.
TURNED = 27.0


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, length) and a weight (features, length)."""
    best, least = None, float("inf")
    # Those of one size first: they say which of the others need not be looked at.
    for one in sorted(candidates(tokens, length, weight), key=lambda one: one.small > 0):
        if one.small and bound(one, tokens, features, length, weight, multiprocessors) >= least:
            continue
        taken = nanoseconds(one, tokens, features, length, weight, multiprocessors)
        if taken < least:
            best, least = one, taken
    if best is None:
        raise ValueError(
            f"no variant takes {tokens} rows of {length} columns; `fast.gemm.families` says what it takes"
        )
    return best


def bound(
    one: Variant, tokens: int, features: int, length: int, weight: Weight, multiprocessors: int
) -> float:
    """What a variant with small tiles is no quicker than, by the model, whatever the schedule."""
    grid = grid_of(one, tokens, features, at_once(one, multiprocessors))
    return least_of(grid, *(tile(one, each, length, weight) for each in (one.tokens, one.small))) * MIXED


def candidates(tokens: int, length: int, weight: Weight) -> Iterator[Variant]:
    """Variants with tiles no larger than the tokens ask for, and parts of K of whole pairs of stages; and those with small
    tiles, which have neither parts nor pairs."""
    tiles = FEW if tokens <= MOST_FEW else TILES
    largest = next((one for one in tiles if one >= tokens), max(tiles))
    for count in tiles:
        for pair, splits in CLUSTERS:
            if count <= largest and splits <= length // (2 * ATOM):
                turns = turns_of(tokens, count, pair * splits, weight)
                yield fitted(count, pair, splits, weight, turns=turns)
        for small in SMALL if tokens > MOST_FEW else ():
            if small < count <= largest:
                yield fitted(count, 1, 1, weight, small)


def turns_of(tokens: int, tile: int, cluster: int, weight: Weight) -> int:
    """Warpgroups that take turns: 2 where few rows meet programs without neighbours, but for int4 in tiles of 128, which gain
    nothing by it (times: reports/LOG.md)."""
    return 2 if tokens <= MOST_FEW and cluster == 1 and (tile < 128 or weight.element != "int4") else 1


def nanoseconds(
    one: Variant,
    tokens: int,
    features: int,
    length: int,
    weight: Weight,
    multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """How long all of a product takes, by the model."""
    whole, once = tile(one, one.tokens, length, weight), PAIR if one.pair > 1 else 0.0
    if one.splits > 1:
        return rounds(one, tokens, features, multiprocessors) * whole + once
    grid = grid_of(one, tokens, features, at_once(one, multiprocessors))
    if not one.small:
        return longest(grid, scheduled(grid, 1.0), whole, whole) + once
    small = tile(one, one.small, length, weight)
    return longest(grid, scheduled(grid, ratio_of(one, weight)), whole, small) * MIXED + once


def tile(one: Variant, tokens: int, length: int, weight: Weight) -> float:
    """Nanoseconds of a tile of as many tokens."""
    added = PARTS + PART_TOKEN * tokens if one.splits > 1 else 0.0
    each = stage(tokens, weight) - (TURNED if one.turns > 1 else 0.0)
    return length / ATOM / one.splits * each + TILE + added


def stage(tokens: int, weight: Weight) -> float:
    """Nanoseconds of a stage, on a line between those that were timed."""
    near = weight, weight._replace(zero=False), Weight(weight.element)
    times = next(STAGES[one] for one in near if one in STAGES)
    first = min(2, max(0, tokens // 64 - 1))
    return times[first] + (times[first + 1] - times[first]) * (tokens / 64 - 1 - first)


def ratio_of(one: Variant, weight: Weight) -> float:
    """The time of a small tile over that of a whole one."""
    return stage(one.small or one.tokens, weight) / stage(one.tokens, weight)


def at_once(one: Variant, multiprocessors: int) -> int:
    """Clusters that run at once."""
    return max(1, AT_ONCE[one.cluster] * multiprocessors // MULTIPROCESSORS)


def rounds(one: Variant, tokens: int, features: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """How many tiles follow one another on the fullest multiprocessor."""
    clusters = -(-tokens // one.tokens) * -(-features // (FEATURES * one.pair))
    return -(-clusters // at_once(one, multiprocessors))


__all__ = [
    "CLUSTERS",
    "FEW",
    "SMALL",
    "STAGES",
    "TILES",
    "TURNED",
    "candidates",
    "choose",
    "nanoseconds",
    "ratio_of",
    "rounds",
    "stage",
    "turns_of",
]
