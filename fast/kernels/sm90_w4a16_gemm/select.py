"""Which variant a shape gets: the shortest time by the cost model (`fast.cost`), fitted to measured times.

A tile takes its stages, and with parts of K what it takes to add them. Persistent programs have tiles of one or two sizes
(below); with parts of K, programs that do not fit the GPU at once make another round. The model only has to order
variants (devices and shapes: reports/LOG.md, "Times that docstrings of `sm90_w4a16_gemm` held").

Where clusters are persistent, a product is cut into whole tiles, then small ones that fill the last wave. Columns of features
are of two kinds: the last `cut` ones have fewer whole tiles than the others. What whole tiles of a column leave of the tokens
is for small ones. Clusters take whole tiles in turn, then small ones: all go on in turn, or those that have a whole tile less
take all of them (`schedule.cuh`). Each element of the result is summed by one program, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fast.cost import Coefficients, Time, first_row
from fast.kernels.sm90_w4a16_gemm.variants import ATOM, FEATURES, Variant, Weight, fitted
from fast.launch.cuda import MULTIPROCESSORS, at_once

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


# Which tiles a product is cut into.

#: Whole tiles of a column that are tried, fewer than would hold all tokens by up to this number.
FEWER = 4
#: Waves of whole tiles that are tried, fewer than all whole tiles fill by up to this number.
WAVES = 3


class Schedule(NamedTuple):
    """cut: columns at the end that have whole[1] tiles of the larger size, others have whole[0]; shares: clusters that take
    small tiles."""

    cut: int
    whole: tuple[int, int]
    shares: int


class Grid(NamedTuple):
    """What is cut. columns: of a cluster's features; small: 0 where there are no small tiles; clusters: that run at once."""

    tokens: int
    columns: int
    large: int
    small: int
    clusters: int

    @property
    def all_whole(self) -> int:
        """Tiles that hold all tokens of a column."""
        return -(-self.tokens // self.large)

    def rest(self, whole: int) -> int:
        """Small tiles of a column behind whole ones."""
        return max(0, -(-(self.tokens - whole * self.large) // self.small)) if self.small else 0

    def counts(self, one: Schedule) -> tuple[int, int]:
        """Whole tiles and small ones."""
        (first, second), plain = one.whole, self.columns - one.cut
        rest = self.rest(first) * plain + (self.rest(second) * one.cut if one.cut else 0)
        return first * plain + second * one.cut, rest


def grid_of(one: Variant, tokens: int, features: int, clusters: int) -> Grid:
    """Of a variant without parts of K. clusters: that run at once."""
    return Grid(tokens, -(-features // (FEATURES * one.pair)), one.tokens, one.small, max(1, clusters))


def longest(grid: Grid, one: Schedule, large: float, small: float) -> float:
    """The time of the cluster that has most. large, small: times of tiles."""
    whole, rest = grid.counts(one)
    clusters = min(grid.clusters, whole + rest)
    waves, more = divmod(whole, clusters)
    # Those with a whole tile less come first, then those that have one more, where those take small ones at all.
    first = waves * large + -(-rest // one.shares) * small
    second = -(-max(0, rest - (clusters - more)) // one.shares) if one.shares > clusters - more else 0
    return max(first, (waves + 1) * large + second * small if more else 0.0)


@lru_cache(maxsize=4096)
def scheduled(grid: Grid, ratio: float) -> Schedule:
    """The schedule that ends first. ratio: time of a small tile over that of a whole one.

    Every new number of rows asks, while a model waits: what could not end first if all clusters had the same is left out.
    """
    best = Schedule(0, (grid.all_whole, 0), min(grid.clusters, grid.all_whole * grid.columns))
    least = longest(grid, best, 1.0, ratio)
    for cut, whole in cuts(grid):
        large, small = grid.counts(Schedule(cut, whole, 1))
        clusters = min(grid.clusters, large + small)
        if (large + small * ratio) / clusters >= least:
            continue
        # By all clusters, and by those that have a whole tile less.
        for shares in {clusters, clusters - large % clusters}:
            one = Schedule(cut, whole, shares)
            if (taken := longest(grid, one, 1.0, ratio)) < least:
                best, least = one, taken
    return best


def least_of(grid: Grid, large: float, small: float) -> float:
    """What no schedule is quicker than: all clusters with the same, of tiles that are full. large, small: times of tiles."""
    each = min(large / grid.large, small / grid.small) if grid.small else large / grid.large
    return grid.columns * grid.tokens * each / grid.clusters


def cuts(grid: Grid) -> Iterator[tuple[int, tuple[int, int]]]:
    """Columns that are cut, and whole tiles: fewer in all columns, or in as many as make the whole waves fewer."""
    least = max(0, grid.all_whole - FEWER)
    for whole in range(least, grid.all_whole + 1) if grid.small else ():
        yield 0, (whole, 0)
        for fewer in range(least, whole):
            top = whole * grid.columns // grid.clusters
            for waves in range(max(0, top - WAVES), top + 1):
                cut = -(-(whole * grid.columns - waves * grid.clusters) // (whole - fewer))
                if 0 < cut < grid.columns:
                    yield cut, (whole, fewer)


__all__ = [
    "Grid",
    "Schedule",
    "candidates",
    "choose",
    "grid_of",
    "least_of",
    "longest",
    "microseconds_of_few",
    "nanoseconds",
    "ratio_of",
    "rounds",
    "scheduled",
    "stage",
    "step_of_few",
    "turns_of",
]
