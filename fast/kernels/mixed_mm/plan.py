"""How tiles are divided between clusters: what a launch is told, and what the model of `select` counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fast.kernels.mixed_mm.variants import ATOM, Variant

#: Pairs of stages times clusters are counted in 32 bits.
COUNTED = 2**32


class Plan(NamedTuple):
    """clusters: that are launched. whole: tiles that one cluster has each. shared: the others, divided evenly between clusters.

    pairs: of stages of a tile, or of its part of K. parts: sums of warpgroups that other clusters may add, 0 where no tile is
    divided.
    """

    clusters: int
    whole: int
    shared: int
    pairs: int
    parts: int

    @property
    def waves(self) -> int:
        """Whole tiles of a cluster, one after the other."""
        return -(-self.whole // self.clusters)

    @property
    def longest(self) -> int:
        """The most pairs of stages of shared tiles that a cluster has."""
        return -(-self.shared * self.pairs // self.clusters)

    @property
    def added(self) -> int:
        """The most clusters whose sums one cluster adds to a tile's."""
        if self.shared >= self.clusters:
            return min(1, self.shared % self.clusters)
        each, rest = divmod(self.clusters, self.shared or self.clusters)
        return each - (rest == 0)


def plans(one: Variant, tokens: int, features: int, length: int, at_once: int) -> Iterator[Plan]:
    """Those that there are for a variant of which so many clusters run at once.

    Clusters that persist are at most what runs at once. Where tiles are divided, those of the last whole wave and of the one
    that is not full are: a cluster then adds the sums of one other at most. Fewer tiles than clusters have either all of
    these, or as many each.
    """
    tiles = -(-tokens // one.tokens) * -(-features // (one.features * one.pair))
    pairs, most = length // (2 * ATOM), max(1, at_once)
    if one.splits > 1:
        yield Plan(tiles, tiles, 0, -(-pairs // one.splits), 0)
        return
    whole = max(0, tiles // most - 1) * most
    shared = tiles - whole
    if not one.divided or tiles % most == 0 or shared * pairs * most >= COUNTED:
        yield Plan(min(tiles, most), tiles, 0, pairs, 0)
        return
    for clusters in {most, most if tiles > most else most // tiles * tiles}:
        count = min(clusters, shared * pairs)
        yield Plan(count, whole, shared, pairs, count * one.pair * one.groups)


__all__ = ["Plan", "plans"]
