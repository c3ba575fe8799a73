"""Which rows were measured by other code than today's: the one place where pages ask."""

from __future__ import annotations

from collections.abc import Iterable

from experiments.harness.rows import Row, source_hash


def is_stale(row: Row) -> bool:
    """Whether the code that measured this row has changed since."""
    return row.source_hash != source_hash()


def stale_count(rows: Iterable[Row]) -> int:
    """How many of these rows are stale."""
    return sum(map(is_stale, rows))


def forget() -> None:
    """Look at the code again: it may have changed while a long run went on."""
    source_hash.cache_clear()
