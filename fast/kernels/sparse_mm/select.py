"""Which variant a shape gets: the shortest time by a model of one multiprocessor, whose rates are those of an H200.

What a stage takes is the longest of three: the tensor core (an instruction of n tokens reads 64 n bytes of tokens and 2048 of
values from shared memory, 128 a cycle, and multiplies in n / 2 cycles), what the L2 cache delivers to a multiprocessor, and,
for the weight, what the memory does. The model only has to order variants; the GPU script measures all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fast.kernels.sparse_mm.variants import PANEL, Variant, fitted

#: Bytes a cycle that a multiprocessor gets from the L2 cache and from memory, and cycles that a tile costs besides its stages:
#: to begin and end, and for each token of 64 features that a warpgroup writes.
L2, MEMORY, BEGIN, TOKEN = 30.0, 19.0, 3000.0, 12.0
#: Tokens of a tile, with the warpgroups and the panels of a stage.
TILES = ((16, 1, 2), (16, 2, 2), (32, 1, 2), (32, 2, 2), (64, 1, 2), (64, 2, 2), (128, 2, 1), (256, 2, 1))
#: Programs along the features and along K of clusters, which have at most eight.
CLUSTERS = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2))


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, bits: int, promote: bool, multiprocessors: int = 132
) -> Variant:
    """The variant for x (tokens, K) and a weight of features, rows of x having `length` bytes."""
    return min(
        candidates(tokens, bits, promote),
        key=lambda one: cycles(one, tokens, features, length, bits, multiprocessors),
    )


def candidates(tokens: int, bits: int, promote: bool) -> Iterator[Variant]:
    """Variants whose tiles are no larger than the tokens ask for."""
    smallest = min(tile[0] for tile in TILES if tile[0] >= min(tokens, 256))
    for count, groups, panels in TILES:
        if count > smallest or (promote and count == 256) or (smallest > 128 and count < 128):
            continue
        for pair, splits in CLUSTERS:
            if count // pair < 8 or (splits > 1 and count == 256):
                continue
            # Sums are promoted after 128 elements of 8 bits: one panel.
            yield fitted(count, groups, 1 if promote else panels, pair, splits, bits, promote=promote)


def cycles(one: Variant, tokens: int, features: int, length: int, bits: int, multiprocessors: int) -> float:
    """How long all of a product takes, by the model."""
    clusters = -(-tokens // one.tokens) * -(-features // (one.features * one.pair))
    # A cluster lies in one of a Hopper's groups of 16 or 18 multiprocessors: larger ones leave two of some unused.
    at_once = max(1, (multiprocessors if one.cluster <= 2 else multiprocessors // 8 * 8) // one.cluster)
    waves = -(-clusters // at_once)
    metadata = 1024 if bits == 8 else 512
    weight = one.groups * (64 * PANEL // 2 + metadata)
    multiplied = (
        one.groups * 2 * max(one.tokens / 2, (64 * one.tokens + 2048) / 128) * (1.15 if one.promote else 1)
    )
    delivered = (one.tokens * PANEL / one.pair + weight) / L2
    # Programs that are at work share the memory; one row of tiles reads the weight once.
    working = min(clusters, at_once) * one.cluster
    from_memory = weight * working / multiprocessors / MEMORY / min(-(-tokens // one.tokens), 8)
    panels = -(-length // (PANEL * one.splits))
    ends = BEGIN + TOKEN * one.tokens * (1 if one.splits == 1 else 2)
    return waves * (panels * max(multiplied, delivered, from_memory) + ends)


__all__ = ["candidates", "choose", "cycles"]
