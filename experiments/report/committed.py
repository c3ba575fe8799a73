"""What the history of the repository has of the values of the first page: every committed version of the files of rows.

``python -m experiments.report.committed`` adds it to ``reports/data/history.csv`` (`experiments.report.history`): once for a
value that a page begins to quote, since writing pages adds what is measured from then on.
"""

from __future__ import annotations

import csv
import gzip
import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ao_lab.install.revision import DIGITS, printed, printed_bytes
from experiments.harness.paths import Paths, shown
from experiments.harness.rows import COLUMNS, ROOT, Key, Row
from experiments.report.history import path_of, remember
from experiments.report.pages import make_pages, quoted_rows

#: What a file of rows has had from the beginning.
OLDEST = ("experiment", "table", "setting", "method", "metric", "value", "unit", "device", "seed")


def committed(path: Path, keys: set[Key]) -> Iterator[Row]:
    """The rows of these keys wherever a committed version of a file of rows changed them, the oldest first. A row that names no
    commit and day, as the first ones did, gets those of the version that brought it."""
    plain = path.with_name(path.name.removesuffix(".gz"))
    seen: dict[Key, float] = {}
    for name in dict.fromkeys(one.relative_to(ROOT).as_posix() for one in (plain, path)):
        for commit, day in versions_of(name):
            data = printed_bytes("git", "show", f"{commit}:{name}")
            for row in parsed(data, name.endswith(".gz")) if data else ():
                if row.key in keys and seen.get(row.key) != row.value:
                    seen[row.key] = row.value
                    yield replace(row, commit=row.commit or commit, date=row.date or day)


def versions_of(name: str) -> list[tuple[str, str]]:
    """The commits that changed a file, the oldest first, each with its time in UTC."""
    command = (
        "git",
        "log",
        "--reverse",
        f"--abbrev={DIGITS}",
        "--format=%h %cd",
        "--date=format-local:%Y-%m-%dT%H:%M:%SZ",
    )
    lines = (printed("env", "TZ=UTC", *command, "--", name) or "").splitlines()
    return [(commit, day) for commit, _, day in (line.partition(" ") for line in lines)]


def parsed(data: bytes, compressed: bool) -> Iterator[Row]:
    """The rows of a version; none where it is no file of rows."""
    text = (gzip.decompress(data) if compressed else data).decode()
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if set(OLDEST) <= set(reader.fieldnames or ()):
        for record in reader:
            if record["value"]:
                told = {
                    name: record.get(name) or ""
                    for name in COLUMNS
                    if name not in ("value", "published", "seed")
                }
                yield Row(**told, value=float(record["value"]), seed=int(record["seed"]))


def main() -> int:
    """Add what the history of the repository has of the first page's values."""
    places = Paths.default()
    rows = [row for _, row in quoted_rows(make_pages(places))]
    found = [
        one
        for name in dict.fromkeys(row.experiment for row in rows)
        for one in committed(places.rows(name), {row.key for row in rows if row.experiment == name})
    ]
    merged = remember(places, [*found, *rows])
    sys.stdout.write(f"{len(merged)} values of {len(rows)} in {shown(path_of(places))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
