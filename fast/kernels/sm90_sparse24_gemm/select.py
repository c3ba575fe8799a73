"""Which variant a shape gets: the shortest time by a model of one multiprocessor.

What a stage takes is the longest of three: the tensor core (an instruction of n tokens reads 64 n bytes of tokens and 2048 of
values from shared memory, 128 a cycle, and multiplies in n / 2 cycles), what the L2 cache delivers to a multiprocessor, and,
for the weight, what the memory does. The model only has to order variants. Its rates are fitted to measured times
(`reports/data/linear_sparse_times.json`) by `tests/gpu/sparsity/gemm.py`; the same times say how many clusters run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fast.cost import Coefficients, Time, quickest
from fast.kernels.sm90_sparse24_gemm.variants import PANEL, Variant, fitted
from fast.launch.hopper import MULTIPROCESSORS, at_once


class Rates(NamedTuple):
    """The constants of the model, in `coefficients.toml`.

    l2, memory: bytes a cycle that a multiprocessor gets from the L2 cache and from memory. multiply: cycles of the tensor core
    over those of its tables. begin, token: cycles that a tile costs besides its stages: to begin and end, and for each token
    of 64 features that a warpgroup writes. clock: of cycles a nanosecond, which changes no order.
    """

    l2: float
    memory: float
    multiply: float
    begin: float
    token: float
    clock: float


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


C = Coefficients("sm90_sparse24_gemm")


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, bits: int, promote: bool, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, K) and a weight of features, rows of x having `length` bytes."""
    times = (
        (one, cycles(one, tokens, features, length, bits, multiprocessors))
        for one in candidates(tokens, bits, promote)
    )
    return quickest(times)  # type: ignore[return-value]


def candidates(tokens: int, bits: int, promote: bool) -> Iterator[Variant]:
    """Variants whose tiles are no larger than the tokens ask for."""
    smallest = min(tile[0] for tile in C.tiles if tile[0] >= min(tokens, 256))
    for count, groups, panels in C.tiles if tokens <= 256 else C.tiles + C.wide:
        if count > smallest or (promote and count > 128) or (smallest > 128 and count < 128):
            continue
        for pair, splits in C.clusters:
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
    multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """How long all of a product takes, by the model."""
    return cycles_of(terms(one, tokens, features, length, bits, multiprocessors), rates())


def rates() -> Rates:
    """The constants that were fitted."""
    return Rates(**C.rates)


def cycles_of(parts: Terms, rates: Rates) -> float:
    """The sum of a product's parts."""
    stage = max(parts.multiplied * rates.multiply, parts.delivered / rates.l2, parts.read / rates.memory)
    return Time(parts.waves, parts.panels, stage, rates.begin + rates.token * parts.written).total


def terms(
    one: Variant, tokens: int, features: int, length: int, bits: int, multiprocessors: int = MULTIPROCESSORS
) -> Terms:
    """What a product by a variant is made of."""
    clusters = -(-tokens // one.tokens) * -(-features // (one.features * one.pair))
    waves = -(-clusters // at_once(one.cluster, multiprocessors))
    metadata = 1024 if bits == 8 else 512
    weight = one.groups * (64 * PANEL // 2 + metadata)
    instruction = max(one.tokens / 2, (64 * one.tokens + 2048) / 128) * (C.promoted if one.promote else 1)
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
    "Rates",
    "Terms",
    "candidates",
    "choose",
    "cycles",
    "cycles_of",
    "rates",
    "terms",
]
