"""Rows that were measured at the same time elsewhere, by another GPU of a host or on another machine, taken into one folder.

Two runs cannot write to one folder. Each is given parts (`--only`) and a folder of its own (`--reports`) that begins as a copy
of the first; then the first takes what each measured. Only of experiments whose parts are measured in turn (`GOES_ON`): their
rows carry where they come from (`experiments.runs.resume`). What is compared with each other leaves as a whole where some of it
was measured anew (`measured_whole`), by one copy or by several together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.harness.paths import Paths, Written, shown
from experiments.harness.provenance import is_current
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row, read, write, write_text
from experiments.harness.run_records import read_runs
from experiments.runs.resume import goes_on, has_value, origin_name, read_origins, write_origins


@dataclass(frozen=True)
class Merged:
    """Rows of an experiment: all of the merged table, those taken, and how many were left since their code has changed."""

    rows: list[Row]
    taken: list[Row]
    stale: int


def merge(folders: Sequence[Path], paths: Paths) -> Written:
    """Take what was measured into copies of these reports, all copies at once; returns what was written.

    What a copy has and these reports have not was measured there: one that was merged before may hold what is older than they
    are. ValueError for a folder without rows of such an experiment, before anything is written.
    """
    names = [name for name in EXPERIMENTS if goes_on(EXPERIMENTS[name].run_module())]
    for folder in folders:
        if not any((folder / "data" / f"{name}.csv").is_file() for name in names):
            raise ValueError(
                f"{folder} holds no data/NAME.csv of {', '.join(names)}; give the folder that `--reports` named"
            )
    written: Written = []
    with paths.alone():
        for name in names:
            begin = read(paths.data / f"{name}.csv")
            for folder in folders:
                written += merge_one(name, folder, paths, begin)
    return written


def merge_one(name: str, folder: Path, paths: Paths, begin: Sequence[Row]) -> Written:
    """One experiment of one folder: rows, origins and records of runs; nothing where it has no new rows."""
    whole = getattr(EXPERIMENTS[name].run_module(), "measured_whole", lambda row: None)
    path, other = paths.data / f"{name}.csv", folder / "data"
    made = merged(read(path), read(other / f"{name}.csv"), whole, begin)
    done = f"{name}: {len(made.taken)} rows from {folder}"
    if made.stale:
        done += f"; {made.stale} left, whose code has changed since"
    if made.taken:
        origins, theirs = read_origins(paths), json.loads(_text(other / "origins.json"))
        write_origins(paths, merged_origins(made, origins, theirs))
        write(path, made.rows)
        merge_runs(name, other / "environment.json", paths.data / "environment.json")
    return [(done, shown(path))] if made.taken or made.stale else []


def merged(
    ours: Sequence[Row], theirs: Sequence[Row], whole: Callable[[Row], str | None], begin: Sequence[Row]
) -> Merged:
    """Ours, with what they measured in the place of what it replaces. begin: the rows that their copy began with.

    What is compared with each other leaves as a whole where it is older than their copy; what another copy has measured of it
    since, at the same time, stays beside theirs.
    """
    known = {row.key: row for row in begin}
    new = [row for row in theirs if known.get(row.key) != row]
    current = [row for row in new if is_current(row)]

    def group(row: Row) -> Hashable:
        name = whole(row)
        return row.line if name is None else (name, row.device)

    groups = {group(row) for row in current}
    taken = [row for row in theirs if group(row) in groups and is_current(row)]
    keys = {row.key for row in taken}
    older = {
        row.key
        for row in ours
        if known.get(row.key) == row and whole(row) is not None and group(row) in groups
    }
    kept = without_reasons((row for row in ours if row.key not in keys | older), taken)
    rows = sorted([*kept, *taken], key=lambda row: (row.experiment, row.table, row.device))
    return Merged(rows, [row for row in taken if known.get(row.key) != row], len(new) - len(current))


def without_reasons(others: Iterable[Row], measured: Iterable[Row]) -> list[Row]:
    """Rows without those that say why a method has no values, where `measured` has some of it."""
    there = {(row.line, row.seed, row.device) for row in measured if has_value(row)}
    return [row for row in others if has_value(row) or (row.line, row.seed, row.device) not in there]


def merged_origins(
    made: Merged, ours: dict[str, dict[str, object]], theirs: dict[str, dict[str, object]]
) -> dict[str, dict[str, object]]:
    """Origins of the merged rows; none for a table that holds rows of two."""
    names, found = {origin_name(row) for row in made.taken}, dict(ours)
    for name in names:
        if name not in theirs or ours.get(name, theirs[name]) != theirs[name]:
            found.pop(name, None)
        else:
            found[name] = theirs[name]
    return found


def merge_runs(name: str, theirs: Path, ours: Path) -> None:
    """Records of runs of an experiment, the later one where both have a record."""
    runs = read_runs(ours)
    for key, run in read_runs(theirs).items():
        if run["experiment"] == name and run["finished"] > runs.get(key, {}).get("finished", ""):
            runs[key] = run
    write_text(ours, json.dumps(dict(sorted(runs.items())), indent=2) + "\n")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else "{}"


__all__ = ["Merged", "merge", "merged", "merged_origins"]
