"""Which rows were measured by other code than today's: the one place where pages ask."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.harness.provenance import forget, is_current
from experiments.harness.rows import Row


def is_stale(row: Row) -> bool:
    """Whether the code that measured this row has changed since."""
    return not is_current(row)


def stale_count(rows: Iterable[Row]) -> int:
    """How many of these rows are stale."""
    return sum(map(is_stale, rows))


__all__ = ["forget", "is_stale", "stale_count"]
