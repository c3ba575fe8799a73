"""The scoreboard: every published value beside ours, with ratio and devices.

An experiment whose page module has `comparisons(rows)` contributes to it. A published value without a measured row of the same
model, method and metric stands in a second table, with nothing beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.report.content import Comparison, Table
from experiments.report.results import number

COLUMNS = (
    "model",
    "method",
    "metric",
    "unit",
    "published",
    "on",
    "ours",
    "on",
    "ours / published",
    "better",
    "source",
)
#: Metrics of which less is better.
LESS = ("memory", "size", "perplexity")


@dataclass(frozen=True)
class Scoreboard:
    """The tables, and the sources that their last column counts from 1."""

    tables: Sequence[Table]
    sources: Sequence[str]

    @property
    def measured(self) -> Sequence[Table]:
        """The table of values that have a measured one beside them; none where there is none."""
        return [table for table in self.tables if tuple(table.columns) == COLUMNS]


def scoreboard(found: Sequence[Comparison]) -> Scoreboard:
    """Published values that were measured here (ratios first, as they compare across devices), and those that were not."""
    sources = list(dict.fromkeys(one.source for one in found))
    measured = sorted((one for one in found if one.measured is not None), key=lambda one: one.unit != "ratio")
    missing = [one for one in found if one.measured is None]
    tables = [
        Table(
            "Published values and ours, of the same model, method and metric",
            COLUMNS,
            [line(one, sources) for one in measured],
        ),
        Table(
            "Published values without a measured one",
            (*COLUMNS[:6], "source"),
            [[*line(one, sources)[:6], line(one, sources)[-1]] for one in missing],
        ),
    ]
    return Scoreboard([table for table in tables if table.lines], sources)


def line(one: Comparison, sources: Sequence[str]) -> list[str]:
    """The cells of one published value."""
    return [
        one.model,
        one.method,
        one.metric,
        one.unit,
        short(one.published),
        one.published_on,
        short(one.measured),
        one.measured_on,
        number(one.ratio, 2),
        "less" if any(word in one.metric for word in LESS) else "more",
        f"[{sources.index(one.source) + 1}]",
    ]


def short(value: float | None) -> str:
    """A value with about four digits, as many as are published."""
    if value is None:
        return ""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return number(value, digits)
