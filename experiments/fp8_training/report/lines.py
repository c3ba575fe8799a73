"""Rows as tables: one line for each (setting, method), with the metrics that a table shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.report.content import Table
from experiments.report.results import Results, number

STATUS = "status: "
#: Of a metric: the column's name, digits, and a factor.
Columns = Mapping[str, tuple[str, int, float]]


def lines_of(results: Results) -> list[tuple[str, str]]:
    """(setting, method) in the order in which they were measured."""
    return list(dict.fromkeys((row.setting, row.method) for row in results.rows))


def state(results: Results, setting: str, method: str) -> str:
    """ok, or what went wrong."""
    found = (row.metric for row in results.rows if (row.setting, row.method) == (setting, method))
    return next((metric.removeprefix(STATUS) for metric in found if metric.startswith(STATUS)), "ok")


def failures(results: Results) -> list[str]:
    """What was not measured, and why."""
    states = {one: state(results, *one) for one in lines_of(results)}
    failed = [f"{method}, {setting} ({word})" for (setting, method), word in states.items() if word != "ok"]
    return [f"**Not measured: {len(failed)}.** " + "; ".join(failed) + "."] if failed else []


def table(
    caption: str, results: Results, columns: Columns, lines: Sequence[tuple[str, str]] | None = None
) -> Table:
    """Methods with their settings and values; lines without any value are left out: `failures` names them."""
    cells = []
    for setting, method in lines_of(results) if lines is None else lines:
        values = [results.value(setting, method, metric) for metric in columns]
        if any(value is not None for value in values):
            shown = [
                number(None if value is None else value * factor, digits)
                for value, (_, digits, factor) in zip(values, columns.values(), strict=True)
            ]
            cells.append([method, setting, *shown])
    names = ["training", "as", *(name for name, _, _ in columns.values())]
    return Table(caption, names, cells, results.rows)


__all__ = ["Columns", "failures", "lines_of", "state", "table"]
