"""The note under a table: when and at which commits its rows were measured, and what has changed since.

It is information: nothing fails by it. Which files count the experiment's record says (`folders`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from experiments.harness.registry import EXPERIMENTS
from experiments.harness.revision import changed_files
from experiments.harness.rows import Row

#: Commits that a note names one by one; of more, how many there are and the oldest.
NAMED = 3


def note(rows: Iterable[Row]) -> str:
    """As "measured 2026-11-26 at 0832d6b6; since then 14 files under reference, fast changed"; nothing without rows, and
    nothing of changes where the oldest commit is not known here."""
    rows = list(rows)
    if not rows:
        return ""
    commits, words = commits_of(rows), measured_at(rows)
    known = dict.fromkeys(row.experiment for row in rows if row.experiment in EXPERIMENTS)
    folders = tuple(dict.fromkeys(folder for name in known for folder in EXPERIMENTS[name].folders))
    count = changed_files(next(iter(commits)), folders) if folders else None
    if count is None:
        return words
    start = "the oldest" if len(commits) > 1 else "then"
    named = ", ".join(dict.fromkeys(re.sub("^experiments/.*", "experiments", folder) for folder in folders))
    return f"{words}; since {start} {count} file{'s' * (count != 1)} under {named} changed"


def measured_at(rows: Iterable[Row]) -> str:
    """Days and commits in words; of many the days and the oldest."""
    commits = commits_of(rows)
    if len(commits) > NAMED:
        days = list(commits.values())
        return f"measured {days[0]} to {days[-1]} at {len(commits)} commits, the oldest {next(iter(commits))}"
    at: dict[str, list[str]] = {}
    for commit, day in commits.items():
        at.setdefault(day or "an unknown day", []).append(commit or "an unknown commit")
    return "measured " + "; ".join(f"{day} at {', '.join(names)}" for day, names in at.items())


def commits_of(rows: Iterable[Row]) -> dict[str, str]:
    """The commits of some rows, the oldest first, each with the day at which a row was first measured there."""
    found: dict[str, str] = {}
    for row in rows:
        found[row.commit] = min(found.get(row.commit, row.date), row.date)
    return {commit: date[:10] for commit, date in sorted(found.items(), key=lambda one: one[1])}
