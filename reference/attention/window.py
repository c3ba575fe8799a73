"""`Window`: which tokens of a cache a query sees as they were computed, beside those that are stored in low precision.

A query at position p sees as computed the first `sinks` tokens, and all from

    first(n) = max(0, min(n - residual, n - n mod group)),  n = p + 1,

on: the last `residual` ones, its own included, and where keys share scales along tokens (`group` > 1) those of the group that
is not full yet. That depends on its position alone, so that tokens one by one and a prompt in pieces see the same.

Sources: the last tokens and the open group: Liu et al., KIVI, arXiv 2402.02750, section 3.2; the first tokens, to which much of
the attention goes: Xiao et al., arXiv 2309.17453, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Window:
    """How many tokens are seen as computed: `residual` last ones, `sinks` first ones, and the open group of `group` tokens."""

    residual: int = 0
    sinks: int = 0
    group: int = 1

    def __post_init__(self) -> None:
        for name, least in (("residual", 0), ("sinks", 0), ("group", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is a number of tokens, {least} or more; got {value!r}")

    @property
    def ring(self) -> int:
        """Last tokens that have to be at hand: those that are seen so, and a group, which is quantized when it is full."""
        return max(self.residual, self.group if self.group > 1 else 0)

    @property
    def slots(self) -> int:
        """Tokens that are stored as computed: `sinks` first ones, then a ring of the last ones."""
        return self.sinks + self.ring

    def first(self, length: Any) -> Any:
        """The first of the last tokens that are seen as computed, of so many; a number or an array."""
        open_group = length - length % self.group
        by_residual = length - self.residual
        first = by_residual + (open_group - by_residual) * (open_group < by_residual)
        return first * (first > 0)

    def position(self, slot: Any, length: Any) -> Any:
        """The position whose token a slot holds when there are `length`; below 0 or among the sinks for a slot without one."""
        last = length - 1
        return slot + (last - (last - slot) % max(self.ring, 1) - slot) * (slot >= self.sinks)

    def seen(self, queries: int, keys: int, length: Any, causal: bool) -> Any:
        """bool (…, queries, keys), True where a key is seen as computed.

        length: tokens there are, the queries' included, a number or one for each of (B,), which gives (B, 1, queries, keys).
        causal: query t stands at length - queries + t; else all at the last position.
        """
        ends = np.asarray(length, np.int64).reshape(-1, 1, 1, 1)
        ends = ends + (
            np.arange(1 - queries, 1).reshape(1, 1, -1, 1)
            if causal
            else np.zeros((1, 1, queries, 1), np.int64)
        )
        at = np.arange(keys).reshape(1, 1, 1, -1)
        return (at < self.sinks) | (at >= self.first(ends))


#: Every token as it is stored.
ALL_STORED = Window()

__all__ = ["ALL_STORED", "Window"]
