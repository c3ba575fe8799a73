"""The note under a table: when and at which commits its rows were measured, and what has changed since.

It is information: no test reads it, and nothing fails by it. Which files count the experiment's record says (`folders`).
"""

from __future__ import annotations

from collections.abc import Iterable

from experiments.harness.registry import EXPERIMENTS
from experiments.harness.revision import changed_files
from experiments.harness.rows import Row

#: Commits that a note names one by one; of more, the first and the last.
NAMED = 3
UNKNOWN = "an unknown commit"


def note(rows: Iterable[Row]) -> str:
    """As "measured 2026-11-26 at 0832d6b6; since then 14 files under reference, fast changed"; nothing without rows."""
    rows = list(rows)
    if not rows:
        return ""
    commits = commits_of(rows)
    return measured_at(rows) + since(next(iter(commits)), len(commits) > 1, folders(rows))


def measured_at(rows: Iterable[Row]) -> str:
    """Days and commits in words; of many the days and the oldest."""
    commits = commits_of(rows)
    days = [day or "an unknown day" for day in commits.values()]
    if len(commits) > NAMED:
        return f"measured {days[0]} to {days[-1]} at {len(commits)} commits, the oldest {next(iter(commits))}"
    named = dict.fromkeys(days)
    at = {
        day: ", ".join(one or UNKNOWN for one, of in zip(commits, days, strict=True) if of == day)
        for day in named
    }
    return "measured " + "; ".join(f"{day} at {names}" for day, names in at.items())


def commits_of(rows: Iterable[Row]) -> dict[str, str]:
    """The commits of some rows, the oldest first, each with the first day at which a row was measured there."""
    found: dict[str, str] = {}
    for row in rows:
        day = row.date[:10]
        found[row.commit] = min(found.get(row.commit, day), day)
    return dict(sorted(found.items(), key=lambda one: one[1]))


def folders(rows: Iterable[Row]) -> tuple[str, ...]:
    """The folders whose changes matter to some rows."""
    names = dict.fromkeys(row.experiment for row in rows)
    return tuple(
        dict.fromkeys(one for name in names if name in EXPERIMENTS for one in EXPERIMENTS[name].folders)
    )


def since(commit: str, several: bool, watched: tuple[str, ...]) -> str:
    """What has changed since the oldest commit, or nothing where that is not known here."""
    count = changed_files(commit, watched) if watched else None
    if count is None:
        return ""
    start = "the oldest" if several else "then"
    return f"; since {start} {count} file{'s' * (count != 1)} under {', '.join(watched)} changed"


__all__ = ["measured_at", "note"]
