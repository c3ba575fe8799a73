"""The rows of named models as values for programs: numbers with their 95% intervals, words apart from them, and what was not
measured. `ao-lab reproduce EXPERIMENT --model DIR --json` prints them.

A row's metric may hold a word ("grid: ...", "status: ...") with a value that says nothing; such rows are told as words here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from experiments.harness.measuring import is_late
from experiments.harness.rows import Row, table_parts
from experiments.report.real_runs import CHANGE, CHANGE_ERROR, PERPLEXITY
from experiments.report.results import STATUS, Results

#: How metrics begin that hold words, each with the name under which the words are told; of a status see `missing`.
WORDS = {
    "grid: ": "grid of the file's weights",
    "published: ": "published model",
    "trains in: ": "trained in",
    "choice: ": "choice by",
    "rule: ": "rule",
    "tasks: not measured: ": "tasks not measured",
    "computed by: ": "computed by",
}
#: What a line about measurements that the seconds of a run did not reach says besides.
GOES_ON = "; the same command goes on with them"
#: What stands in the metric of a standard error.
ERROR = ", standard error"


def of_models(rows: Iterable[Row], models: Sequence[str]) -> list[Row]:
    """The rows of some models, by the names in their tables."""
    return [row for row in rows if table_parts(row.table)[0].partition(" ")[2] in models]


def values(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows that are numbers, as plain values with the model's name and "interval_95", the two ends of the 95% interval
    (None where there is none); standard errors are rows of their own."""
    tables = by_table(rows)
    found = []
    for row in rows:
        if row.metric.startswith((STATUS, *WORDS)):
            continue
        model = table_parts(row.table)[0].partition(" ")[2]
        half = half_of(tables[row.table, row.device, row.seed], row)
        ends = None if half is None else [row.value - half, row.value + half]
        found.append({"model": model, **asdict(row), "interval_95": ends})
    return found


def by_table(rows: Iterable[Row]) -> dict[tuple[str, str, int], Results]:
    """Rows by table, device and seed."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.table, row.device, row.seed), []).append(row)
    return {key: Results(one) for key, one in found.items()}


def half_of(results: Results, row: Row) -> float | None:
    """Half of the 95% interval of a row's value; None where no standard error was measured, and of standard errors."""
    if ERROR in row.metric:
        return None
    if row.metric == PERPLEXITY:
        # The error of a ratio of perplexities is that of the loss times the ratio.
        half = results.half(row.setting, row.method, CHANGE_ERROR)
        change = results.value(row.setting, row.method, CHANGE)
        return None if half is None or change is None else 100 * math.exp(min(change, 700.0)) * half
    name, _, of = row.metric.partition(", ")
    return results.half(row.setting, row.method, f"{name}{ERROR}{f' of the {of}' if of else ''}")


def words(rows: Iterable[Row]) -> list[dict[str, str]]:
    """What rows say in words: the model, setting and method that it is said of, and the word by its name."""
    found = []
    for row in rows:
        prefix = next((one for one in WORDS if row.metric.startswith(one)), None)
        if prefix is not None:
            model = table_parts(row.table)[0].partition(" ")[2]
            found.append({
                "model": model, "setting": row.setting, "method": row.method, "name": WORDS[prefix],
                "word": row.metric.removeprefix(prefix),
            })  # fmt: skip
    return found


def missing(rows: Iterable[Row]) -> list[dict[str, str]]:
    """What was not measured: model, setting, method and the reason, once each."""
    found: dict[tuple[str, str, str, str], None] = {}
    for row in rows:
        reason = row.metric.removeprefix(STATUS)
        if row.metric.startswith(STATUS) and reason != "ok":
            found[table_parts(row.table)[0].partition(" ")[2], row.setting, row.method, reason] = None
    return [dict(zip(("model", "setting", "method", "reason"), one, strict=True)) for one in found]


def told_missing(found: Sequence[dict[str, str]]) -> list[str]:
    """The same in a line for each reason, with the names that it holds for, and how to go on after the seconds of a run."""
    by: dict[tuple[str, str], list[str]] = {}
    for one in found:
        kind, _, why = one["reason"].partition(": ")
        names = by.setdefault((one["model"], why if kind == "missing" else one["reason"]), [])
        names.append(f"{one['method']} ({one['setting']})")
    return [
        f"{model}: not measured: {', '.join(names)}: {why}{GOES_ON * late(why)}."
        for (model, why), names in by.items()
    ]


def late(reason: str) -> bool:
    """Whether a reason is that the seconds of a run were over."""
    return is_late(f"{STATUS}{reason}")
