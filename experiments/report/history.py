"""The history of the values of the first page: what each was at which commit, since a run's rows replace those before.

``reports/data/history.csv`` holds them as rows, one for each value, commit and day. Writing pages adds today's. What was
published before there was this file was taken from the history of the repository (`experiments.report.committed`), and no page
reads git for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

from experiments.harness import rows as tidy
from experiments.harness.paths import Paths
from experiments.harness.revision import subject
from experiments.harness.rows import Key, Row
from experiments.report.content import Table
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
#: Units of differences and shares, whose change in percent says nothing.
DIFFERENCES = ("%", "points")


@dataclass(frozen=True)
class History:
    """One value over time, the oldest first: what of, and its rows."""

    what: str
    rows: Sequence[Row]

    @property
    def table(self) -> Table:
        """Day, commit with the first line of its message, value and its change from the one before; the newest first."""
        lines = []
        for place, row in enumerate(self.rows):
            change = changed(self.rows[place - 1], row) if place else ""
            told = shorten(f"{row.commit} {subject(row.commit)}", WORDS, placeholder=" ...")
            lines.append([row.date[:10], told, worded(row), change])
        columns = ["measured", "commit", self.measures, "since the line below"]
        return Table(f"{self.what}: {self.rows[-1].device}", columns, lines[::-1])

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
        """The first and the last value and the day of the first, which stand beside the picture."""
        first, last = self.rows[0], self.rows[-1]
        return f"{short(first.value)} to {short(last.value)} since {first.date[:10]}"

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


def changed(before: Row, row: Row) -> str:
    """How far a value is from the one before it: in percent, or points of what is a difference or a share itself, since that
    may lie near 0 or below; and whether it is better or worse."""
    if row.unit in DIFFERENCES:
        points = round(row.value - before.value, 2)
        return f"{points:+.2f} points{judged(row, points, NOISE_POINTS)}" if points else UNCHANGED
    percent = round(100 * (row.value / before.value - 1), 1) if before.value else 0.0
    return f"{percent:+.1f}%{judged(row, percent)}" if percent else UNCHANGED


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


def histories(rows: Sequence[Row], named: Iterable[tuple[str, Row]]) -> list[History]:
    """The history of some rows, each with the words that say what it is; of those that have one."""
    by_key: dict[Key, list[Row]] = {}
    for row in rows:
        by_key.setdefault(row.key, []).append(row)
    return [History(what, by_key[row.key]) for what, row in named if row.key in by_key]
