"""Which variant a shape gets: the shortest time by a model of rounds of tiles, fitted to times of an H100 (int4_g128).

A tile takes its stages, and with parts of K what it takes to add them; programs that do not fit the GPU at once make another
round, unless the last tiles are divided. Pairs of programs save a little of every stage and cost at the beginning. The model only
has to order variants. What divided tiles cost was not timed yet: it is what 131072 bytes of sums take at 50 bytes a nanosecond,
and a launch that clears their marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fast.kernels.mixed_mm.plan import Plan, plans
from fast.kernels.mixed_mm.variants import ATOM, Variant, Weight, fitted
from fast.kernels.sparse_mm.select import AT_ONCE, MULTIPROCESSORS

#: Nanoseconds of a stage of 64 columns, by the tokens of a tile.
STAGE = {128: 487.0, 192: 563.0, 256: 701.0}
#: Instructions of a warp in a stage, as they were counted: where tiles are narrow they are what takes time, and elements of more
#: than int4 take as much longer.
INSTRUCTIONS = {
    Weight("int4"): 183, Weight("int4", False, 2): 185, Weight("int4", True): 197, Weight("int4", True, 2): 216,
    Weight("int8"): 186, Weight("int8", False, 2): 183, Weight("int8", True): 199, Weight("int8", True, 2): 206,
    Weight("e4m3"): 218, Weight("e4m3", False, 2): 216, Weight("e2m1", False, 2): 148, Weight("e2m1", False, 4): 210,
    Weight("e4m3_mx", False, 2): 149,
}  # fmt: skip
INT4 = Weight("int4")
#: Programs along the features and along K of a cluster.
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (2, 4))
#: Nanoseconds: of a tile without stages; of adding parts of K, and for each of its tokens; what pairs cost once, and their
#: stages over others.
TILE, PARTS, PART_TOKEN, PAIR, PAIRED = 70.0, 3000.0, 20.0, 3000.0, 0.985
#: Nanoseconds of divided tiles: once, and for each token of sums that a program gives to another one, and of those it adds.
DIVIDED, SHARED_TOKEN = 2500.0, 10.0


@lru_cache(maxsize=4096)
def choose(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> Variant:
    """The variant for x (tokens, length) and a weight (features, length)."""
    return min(
        candidates(tokens, length, weight),
        key=lambda one: nanoseconds(one, tokens, features, length, multiprocessors, weight),
    )


def candidates(tokens: int, length: int, weight: Weight) -> Iterator[Variant]:
    """Variants with tiles no larger than the tokens ask for, and parts of K of whole pairs of stages."""
    largest = next((one for one in STAGE if one >= tokens), max(STAGE))
    for count in STAGE:
        for pair, splits in CLUSTERS:
            if count <= largest and splits <= length // (2 * ATOM):
                yield fitted(count, pair, splits, weight)
                if splits == 1:
                    yield fitted(count, pair, 1, weight, divided=True)


def nanoseconds(
    one: Variant,
    tokens: int,
    features: int,
    length: int,
    multiprocessors: int = MULTIPROCESSORS,
    weight: Weight = INT4,
) -> float:
    """How long all of a product takes, by the model."""
    at_once = max(1, AT_ONCE[one.cluster] * multiprocessors // MULTIPROCESSORS)
    return time_of(one, plan_of(one, tokens, features, length, at_once), at_once, weight)


def plan_of(one: Variant, tokens: int, features: int, length: int, at_once: int) -> Plan:
    """The quickest of a variant's plans, of which so many clusters run at once."""
    return min(
        plans(one, tokens, features, length, at_once), key=lambda plan: (time_of(one, plan, at_once), plan)
    )


def stage_of(one: Variant, weight: Weight) -> float:
    """Nanoseconds of a stage."""
    narrow = STAGE[min(STAGE)]
    # Tiles that only tests have take as long as the smallest.
    return max(STAGE.get(one.tokens, narrow), narrow * INSTRUCTIONS[weight] / INSTRUCTIONS[INT4])


def time_of(one: Variant, plan: Plan, at_once: int, weight: Weight = INT4) -> float:
    """Nanoseconds of a plan."""
    pair = 2 * stage_of(one, weight) * (PAIRED if one.pair > 1 else 1)
    once = PAIR if one.pair > 1 else 0.0
    if one.splits > 1:
        return -(-plan.clusters // at_once) * (
            plan.pairs * pair + TILE + PARTS + PART_TOKEN * one.tokens
        ) + once
    if plan.shared:
        once += DIVIDED + plan.longest * pair + SHARED_TOKEN * one.tokens * (1 + plan.added)
    return plan.waves * (plan.pairs * pair + TILE) + once


__all__ = ["CLUSTERS", "INSTRUCTIONS", "STAGE", "candidates", "choose", "nanoseconds", "plan_of"]
