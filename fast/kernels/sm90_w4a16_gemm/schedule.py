"""Which tiles a product is cut into where clusters are persistent: whole ones, then small ones that fill the last wave.

Columns of features are of two kinds: the last `cut` ones have fewer whole tiles than the others. What whole tiles of a column
leave of the tokens is for small ones. Clusters take whole tiles in turn, then small ones: all go on in turn, or those that have
a whole tile less take all of them (`schedule.cuh`). Each element of the result is summed by one program, whatever the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from fast.kernels.sm90_w4a16_gemm.variants import FEATURES, Variant

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


__all__ = ["Grid", "Schedule", "grid_of", "least_of", "longest", "scheduled"]
