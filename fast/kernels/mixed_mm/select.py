"""Which variant a shape gets: the shortest time by a model of one multiprocessor.

What a stage takes is the longest of three: the tensor core (an instruction of n tokens multiplies in n / 2 cycles), the decoding
of the weight, which other warpgroups' products hide, and what the L2 cache delivers. The model only has to order variants.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fast.kernels.mixed_mm.variants import ATOM, FEATURES, GROUPS, PANEL, Variant, Weight, fitted
from fast.kernels.sparse_mm.select import AT_ONCE, MULTIPROCESSORS

#: Tokens of a tile, and programs along the features and along K of a cluster.
TOKENS = (128, 192, 256)
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4))


class Rates(NamedTuple):
    """The constants of the model, in cycles of a multiprocessor.

    l2: bytes a cycle from the L2 cache. multiply: of the tensor core over those of its tables. decode: of a warpgroup's stage.
    begin, token: what a tile costs besides its stages: to begin and end, and for each token that it writes.
    """

    l2: float = 35.5
    multiply: float = 1.1
    decode: float = 300.0
    begin: float = 4000.0
    token: float = 9.4


RATES = Rates()


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, length) and a weight (features, length)."""
    return min(
        candidates(tokens, length, weight),
        key=lambda one: cycles(one, tokens, features, length, weight, multiprocessors),
    )


def candidates(tokens: int, length: int, weight: Weight) -> Iterator[Variant]:
    """Variants with tiles no larger than the tokens ask for, and parts of K of whole pairs of stages."""
    largest = next((one for one in TOKENS if one >= tokens), TOKENS[-1])
    for count in TOKENS:
        for pair, splits in CLUSTERS:
            if count <= largest and splits <= length // (2 * ATOM):
                yield fitted(count, pair, splits, weight)


def cycles(
    one: Variant, tokens: int, features: int, length: int, weight: Weight, multiprocessors: int
) -> float:
    """How long all of a product takes, by the model."""
    clusters = -(-tokens // one.tokens) * -(-features // (FEATURES * one.pair))
    at_once = max(1, AT_ONCE[one.cluster] * multiprocessors // MULTIPROCESSORS)
    waves = -(-clusters // at_once)
    stages = -(-length // (ATOM * one.splits))
    delivered = (one.tokens * PANEL / one.pair + weight.stage) / RATES.l2
    stage = max(GROUPS * 2 * one.tokens * RATES.multiply, delivered, GROUPS * RATES.decode)
    return waves * (stages * stage + RATES.begin + RATES.token * one.tokens * (1 if one.splits == 1 else 2))


__all__ = ["CLUSTERS", "RATES", "TOKENS", "Rates", "candidates", "choose", "cycles"]
