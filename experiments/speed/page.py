"""The page of experiment `speed`."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.report.pages import Section, Table
from experiments.report.results import Results, by_run, number
from experiments.speed.run import TITLE

__all__ = ["TITLE", "sections"]

TEXT = (
    "Ours and a peer are called in turn in one process on the same random normal float32 numbers, after a check that the "
    "results are right. The ratio is the peer's median time over ours, above 1 where ours is faster; behind it the 20 and 80 "
    "percent quantiles of neighbouring calls.",
    "Threads are left as each runtime sets them, the same for both sides of a pair: NumPy computes on one, torch on its own "
    "number of threads, XLA on a pool over all cores. A line gives how many threads both sides may use, and how many cores "
    "each kept busy (processor time over time passed).",
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """A table of ratios and one of import times per run."""
    made = []
    for where, results in by_run(rows, "speed").items():
        tables = [ratio_table(results), import_table(results)]
        made.append(Section(f"Ratios ({where})", TEXT, [], tables))
    return made


def ratio_table(results: Results) -> Table:
    """A line per comparison."""
    lines = []
    for setting, method in places(results):
        if not method.startswith("import "):
            cells = [
                results.value(setting, method, name) for name in ("ratio", "ratio, 20%", "ratio, 80%", "bar")
            ]
            times = [number(results.value(setting, method, name), 1) for name in ("ours", "theirs")]
            threads = [
                number(results.value(setting, method, "threads"), 0),
                *(
                    number(results.value(setting, method, f"{side}, cores busy"), 1)
                    for side in ("ours", "theirs")
                ),
            ]
            missing = [name for name in results.of_method(method).metrics if name.startswith("peer missing")]
            lines.append(
                [
                    method,
                    setting,
                    *(number(cell, 2) for cell in cells),
                    *times,
                    *threads,
                    verdict(cells[0], cells[3], missing),
                ]
            )
    columns = ["ours", "peer", "ratio", "20%", "80%", "bar", "ours (ms)", "peer (ms)"]
    columns += ["threads", "ours: cores busy", "peer: cores busy", "bar reached"]
    return Table("Ratios to peers", columns, lines, results.stale_methods)


def verdict(ratio: float | None, bar: float | None, missing: Sequence[str]) -> str:
    """Yes, no, or why it is not known."""
    if ratio is None or bar is None:
        return missing[0] if missing else ""
    return "yes" if ratio >= bar else "no"


def import_table(results: Results) -> Table:
    """A line per package."""
    lines = []
    for setting, method in places(results):
        if method.startswith("import "):
            time, low, high, bar = (
                results.value(setting, method, name) for name in ("time", "time, 20%", "time, 80%", "bar")
            )
            reached = "" if time is None or bar is None else "yes" if time <= bar else "no"
            lines.append([method, setting, *(number(cell, 0) for cell in (time, low, high, bar)), reached])
    columns = ["package", "beyond", "median (ms)", "20%", "80%", "bar", "bar reached"]
    return Table("Import times", columns, lines, results.stale_methods)


def places(results: Results) -> list[tuple[str, str]]:
    """(setting, method) in the order of measurement."""
    return list(dict.fromkeys((row.setting, row.method) for row in results.rows))
