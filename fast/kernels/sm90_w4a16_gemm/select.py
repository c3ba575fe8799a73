"""Which variant a shape gets: the shortest time by the cost model (`fast.cost`), fitted to measured times.

A tile takes its stages, and with parts of K what it takes to add them. Persistent programs have tiles of one or two sizes
(`schedule.py`); with parts of K, programs that do not fit the GPU at once make another round. The model only has to order
variants (devices and shapes: reports/LOG.md, "Times that docstrings of `sm90_w4a16_gemm` held").
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fast.cost import Coefficients, Time, first_row
from fast.kernels.sm90_w4a16_gemm.schedule import grid_of, least_of, longest, scheduled
from fast.kernels.sm90_w4a16_gemm.variants import ATOM, FEATURES, Variant, Weight, fitted
from fast.launch.hopper import MULTIPROCESSORS, at_once

C = Coefficients("sm90_w4a16_gemm")


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
    grid = grid_of(one, tokens, features, at_once(one.cluster, multiprocessors))
    return least_of(grid, *(tile(one, each, length, weight) for each in (one.tokens, one.small))) * C.mixed


def candidates(tokens: int, length: int, weight: Weight) -> Iterator[Variant]:
    """Variants with tiles no larger than the tokens ask for, and parts of K of whole pairs of stages; and those with small
    tiles, which have neither parts nor pairs."""
    tiles = C.few if tokens <= C.most_few else C.tiles
    largest = next((one for one in tiles if one >= tokens), max(tiles))
    for count in tiles:
        for pair, splits in C.clusters:
            if count <= largest and splits <= length // (2 * ATOM):
                turns = turns_of(tokens, count, pair * splits, weight)
                yield fitted(count, pair, splits, weight, turns=turns)
        for small in C.small if tokens > C.most_few else ():
            if small < count <= largest:
                yield fitted(count, 1, 1, weight, small)


def turns_of(tokens: int, tile: int, cluster: int, weight: Weight) -> int:
    """Warpgroups that take turns: 2 where few rows meet programs without neighbours, but for int4 in tiles of 128, which gain
    nothing by it (times: reports/LOG.md)."""
    return 2 if tokens <= C.most_few and cluster == 1 and (tile < 128 or weight.element != "int4") else 1


def nanoseconds(
    one: Variant,
    tokens: int,
    features: int,
    length: int,
    weight: Weight,
    multiprocessors: int = MULTIPROCESSORS,
) -> float:
    """How long all of a product takes, by the model."""
    whole, once = tile(one, one.tokens, length, weight), C.pair if one.pair > 1 else 0.0
    if one.splits > 1:
        return rounds(one, tokens, features, multiprocessors) * whole + once
    grid = grid_of(one, tokens, features, at_once(one.cluster, multiprocessors))
    if not one.small:
        return longest(grid, scheduled(grid, 1.0), whole, whole) + once
    small = tile(one, one.small, length, weight)
    return longest(grid, scheduled(grid, ratio_of(one, weight)), whole, small) * C.mixed + once


def microseconds_of_few(
    tokens: int, features: int, length: int, weight: Weight, multiprocessors: int = MULTIPROCESSORS
) -> float:
    """How long up to 128 rows take, by coefficients that were fitted to those alone."""
    one = choose(tokens, features, length, weight, multiprocessors)
    tiles, parts = rounds(one, tokens, features, multiprocessors), C.few_parts if one.splits > 1 else 0.0
    return Time(tiles, length / ATOM / one.splits, step_of_few(one, weight), parts, C.few_once).total


def step_of_few(one: Variant, weight: Weight) -> float:
    """Microseconds of 64 columns of those: tiles of fewer rows are to one of 128 as in `stage`."""
    times = stage(one.tokens, weight) / stage(128, weight)
    timed = first_row(C.few_steps, **weight._asdict())["us"]
    return timed * times - (C.turned / 1e3 if one.turns > 1 else 0.0)


def tile(one: Variant, tokens: int, length: int, weight: Weight) -> float:
    """Nanoseconds of a tile of as many tokens."""
    added = C.parts + C.part_token * tokens if one.splits > 1 else 0.0
    each = stage(tokens, weight) - (C.turned if one.turns > 1 else 0.0)
    return Time(1, length / ATOM / one.splits, each, C.tile + added).total


@lru_cache(maxsize=1024)
def stage(tokens: int, weight: Weight) -> float:
    """Nanoseconds of a stage, on a line between those that were timed."""
    times: list[float] = first_row(C.stages, **weight._asdict())["ns"]
    first = min(2, max(0, tokens // 64 - 1))
    return times[first] + (times[first + 1] - times[first]) * (tokens / 64 - 1 - first)


def ratio_of(one: Variant, weight: Weight) -> float:
    """The time of a small tile over that of a whole one."""
    return stage(one.small or one.tokens, weight) / stage(one.tokens, weight)


def rounds(one: Variant, tokens: int, features: int, multiprocessors: int = MULTIPROCESSORS) -> int:
    """How many tiles follow one another on the fullest multiprocessor."""
    clusters = -(-tokens // one.tokens) * -(-features // (FEATURES * one.pair))
    return -(-clusters // at_once(one.cluster, multiprocessors))


__all__ = [
    "candidates",
    "choose",
    "microseconds_of_few",
    "nanoseconds",
    "ratio_of",
    "rounds",
    "stage",
    "step_of_few",
    "turns_of",
]
