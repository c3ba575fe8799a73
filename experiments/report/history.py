"""The history of the values of the first page: what each was at which commit, since a run's rows replace those before.

``reports/data/history.csv`` holds them as rows, one for each value, commit and day. Writing pages adds today's. What was
published before there was this file was taken from the history of the repository (`experiments.report.committed`), and no page
reads git for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

from ao_lab.intervals import half_interval
from experiments.harness import rows as tidy
from experiments.harness.paths import Paths
from experiments.harness.revision import subject
from experiments.harness.rows import Key, Row
from experiments.report.content import WINDOWS, Table
from experiments.report.scoreboard import better, short

FILE = "history.csv"
#: Width and height of a small picture of a history, and how far its line stays from the ends.
WIDTH, HEIGHT, MARGIN = 120, 28, 3
#: Changes up to this many percent are those of two measurements of the same code.
NOISE = 2.0
#: The same of a difference or a share, in its own units.
NOISE_POINTS = 0.1
#: Instead of a change that its digits do not show.
UNCHANGED = "unchanged"
#: The least change that fills the height of a picture: of a value a share of it, of a difference or a share itself points.
LEAST_SHARE, LEAST_POINTS = 0.25, 5.0
#: Characters of a commit with the first line of its message.
WORDS = 90
#: How metrics end that are half of an interval; a change of perplexity, and what its interval is made of.
ENDING, CHANGE = ", 95% interval", "perplexity, change"
OF_PERPLEXITY = ("loss, change", "loss, standard error of the change", WINDOWS)
#: Units of differences and shares, whose change in percent says nothing.
DIFFERENCES = ("%", "points")


@dataclass(frozen=True)
class History:
    """One value over time, the oldest first: what of, its rows, and half of the last one's 95% interval, 0 if not known."""

    what: str
    rows: Sequence[Row]
    half: float = 0.0

    @property
    def table(self) -> Table:
        """Day, commit with the first line of its message, value and its change from the one before; the newest first."""
        lines = []
        for place, row in enumerate(self.rows):
            change = changed(self.rows[place - 1], row, self.half) if place else ""
            told = shorten(f"{row.commit} {subject(row.commit)}", WORDS, placeholder=" ...")
            lines.append([row.date[:10], told, worded(row), change])
        columns = ["measured", "commit", self.measures, "since the line below"]
        return Table(f"{self.what}: {self.rows[-1].device}", columns, lines[::-1])

    @property
    def before(self) -> str:
        """How far the last value is from the one before; nothing of one that was measured once."""
        return changed(self.rows[-2], self.rows[-1], self.half) if len(self.rows) > 1 else ""

    @property
    def first(self) -> str:
        """How far the last value is from the first, and from the best where that is neither: what small steps add up to."""
        if len(self.rows) < 2:
            return ""
        last, best = self.rows[-1], self.best
        words = changed(self.rows[0], last, self.half)
        if not self.passed:
            return words
        return f"{words}; since the best, {short(best.value)} on {best.date[:10]}: {changed(best, last, self.half)}"

    @property
    def best(self) -> Row:
        """The row of its best value."""
        most = better(self.rows[-1].metric) == "more"
        return (max if most else min)(self.rows, key=lambda row: row.value)

    @property
    def passed(self) -> bool:
        """Whether the best value is neither the first nor the last, by the digits that are shown."""
        return short(self.best.value) not in {short(row.value) for row in (self.rows[0], self.rows[-1])}

    @property
    def measures(self) -> str:
        """What its values are, in which unit where that is one of differences and shares, and which direction is better."""
        last = self.rows[-1]
        unit = f"{last.unit}, " if last.unit in DIFFERENCES else ""
        return f"{last.metric.replace('gap, ', 'gap of ')} ({unit}{self.direction})"

    @property
    def direction(self) -> str:
        """Which direction is better."""
        return "higher is better" if better(self.rows[-1].metric) == "more" else "lower is better"

    @property
    def line(self) -> str:
        """The points of a small picture, as SVG takes them; nothing of fewer than two. Small changes look small (`least`)."""
        values = [row.value for row in self.rows]
        if len(values) < 2:
            return ""
        span = max(max(values) - min(values), self.least)
        low = (max(values) + min(values) - span) / 2
        across, up = (WIDTH - 2 * MARGIN) / (len(values) - 1), (HEIGHT - 2 * MARGIN) / (span or 1)
        places = (
            (MARGIN + place * across, HEIGHT - MARGIN - (value - low) * up)
            for place, value in enumerate(values)
        )
        return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

    @property
    def least(self) -> float:
        """The least change that fills the height of the picture."""
        largest = max(abs(row.value) for row in self.rows)
        return LEAST_POINTS if self.rows[-1].unit in DIFFERENCES else LEAST_SHARE * largest

    @property
    def moved(self) -> bool:
        """Whether its picture shows anything: two measurements that a reader can tell apart."""
        return len({short(row.value) for row in self.rows}) > 1

    @property
    def ends(self) -> str:
        """The first and the last value, their days, and the best where that is neither, which stand beside the picture."""
        first, last, best = self.rows[0], self.rows[-1], self.best
        told = f"{short(first.value)} on {first.date[:10]}, now {short(last.value)}"
        return f"{told}, best {short(best.value)}" if self.passed else told

    @property
    def words(self) -> str:
        """What the picture shows, for those who do not see it."""
        first, last = self.rows[0], self.rows[-1]
        return (
            f"{len(self.rows)} measurements, from {short(first.value)} on {first.date[:10]} to {short(last.value)} on "
            f"{last.date[:10]}"
        )


def worded(row: Row) -> str:
    """A value with its unit; a ratio as "2.908x"."""
    return f"{short(row.value)}x" if row.unit == "ratio" else f"{short(row.value)} {row.unit}".strip()


def changed(before: Row, row: Row, half: float = 0.0) -> str:
    """How far a value is from one before it: in percent, or points of what is a difference or a share itself, since that may
    lie near 0 or below; and whether it is better or worse, where it is further than chance takes it.

    half: half of the 95% interval of the later value. That of the earlier one is taken to be as wide, so that of their
    difference, of two measurements that are independent, is sqrt(2) times as wide.
    """
    chance = math.sqrt(2) * half
    if row.unit in DIFFERENCES:
        points = round(row.value - before.value, 2)
        return (
            f"{points:+.2f} points{judged(row, points, max(NOISE_POINTS, chance))}" if points else UNCHANGED
        )
    percent = round(100 * (row.value / before.value - 1), 1) if before.value else 0.0
    of_value = 100 * chance / abs(before.value) if before.value else 0.0
    return f"{percent:+.1f}%{judged(row, percent, max(NOISE, of_value))}" if percent else UNCHANGED


def judged(row: Row, change: float, noise: float = NOISE) -> str:
    """Whether a change is for the better or the worse; nothing of one that repeated measurements make too."""
    if abs(change) < noise:
        return ""
    return ", better" if (change > 0) == (better(row.metric) == "more") else ", worse"


def path_of(places: Paths) -> Path:
    """The file of a folder of reports."""
    return places.data / FILE


def remember(places: Paths, rows: Iterable[Row]) -> list[Row]:
    """Add rows to the file, each once for its commit and day; returns all that it then holds."""
    path = path_of(places)
    known = tidy.read(path)
    merged = in_order([*known, *rows])
    if merged != known:
        tidy.write(path, merged)
    return merged


def in_order(rows: Iterable[Row]) -> list[Row]:
    """One row for each value, commit and day, by value, then by time; what repeats the value before it is left out."""
    dated = sorted((row for row in rows if row.date), key=lambda row: row.date)
    unique = {(row.key, row.commit, row.date[:10]): row for row in dated}
    kept: list[Row] = []
    for row in sorted(unique.values(), key=lambda row: (row.key, row.date)):
        if not kept or kept[-1].key != row.key or written(kept[-1]) != written(row):
            kept.append(row)
    return kept


def written(row: Row) -> tuple[str, str]:
    """What tells a measurement from the one before it: the value as files have it, and its commit."""
    return f"{row.value:.9g}", row.commit


def histories(
    rows: Sequence[Row], named: Iterable[tuple[str, Row]], halves: Mapping[Key, float] | None = None
) -> list[History]:
    """The history of some rows, each with the words that say what it is; of those that have one. halves: half of the 95%
    interval of each row that has one (`halves_of`)."""
    by_key: dict[Key, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    known = halves or {}
    return [
        History(what, by_key[row.key], known.get(row.key, 0.0)) for what, row in named if row.key in by_key
    ]


def halves_of(rows: Iterable[Row]) -> dict[Key, float]:
    """Half of the 95% interval of values, by their keys, as rows beside them say it; of a change of perplexity by the standard
    error of that of the loss."""
    found: dict[Key, float] = {}
    losses: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        if row.metric.endswith(ENDING):
            found[replace(row, metric=row.metric.removesuffix(ENDING)).key] = row.value
        elif row.metric in OF_PERPLEXITY:
            losses.setdefault(replace(row, metric=CHANGE).key, {})[row.metric] = row.value
    for key, known in losses.items():
        loss, error, windows = (known.get(name) for name in OF_PERPLEXITY)
        half = half_interval(error, None if windows is None else int(windows))
        if loss is not None and half is not None:
            found[key] = 100 * math.exp(loss) * half
    return found
