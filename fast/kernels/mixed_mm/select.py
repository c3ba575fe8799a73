"""Which variant a shape gets: the shortest time by a model of rounds of tiles, fitted to times of an H100 (int4_g128).

A tile takes its stages, and with parts of K what it takes to add them; programs that do not fit the GPU at once make another
round. Pairs of programs save a little of every stage and cost at the beginning. The model only has to order variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fast.kernels.mixed_mm.variants import ATOM, FEATURES, Variant, Weight, fitted
from fast.kernels.sparse_mm.select import AT_ONCE, MULTIPROCESSORS

#: Nanoseconds of a stage of 64 columns, by the tokens of a tile.
STAGE = {128: 487.0, 192: 563.0, 256: 701.0}
#: Programs along the features and along K of a cluster.
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4))
#: Nanoseconds: of a tile without stages; of adding parts of K, and for each of its tokens; what pairs cost once, and their
#: stages over others.
TILE, PARTS, PART_TOKEN, PAIR, PAIRED = 70.0, 3000.0, 20.0, 3000.0, 0.985


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, length) and a weight (features, length)."""
    return min(
        candidates(tokens, length, weight),
        key=lambda one: nanoseconds(one, tokens, features, length, multiprocessors),
    )


def candidates(tokens: int, length: int, weight: Weight) -> Iterator[Variant]:
    """Variants with tiles no larger than the tokens ask for, and parts of K of whole pairs of stages."""
    largest = next((one for one in STAGE if one >= tokens), max(STAGE))
    for count in STAGE:
        for pair, splits in CLUSTERS:
            if count <= largest and splits <= length // (2 * ATOM):
                yield fitted(count, pair, splits, weight)


def nanoseconds(
    one: Variant, tokens: int, features: int, length: int, multiprocessors: int = MULTIPROCESSORS
) -> float:
    """How long all of a product takes, by the model."""
    stages = length / ATOM / one.splits * STAGE[one.tokens] * (PAIRED if one.pair > 1 else 1)
    added = PARTS + PART_TOKEN * one.tokens if one.splits > 1 else 0.0
    once = PAIR if one.pair > 1 else 0.0
    return rounds(one, tokens, features, multiprocessors) * (stages + TILE + added) + once


def rounds(one: Variant, tokens: int, features: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """How many tiles follow one another on the fullest multiprocessor."""
    clusters = -(-tokens // one.tokens) * -(-features // (FEATURES * one.pair))
    return -(-clusters // max(1, AT_ONCE[one.cluster] * multiprocessors // MULTIPROCESSORS))


__all__ = ["CLUSTERS", "STAGE", "candidates", "choose", "nanoseconds", "rounds"]
