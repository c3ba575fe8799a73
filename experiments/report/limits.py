"""What misses its target: the page ``reports/limits.md``, from the targets of every experiment and its rows.

An experiment whose page module has `targets_by_run(rows)` contributes to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.report.content import Table
from experiments.report.results import Where
from experiments.report.targets import Target, counts, known, missed

COLUMNS = ("target", "of", "measured", "limit", "off by", "measured on")
#: A target at one of several numbers of rows; those of one method with one limit share a line.
AT_ROWS = re.compile(r"(?P<name>.+), (?P<rows>\d+) rows?")


@dataclass(frozen=True)
class RunTargets:
    """The targets of one run.

    about: which part of the experiment they are of, where it has several. unit: of targets that name none.
    """

    where: Where
    targets: Sequence[Target]
    about: str = ""
    unit: str = ""

    @property
    def subject(self) -> str:
        """The part and the data of the run, in words."""
        return ", ".join(filter(None, (self.about, self.where.data)))


def by_device(runs: Iterable[RunTargets]) -> dict[str, list[Target]]:
    """All targets of each device that has measured one."""
    found: dict[str, list[Target]] = {}
    for run in runs:
        found.setdefault(run.where.device, []).extend(run.targets)
    return {device: targets for device, targets in found.items() if known(targets)}


def counted(runs: Iterable[RunTargets]) -> str:
    """How many targets are reached of those that were measured, by device; nothing where none was measured."""
    words = [f"on {device} {counts(targets)}" for device, targets in by_device(runs).items()]
    return f"targets reached {'; '.join(words)}" if words else ""


def missed_tables(runs: Sequence[RunTargets]) -> list[Table]:
    """Of each device a table of what is missed, in the order of the runs; none of one that misses nothing."""
    found = []
    for device, targets in by_device(runs).items():
        lines = [line for run in runs if run.where.device == device for line in missed_lines(run)]
        if lines:
            found.append(Table(f"{device}: {counts(targets, ' reached')}", COLUMNS, lines))
    return found


def missed_lines(run: RunTargets) -> list[list[str]]:
    """The lines of a run; rows of a method with one limit stand in one of them."""
    series: dict[tuple[str, float, str], list[tuple[str, Target]]] = {}
    for target in missed(run.targets):
        found = AT_ROWS.fullmatch(target.name)
        name, rows = (found["name"], found["rows"]) if found else (target.name, "")
        series.setdefault((name, target.limit, target.day), []).append((rows, target))
    return [line(run, name, members) for (name, *_), members in series.items()]


def line(run: RunTargets, name: str, members: Sequence[tuple[str, Target]]) -> list[str]:
    """The cells of targets of one name and limit, with the numbers of rows that they are at."""
    at, first = ", ".join(rows for rows, _ in members if rows), members[0][1]
    name += f", {at} row{'s' * (at != '1')}" if at else ""
    unit = first.unit or run.unit
    measured = f"{', '.join(target.texts[0] for _, target in members)} {unit}".rstrip()
    limit = f"{'at least' if first.at_least else 'at most'} {first.texts[1]}"
    # A percentage of percents would say little.
    off = [target.excess for _, target in members if target.excess is not None and unit != "%"]
    return [name, run.subject, measured, limit, percents(off), first.day]


def percents(values: Sequence[float]) -> str:
    """By how much values are off, the smallest and the largest; nothing without any: a limit of 0 has no percentage."""
    if not values:
        return ""
    low, high = (f"{one:.1f}" for one in (min(values), max(values)))
    return f"{low}%" if low == high else f"{low} to {high}%"


__all__ = ["RunTargets", "by_device", "counted", "missed_tables"]
