"""Which variant a shape gets: the shortest time by a model of one multiprocessor.

What a stage takes is the longest of three: the tensor core (an instruction of n tokens reads 64 n bytes of tokens and 2048 of
values from shared memory, 128 a cycle, and multiplies in n / 2 cycles), what the L2 cache delivers to a multiprocessor, and,
for the weight, what the memory does. The model only has to order variants. `RATES` are fitted to measured
times (`reports/data/linear_sparse_times.json`) by `tests/gpu/sparsity/gemm.py`; the same times say how many
clusters run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fast.kernels.sm90_sparse24_gemm.variants import PANEL, Variant, fitted
from fast.launch.hopper import AT_ONCE, MULTIPROCESSORS


class Rates(NamedTuple):
    """The constants of the model.

    l2, memory: bytes a cycle that a multiprocessor gets from the L2 cache and from memory. multiply: cycles of the tensor core
    over those of its tables. begin, token: cycles that a tile costs besides its stages: to begin and end, and for each token
    of 64 features that a warpgroup writes. clock: of cycles a nanosecond, which changes no order.
    """

    l2: float = 35.5
    memory: float = 18.2
    multiply: float = 1.42
    begin: float = 6370.0
    token: float = 9.4
    clock: float = 1.7


class Terms(NamedTuple):
    """What a product by a variant is made of. waves: of tiles one after the other. panels: of a tile.

    multiplied: cycles of the tensor core for a panel. delivered, read: bytes of a panel that a multiprocessor gets from the L2
    cache, and from memory. written: tokens that a tile's warpgroups write, twice where parts of K are added first.
    """

    waves: int
    panels: int
    multiplied: float
    delivered: float
    read: float
    written: int


RATES = Rates()
#: Tokens of a tile, with the warpgroups and the panels of a stage.
TILES = ((16, 1, 2), (16, 2, 2), (32, 1, 2), (32, 2, 2), (64, 1, 2), (64, 2, 2), (128, 2, 1), (256, 2, 1))
#: Further tiles where there are more tokens than in any: of 13008 tokens and 1024 features the last of four waves has 12 tiles
#: of 256; four waves of tiles of 208 hold all. At most two programs share tokens: a share is whole repeats of the swizzle.
WIDE = ((192, 2, 1), (208, 2, 1), (224, 2, 1), (240, 2, 1))
#: Programs along the features and along K of clusters, which have at most eight.
CLUSTERS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2))


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, bits: int, promote: bool, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, K) and a weight of features, rows of x having `length` bytes."""
    return min(
        candidates(tokens, bits, promote),
        key=lambda one: cycles(one, tokens, features, length, bits, multiprocessors),
    )


def candidates(tokens: int, bits: int, promote: bool) -> Iterator[Variant]:
    """Variants whose tiles are no larger than the tokens ask for."""
    smallest = min(tile[0] for tile in TILES if tile[0] >= min(tokens, 256))
    for count, groups, panels in TILES if tokens <= 256 else TILES + WIDE:
        if count > smallest or (promote and count > 128) or (smallest > 128 and count < 128):
            continue
        for pair, splits in CLUSTERS:
            if count // pair < 8 or (splits > 1 and count > 128) or (pair > 2 and 128 < count < 256):
                continue
            # Sums are promoted after 128 elements of 8 bits: one panel.
            yield fitted(count, groups, 1 if promote else panels, pair, splits, bits, promote=promote)


def cycles(
    one: Variant,
    tokens: int,
    features: int,
    length: int,
    bits: int,
    multiprocessors: int,
    rates: Rates = RATES,
) -> float:
    """How long all of a product takes, by the model."""
    return cycles_of(terms(one, tokens, features, length, bits, multiprocessors), rates)


def cycles_of(parts: Terms, rates: Rates) -> float:
    """The sum of a product's parts."""
    stage = max(parts.multiplied * rates.multiply, parts.delivered / rates.l2, parts.read / rates.memory)
    return parts.waves * (parts.panels * stage + rates.begin + rates.token * parts.written)


def terms(one: Variant, tokens: int, features: int, length: int, bits: int, multiprocessors: int) -> Terms:
    """What a product by a variant is made of."""
    clusters = -(-tokens // one.tokens) * -(-features // (one.features * one.pair))
    at_once = max(1, AT_ONCE[one.cluster] * multiprocessors // MULTIPROCESSORS)
    waves = -(-clusters // at_once)
    metadata = 1024 if bits == 8 else 512
    weight = one.groups * (64 * PANEL // 2 + metadata)
    instruction = max(one.tokens / 2, (64 * one.tokens + 2048) / 128) * (1.15 if one.promote else 1)
    # Programs that are at work, in the mean of the waves, share the memory; one row of tiles reads the weight once.
    working = clusters * one.cluster / waves
    return Terms(
        waves=waves,
        panels=-(-length // (PANEL * one.splits)),
        multiplied=one.groups * 2 * instruction,
        delivered=one.tokens * PANEL / one.pair + weight,
        read=weight * working / multiprocessors / min(-(-tokens // one.tokens), 8),
        written=one.tokens * (1 if one.splits == 1 else 2),
    )


__all__ = [
    "MULTIPROCESSORS",
    "RATES",
    "Rates",
    "Terms",
    "candidates",
    "choose",
    "cycles",
    "cycles_of",
    "terms",
]
