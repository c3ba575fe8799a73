"""Targets: what a measured value is to reach, whether it does, and the words of a page for it.

A target was set before its measurement, is a published value, or another library's value of the same run; the bounds are data,
``experiments/targets.csv``. What was not measured misses no target: its row says why it is absent. An experiment whose page
module has `targets_by_run(rows)` contributes to the page ``reports/limits.md``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness.rows import Row, table_parts
from experiments.report.content import NO_TARGET, Table, device_name
from experiments.report.results import Where

FILE = Path(__file__).resolve().parents[1] / "targets.csv"
COLUMNS = ("target", "of", "measured", "limit", "off by", "measured on")
#: A target at one of several numbers of tokens; those of one method with one limit share a line.
AT_TOKENS = re.compile(r"(?P<name>.+), (?P<tokens>\d+) tokens?")


#: A ratio to another library is held to 1, less what two timings of the same kernel differ by at worst.
BASELINE_TOLERANCE = 0.02
#: What the name or the unit of a target says whose value is a ratio to that of something else.
RATIO = re.compile(r"\btimes (bfloat16|torchao|its speed)\b|\bover\b|\bspeedup\b")
#: How the caption of a table begins whose targets are missed by values that are better than what they are compared with.
AHEAD = "faster or smaller than what it is compared with, by less than its target"
#: More digits than a format has, where a value and a limit look alike; a difference after them is none.
MORE_DIGITS = 6


@dataclass(frozen=True)
class Target:
    """A measured value (None: not measured), and the limit that it is to reach or not to exceed; how text shows both.

    `day`: the last at which the value was measured; empty where that is not known.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = True
    unit: str = ""
    value_format: str = ".3g"
    limit_format: str = ".3g"
    day: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the value is on the right side of the limit; None where it was not measured."""
        return None if self.value is None else self.holds(self.value, self.limit)

    def holds(self, value: float, limit: float) -> bool:
        """Whether a value is on the right side of a limit."""
        return value >= limit if self.at_least else value <= limit

    @property
    def verdict(self) -> str:
        """A cell of a table: yes, no, or nothing where it was not measured."""
        return {True: "yes", False: "no", None: ""}[self.reached]

    @property
    def measured(self) -> str:
        """The value as a cell of a table; nothing where it was not measured."""
        return "" if self.value is None else self.texts[0]

    @property
    def texts(self) -> tuple[str, str]:
        """Value and limit, with as many more digits as tell them apart: "1.20 of 1.2" is no miss to a reader."""
        limit = format(self.limit, self.limit_format)
        if self.value is None:
            return "not measured", limit
        rounded = float(limit) != self.limit
        for more in range(MORE_DIGITS + 1):
            value = format(self.value, with_more(self.value_format, more))
            shown = format(self.limit, with_more(self.limit_format, more)) if rounded else limit
            if self.holds(float(value), float(shown)) == self.reached:
                return value, shown
        return format(self.value, self.value_format), limit

    @property
    def excess(self) -> float | None:
        """By how many percent of the limit a value misses it; None where it is reached, not measured, or the limit is 0."""
        if self.value is None or self.reached or not self.limit:
            return None
        return abs(percent_over(self.value, self.limit))

    def ahead(self, unit: str) -> bool:
        """Whether a ratio to another's value misses a limit that asks for more than to be better: 0.905 of torchao's time is
        less than torchao's, whatever the limit. unit: where the target names none."""
        said = RATIO.search(f"{self.name} {self.unit or unit}")
        beyond = self.limit > 1 if self.at_least else self.limit < 1
        better = self.value is not None and (self.value > 1 if self.at_least else self.value < 1)
        return self.reached is False and bool(said) and beyond and better

    def __str__(self) -> str:
        value, limit = self.texts
        return f"{self.name} {value} of {limit} {self.unit}".strip()


def with_more(given: str, digits: int) -> str:
    """A format with more digits: ".2f" and 1 is ".3f"; one that names no digits stays."""
    return re.sub(r"(?<=\.)\d+", lambda found: str(int(found.group()) + digits), given)


def missed(targets: Iterable[Target]) -> list[Target]:
    """The targets that were measured and not reached."""
    return [target for target in targets if target.reached is False]


def known(targets: Iterable[Target]) -> list[Target]:
    """Those that were measured."""
    return [target for target in targets if target.value is not None]


def counts(targets: Sequence[Target], what: str = "") -> str:
    """Reached of measured, `what` after it, then `rest`."""
    measured = known(targets)
    return f"{len(measured) - len(missed(measured))} of {len(measured)}{what}{rest(targets)}"


def rest(targets: Sequence[Target]) -> str:
    """The end of a sentence about those that were measured: how many further ones were not."""
    late = len(targets) - len(known(targets))
    return f", {late} more not measured" * bool(late)


def verdict_of(runs: Iterable[RunTargets], row: Row, name: str) -> str:
    """The target of this name of a row's device and data, and whether it is met: "target at most 10.4 us: missed"."""
    device, data = row.device, table_parts(row.table)[2]
    for run in runs:
        for target in run.targets:
            if (run.where.device, run.where.data, target.name) == (device, data, name):
                bound = f"{'at least' if target.at_least else 'at most'} {target.texts[1]}"
                verdict = {True: "met", False: "missed", None: "not measured"}[target.reached]
                return (
                    f"target {bound} {target.unit or run.unit or row.unit.replace('ratio', 'times')}".rstrip()
                    + f": {verdict}"
                )
    return NO_TARGET


def percent_over(value: float, base: float) -> float:
    """How much more a value is than another, in percent of that."""
    return (value / base - 1) * 100


@dataclass(frozen=True)
class Limit:
    """A line of ``targets.csv``: the bound of a metric of an experiment's rows.

    key: of what, in the experiment's own words, its parts between bars; a `*` stands for anything. of: what the bound is a
    multiple of (a published value, that of another method of the same run); nothing: it is the value itself.
    """

    key: str
    metric: str
    at_least: bool
    bound: float
    of: str
    reason: str

    @property
    def parts(self) -> list[str]:
        """The parts of the key."""
        return self.key.split(" | ")

    def target(self, name: str, value: float | None, base: float = 1.0, **shown: Any) -> Target:
        """The target of a value, as many times `base`. shown: fields of the target that say how."""
        return Target(name, value, self.bound * base, self.at_least, **shown)


@cache
def limits(experiment: str) -> tuple[Limit, ...]:
    """The lines of an experiment, in the order of the file."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Limit(
                one["key"],
                one["metric"],
                one["comparison"] == "at least",
                float(Fraction(one["bound"])),
                one["of"],
                one["reason"],
            )
            for one in csv.DictReader(file)
            if one["experiment"] == experiment
        )


def limit_of(experiment: str, key: str, metric: str) -> Limit:
    """The first line whose key matches; KeyError without one."""
    for one in limits(experiment):
        if one.metric == metric and fnmatchcase(key, one.key):
            return one
    raise KeyError(f"no target of {metric!r} of {key!r} in {FILE.name} of {experiment}")


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
    """All targets of each device that has one."""
    found: dict[str, list[Target]] = {}
    for run in runs:
        found.setdefault(run.where.device, []).extend(run.targets)
    return {device: targets for device, targets in found.items() if targets}


def counted(runs: Iterable[RunTargets]) -> str:
    """How many targets are reached of those that were measured, by device; nothing where there is none."""
    words = [
        f"on {device_name(device)} {counts(targets) if known(targets) else f'none of {len(targets)} measured'}"
        for device, targets in by_device(runs).items()
    ]
    return f"targets reached {'; '.join(words)}" if words else ""


def missed_tables(runs: Sequence[RunTargets]) -> list[Table]:
    """Of each device a table of what is missed, in the order of the runs, then one of what is missed by values that are better
    than what they are compared with (`Target.ahead`); none of one that misses nothing."""
    found = []
    for device, targets in by_device(runs).items():
        mine = [run for run in runs if run.where.device == device]
        reached = f"{device_name(device)}: {counts(targets, ' reached')}"
        for title, ahead in ((reached, False), (f"{device_name(device)}: {AHEAD}", True)):
            if lines := [line for run in mine for line in missed_lines(run, ahead)]:
                found.append(Table(title, COLUMNS, lines))
    return found


def missed_lines(run: RunTargets, ahead: bool) -> list[list[str]]:
    """The lines of a run that are ahead in spite of their target, or those that are not; those of a method with one limit stand
    in one of them."""
    series: dict[tuple[str, float, str], list[tuple[str, Target]]] = {}
    for target in missed(run.targets):
        if target.ahead(run.unit) == ahead:
            found = AT_TOKENS.fullmatch(target.name)
            name, rows = (found["name"], found["tokens"]) if found else (target.name, "")
            series.setdefault((name, target.limit, target.day), []).append((rows, target))
    return [line(run, name, members) for (name, *_), members in series.items()]


def line(run: RunTargets, name: str, members: Sequence[tuple[str, Target]]) -> list[str]:
    """The cells of targets of one name and limit, with the numbers of tokens that they are at."""
    at, first = ", ".join(rows for rows, _ in members if rows), members[0][1]
    name += f", {at} token{'s' * (at != '1')}" if at else ""
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
