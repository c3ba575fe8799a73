"""Rows that were measured by code that is unchanged keep their validity: `python3 -m experiments.ledger.carry_over`.

For rows whose hash was made by another rule. Each row in ``reports/data/`` whose hash is that of a known revision is held
against that revision: if what its measurement reaches there has the hash that it has today (names, places and messages do not
count, see `experiments.source.closure`), the row gets today's hash; else it stays as it is, and is stale. Run again, it changes
nothing more. The record of each run (``environment.json``) likewise. It needs the history of git.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from experiments.harness import provenance
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import ROOT, Row, read, table_parts, write, write_text
from experiments.source.closure import Closure, SourceTree

#: Revisions whose code made published rows, by the hash that their rule gave it: over all files of the four packages.
REVISIONS = {
    "e5e3cad39345": "6f2561a",
    "abc576dd4255": "0f820ff",
    "d6fbfbf6a3b3": "bbca46c",
    "b20ad1645391": "37901e8",
    "6220891cc74c": "59dc874",
    "52f81d4b843e": "c559412",
    "b7ff229822d1": "df4942f",
    "903211bcdfad": "b228ef5",
}
#: How modules of bookkeeping were called in these revisions.
OLD_BOOKKEEPING = (
    *(
        f"experiments.{name}"
        for name in ("environment", "ledger", "ledger_sources", "lock", "pages", "places")
    ),
    *(
        f"experiments.{name}"
        for name in ("plots", "progress", "published_rows", "registry", "results", "rows")
    ),
    *("experiments.settings", "experiments.train.cache_key"),
)
#: Compared by eye, because the hash of a row stands in it: the settings' values are the same in all of these revisions.
REVIEWED = ("experiments.runs.settings",)
#: The function that measures, where it stood in these revisions.
OLD_RUNS = {
    "formats": "experiments.formats.run",
    "ptq": "experiments.ptq.run",
    "speed": "experiments.speed.run",
    "decode": "experiments.decode.run",
    "qat": "experiments.qat_recovery.run",
    "qat_overhead": "experiments.qat_overhead.run",
}
#: What the settings of a trained model reach, now and then; the name of a model in the cache (`cache_key`) makes no number.
TRAINED = {
    "experiments.models.train.train": "experiments.train.train",
    "experiments.models.train.FULL": "experiments.train.FULL",
    "experiments.models.train.QUICK": "experiments.train.QUICK",
    "experiments.data.corpus.load": "experiments.corpus.load",
    "experiments.data.multiple_choice.MultipleChoiceSettings": "experiments.exam.ExamSettings",
}


@dataclass
class Old:
    """A revision: its source, and closures in it."""

    tree: SourceTree
    closures: dict[tuple[str, ...], str] = field(default_factory=dict)

    def hash(self, *roots: str) -> str:
        """The hash of what some names reach there; nothing where there is no such name."""
        if roots not in self.closures:
            try:
                self.closures[roots] = Closure(self.tree, roots).hash
            except ValueError:
                self.closures[roots] = ""
        return self.closures[roots]


@cache
def revision(name: str) -> Old:
    """A revision out of git."""
    with unpacked(name) as folder:
        opaque = (*provenance.BOOKKEEPING, *OLD_BOOKKEEPING, *REVIEWED)
        return Old(SourceTree(folder, provenance.PACKAGES, opaque, stubs_of(folder), provenance.REGISTRARS))


@contextmanager
def unpacked(name: str) -> Iterator[Path]:
    """The packages of a revision in a folder."""
    command = ["git", "archive", name, *provenance.PACKAGES]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
        yield Path(folder)


def stubs_of(folder: Path) -> Mapping[str, Mapping[str, tuple[str, str]]]:
    """Public names of `ao_lab` before they had a stub: `NAMES` lists them by module."""
    import ast

    text = (folder / "ao_lab" / "__init__.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "NAMES":
                names = ast.literal_eval(node.value)
                return {
                    "ao_lab": {
                        one: (f"ao_lab.{module}", one) for module, found in names.items() for one in found
                    }
                }
    return {}


@cache
def today() -> Old:
    """The clone as it is."""
    return Old(
        SourceTree(
            ROOT, provenance.PACKAGES, (*provenance.BOOKKEEPING, *REVIEWED), registrars=provenance.REGISTRARS
        )
    )


@cache
def unchanged(name: str, experiment: str) -> bool:
    """Whether an experiment measures by the same code at a revision and now."""
    if experiment in provenance.PROGRAMS:
        roots = dict.fromkeys(provenance.PROGRAMS[experiment])
        before, now = [tree.hash(*roots) for tree in (revision(name), today())]
    elif experiment in EXPERIMENTS and experiment in OLD_RUNS:
        more = TRAINED if EXPERIMENTS[experiment].trained else {}
        now = today().hash(f"experiments.{experiment}.{EXPERIMENTS[experiment].run}.run", *more)
        before = revision(name).hash(OLD_RUNS[experiment], *more.values())
    else:
        return False
    return bool(now) and now == before


def carried(row: Row) -> Row:
    """The row with the hash of today, where the code that made it is unchanged."""
    name = REVISIONS.get(row.source_hash)
    if name is None or not unchanged(name, row.experiment):
        return row
    kind, _, _ = table_parts(row.table)
    return replace(row, source_hash=provenance.row_hash(row.experiment, kind, row.setting, row.method))


def main() -> int:
    """Carry over all rows and records, and say how many are current and how many are stale."""
    data = ROOT / "reports" / "data"
    for path in sorted(data.glob("*.csv")):
        rows = read(path)
        current = [carried(row) for row in rows]
        if current != rows:
            write(path, current)
        counts = Counter(
            (table_parts(row.table)[1], row.device, provenance.is_current(row)) for row in current
        )
        for (scale, device, current), count in sorted(counts.items()):
            sys.stdout.write(f"{path.name} {scale} {device}: {count} {'current' if current else 'stale'}\n")
    path = data / "environment.json"
    runs = json.loads(path.read_text(encoding="utf-8"))
    for run in runs.values():
        name = REVISIONS.get(run["source_hash"])
        if name and unchanged(name, run["experiment"]):
            run["source_hash"] = provenance.experiment_hash(run["experiment"])
    text = json.dumps(runs, indent=2) + "\n"
    if text != path.read_text(encoding="utf-8"):
        write_text(path, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
