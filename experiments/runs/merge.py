"""Published rows of several runs in one file: a part beside what was there, and rows that another machine measured.

Rows that were measured together (`group`) come and go together, and the later of two wins; a row that only says why nothing was
tried never takes the place of one that was measured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS, Experiment
from experiments.harness.rows import Row, read, write

#: How the status of what was not tried begins.
NOT_TRIED = ("status: not run", "status: missing")


def was_tried(row: Row) -> bool:
    """Whether something was measured, or failed when it was."""
    return not row.metric.startswith(NOT_TRIED)


def group(experiment: Experiment, row: Row) -> Hashable:
    """What a row is measured together with: its line and seed, or what the experiment's `measured_whole` says."""
    whole = getattr(experiment.run_module(), "measured_whole", lambda row: None)(row)
    return (row.line, row.seed) if whole is None else (whole, row.device)


def merged(name: str, ours: Iterable[Row], theirs: Iterable[Row]) -> list[Row]:
    """Rows of both sides, of each group those of the later date; theirs where both are as old."""
    experiment, found = EXPERIMENTS[name], dict[Hashable, list[Row]]()
    for rows in (ours, theirs):
        mine: dict[Hashable, list[Row]] = {}
        for row in rows:
            mine.setdefault(group(experiment, row), []).append(row)
        found |= {key: one for key, one in mine.items() if key not in found or age(one) >= age(found[key])}
    together = [row for rows in found.values() for row in rows]
    return sorted(together, key=lambda row: (row.experiment, row.table, row.device))


def age(rows: Iterable[Row]) -> tuple[bool, str]:
    """By which the later of two groups is known."""
    rows = list(rows)
    return any(map(was_tried, rows)), max(row.date for row in rows)


def merge(folders: Sequence[Path], paths: Paths) -> Written:
    """Take in the rows of other folders of reports; returns what was written.

    ValueError for a folder without rows of an experiment, before anything is written.
    """
    for folder in folders:
        if not any(paths.of(folder).rows(name).is_file() for name in EXPERIMENTS):
            raise ValueError(
                f"{folder} holds no data/NAME.csv of {', '.join(EXPERIMENTS)}; give the folder that `--reports` named"
            )
    written: Written = []
    with paths.alone():
        for name in EXPERIMENTS:
            rows = before = read(paths.rows(name))
            for folder in folders:
                rows = merged(name, rows, read(paths.of(folder).rows(name)))
            if taken := set(rows) - set(before):
                write(paths.rows(name), rows)
                written.append((f"{name}: {len(taken)} rows", shown(paths.rows(name))))
    return written
