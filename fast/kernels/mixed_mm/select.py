"""Which variant a shape gets: the shortest time by a model of rounds of tiles, fitted to times of an H100 (int4_g128).

A tile takes its stages, and with parts of K what it takes to add them; programs that do not fit the GPU at once make another
round, unless the last tiles are divided. Pairs of programs save a little of every stage and cost at the beginning. The model
only has to order variants. What divided tiles cost was not timed: it is what 131072 bytes of sums take at 50 bytes a
nanosecond, and a launch that clears their marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fast.kernels.mixed_mm.plan import Plan, plans
from fast.kernels.mixed_mm.variants import ATOM, Variant, Weight, fitted
from fast.kernels.sparse_mm.select import AT_ONCE, MULTIPROCESSORS

#: Nanoseconds of a stage of 64 columns, by the tokens of a tile and the warpgroups that multiply. Three were not timed: 128
#: tokens are as many products as two have with 192; for 64 tokens it is a guess.
STAGE = {(128, 2): 487.0, (192, 2): 563.0, (256, 2): 701.0, (128, 3): 563.0, (64, 3): 450.0}
NARROW = STAGE[128, 2]
#: The most rows of x for three warpgroups, whose tiles are as many products as narrow ones and read x more often; and what they
#: have no registers for, with 128 tokens.
MOST_OF_THREE, SPILLED = 256, Weight("int4", True, 2)
#: Instructions of a warp in a stage, as they were counted: where tiles are narrow they are what takes time, and elements of
#: more than int4 take as much longer.
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
        candidates(tokens, features, length, weight),
        key=lambda one: nanoseconds(one, tokens, features, length, multiprocessors, weight),
    )


def candidates(tokens: int, features: int, length: int, weight: Weight) -> Iterator[Variant]:
    """Variants with tiles no larger than the tokens and features ask for, and parts of K of whole pairs of stages."""
    largest = next((count for count, groups in STAGE if groups == 2 and count >= tokens), 256)
    for count, groups in STAGE:
        if count > largest or (count < 128 and tokens > count):
            continue
        if groups == 3 and not has_three(count, tokens, features, weight):
            continue
        for pair, splits in CLUSTERS if groups == 2 else CLUSTERS[:1]:
            if splits <= length // (2 * ATOM):
                yield fitted(count, pair, splits, weight, groups=groups)
                if splits == 1:
                    yield fitted(count, pair, 1, weight, divided=True, groups=groups)


def has_three(count: int, tokens: int, features: int, weight: Weight) -> bool:
    """Whether three warpgroups may multiply tiles of so many tokens."""
    spilled = count == 128 and weight == SPILLED
    return tokens <= MOST_OF_THREE and features >= 3 * ATOM and not spilled


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
    more = INSTRUCTIONS[weight] / INSTRUCTIONS[INT4]
    # Tiles that only tests have take as long as narrow ones.
    timed = STAGE.get((one.tokens, one.groups), NARROW)
    return max(timed, timed * more) if one.tokens < 128 else max(timed, NARROW * more)


def time_of(one: Variant, plan: Plan, at_once: int, weight: Weight = INT4) -> float:
    """Nanoseconds of a plan. Sums that are given and added are as many more as there are warpgroups."""
    pair = 2 * stage_of(one, weight) * (PAIRED if one.pair > 1 else 1)
    once = PAIR if one.pair > 1 else 0.0
    if one.splits > 1:
        return (
            -(-plan.clusters // at_once) * (plan.pairs * pair + TILE + PARTS + PART_TOKEN * one.tokens) + once
        )
    if plan.shared:
        once += DIVIDED + plan.longest * pair + SHARED_TOKEN * one.tokens * one.groups / 2 * (1 + plan.added)
    return plan.waves * (plan.pairs * pair + TILE) + once


__all__ = ["CLUSTERS", "INSTRUCTIONS", "STAGE", "candidates", "choose", "nanoseconds", "plan_of"]
