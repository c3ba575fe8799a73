"""Published rows of several runs in one file: a part beside what was there, and rows that another machine measured.

Rows that were measured together (`group`) come and go together, and the later of two wins; a row that only says why nothing was
tried takes the place of no line that was measured, but leaves with its group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS, Experiment
from experiments.harness.rows import NOT_RUN, Row, publish, read, write

#: How the status of what was not tried begins.
NOT_TRIED = (NOT_RUN, "status: missing")


def was_tried(row: Row) -> bool:
    """Whether something was measured, or failed when it was."""
    return not row.metric.startswith(NOT_TRIED)


def group(experiment: Experiment, row: Row) -> Hashable:
    """What a row is measured together with: its line and seed, or what the experiment's `measured_whole` says."""
    whole = getattr(experiment.run_module(), "measured_whole", lambda row: None)(row)
    return (row.line, row.seed) if whole is None else (whole, row.device)


def merged(name: str, ours: Iterable[Row], theirs: Iterable[Row]) -> list[Row]:
    """Rows of both sides, of each group those of the later date; theirs where both are as old. A reason why nothing was tried
    stays where neither side tried it."""
    experiment, found = EXPERIMENTS[name], dict[Hashable, list[Row]]()
    sides = [list(ours), list(theirs)]
    for rows in sides:
        mine = by_group(experiment, filter(was_tried, rows))
        found |= {key: one for key, one in mine.items() if key not in found or age(one) >= age(found[key])}
    together = [row for rows in found.values() for row in rows]
    tried = {(row.line, row.seed) for row in together}
    reasons = {(row.line, row.seed): row for rows in sides for row in rows if not was_tried(row)}
    together += [row for line, row in reasons.items() if line not in tried]
    return sorted(together, key=lambda row: (row.experiment, row.table, row.device))


def by_group(experiment: Experiment, rows: Iterable[Row]) -> dict[Hashable, list[Row]]:
    """Rows that were measured together."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(group(experiment, row), []).append(row)
    return found


def age(rows: Iterable[Row]) -> str:
    """By which the later of two groups is known."""
    return max(row.date for row in rows)


def publish_run(name: str, path: Path, rows: Sequence[Row], partial: bool) -> list[Row]:
    """Put a run into the published rows; of what it did not try, and of a partial run what it has not, older rows stay."""
    before = read(path)
    if partial:
        together = merged(name, before, rows)
        write(path, together)
        return together
    late = {(row.line, row.seed) for row in rows if not was_tried(row)}
    return publish(path, merged(name, [row for row in before if (row.line, row.seed) in late], rows))


def merge(folders: Sequence[Path], paths: Paths) -> Written:
    """Take in the rows of other folders of reports; returns what was written.

    ValueError for a folder without rows of an experiment, or with a file that holds none, before anything is written.
    """
    found = {folder: {name: read(paths.of(folder).rows(name)) for name in EXPERIMENTS} for folder in folders}
    for folder, tables in found.items():
        if not any(tables.values()):
            raise ValueError(
                f"{folder} holds no rows (data/NAME.csv or .csv.gz of {', '.join(EXPERIMENTS)}); give the folder that "
                "`--reports` named"
            )
    written: Written = []
    with paths.alone():
        for name in EXPERIMENTS:
            rows = before = read(paths.rows(name))
            for tables in found.values():
                rows = merged(name, rows, tables[name])
            # By their text: a missing value is not equal to itself.
            if taken := {*map(str, rows)} - {*map(str, before)}:
                write(paths.rows(name), rows)
                written.append((f"{name}: {len(taken)} rows", shown(paths.rows(name))))
    return written
