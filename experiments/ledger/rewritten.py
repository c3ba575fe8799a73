"""Rows stay valid where code was written in another way and runs the same: `python3 -m experiments.ledger.rewritten`.

A row's hash is of source, so a lookup by name that becomes the name itself makes it stale, though nothing else runs. Such
changes are listed here, each with the revision before it, the files and the reason. A row that was current at that revision,
and whose code there has today's hash once the listed files are as they are today, gets today's hash; whatever else has changed
since leaves it stale. It needs the history of git.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness import provenance
from experiments.harness.rows import ROOT, Row, read, table_parts, write, write_text
from experiments.ledger.carry_over import unpacked
from experiments.ledger.rewrites import REWRITES, Rewrite
from experiments.source.closure import Closure, SourceTree

#: How the status of what failed begins.
FAILED = "status: error"


def tree_of(folder: Path) -> SourceTree:
    """The source in a folder, read as `provenance` reads this clone."""
    return SourceTree(folder, provenance.PACKAGES, provenance.BOOKKEEPING, registrars=provenance.REGISTRARS)


def trees(rewrite: Rewrite, clone: Path = ROOT) -> tuple[SourceTree, SourceTree]:
    """The revision as it was, and with the rewritten files as they are in the clone."""
    with unpacked(rewrite.revision) as folder:
        before = tree_of(folder)
        for file in rewrite.files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            if (clone / file).exists():
                shutil.copyfile(clone / file, folder / file)
            else:  # moved or removed
                (folder / file).unlink(missing_ok=True)
        return before, tree_of(folder)


def renamed(
    before: SourceTree, after: SourceTree, now: SourceTree, starts: Iterable[tuple[str, ...]]
) -> dict[str, str]:
    """Hashes of before by which rows are known, each with today's, where only what was rewritten differs."""

    @cache
    def digits(tree: SourceTree, roots: tuple[str, ...]) -> str:
        try:
            return Closure(tree, roots).hash[: provenance.DIGITS]
        except ValueError:
            return ""

    return {
        digits(before, roots): digits(now, roots)
        for roots in dict.fromkeys(starts)
        if digits(before, roots) and digits(after, roots) == digits(now, roots)
    }


def roots_of(row: Row) -> tuple[str, ...]:
    """What a row's measurement starts from."""
    sources, (kind, _, _) = provenance.sources_of(row.experiment), table_parts(row.table)
    if callable(sources):
        found: tuple[str, ...] = sources(kind, row.setting, row.method)
        return found
    return provenance.experiment_roots(row.experiment)


def carry(
    data: Path, hashes: dict[str, str], concerns: Callable[..., bool] = lambda experiment, kind=None: True
) -> int:
    """Put today's hashes into rows and into the records of runs; how many rows changed. What failed is to be tried again.

    concerns: which experiments and kinds of tables; a hash may be that of several.
    """
    changed = 0
    for path in sorted(data.glob("*.csv")):
        rows = read(path)
        made = [
            row
            if row.metric.startswith(FAILED) or not concerns(row.experiment, row.table.partition("/")[0])
            else replace(row, source_hash=hashes.get(row.source_hash, row.source_hash))
            for row in rows
        ]
        changed += sum(one != other for one, other in zip(rows, made, strict=True))
        if made != rows:
            write(path, made)
    for name in ("environment.json", "origins.json"):
        carry_records(data / name, hashes, concerns)
    return changed


def carry_records(path: Path, hashes: dict[str, str], concerns: Callable[..., bool]) -> None:
    """The same in a file of records, whose names begin with an experiment's."""
    text, made = path.read_text(encoding="utf-8"), dict[str, Any]()
    for name, record in json.loads(text).items():
        entry = json.dumps({name: record})
        for old, new in hashes.items() if concerns(name.partition("/")[0]) else ():
            entry = entry.replace(old, new)
        made |= json.loads(entry)
    if made != json.loads(text):
        indent = 2 if text.startswith("{\n  ") else 1
        write_text(path, json.dumps(made, indent=indent) + "\n")


def main() -> int:
    """Carry all rows over each rewrite in turn, and say how many there were."""
    data = ROOT / "reports" / "data"
    for rewrite in REWRITES:
        rows = [
            row
            for path in sorted(data.glob("*.csv"))
            for row in read(path)
            if rewrite.concerns(row.experiment, row.table.partition("/")[0])
        ]
        starts = {roots_of(row) for row in rows} | {
            provenance.experiment_roots(name) for name in provenance.EXPERIMENTS if rewrite.concerns(name)
        }
        hashes = renamed(*trees(rewrite), provenance.read_sources(), sorted(one for one in starts if one))
        count = carry(data, {old: new for old, new in hashes.items() if old != new}, rewrite.concerns)
        sys.stdout.write(f"{rewrite.revision} ({', '.join(rewrite.files)}): {count} rows\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
