"""The ledger: ``reports/gpu/ledger.json``, what a GPU found of each function with kernels, and for which code.

CI has no GPU. So an entry says which code a GPU tested (`experiments.ledger.entries`), and ``reports/data/kernels.csv`` holds
what it measured. An entry whose code is not today's has to be tested and measured again: `problems` names it and what changed,
`experiments.ledger.refresh` runs what is stale and nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.harness import rows as tidy
from experiments.harness.rows import ROOT, Row
from experiments.ledger.entries import Entries, benchmarks_of, functions, problem


def path_of(root: Path = ROOT) -> Path:
    """Where a clone has its ledger."""
    return root / "reports" / "gpu" / "ledger.json"


def read(root: Path = ROOT) -> Entries:
    """The entries as they were written; none where there is no ledger."""
    path = path_of(root)
    if not path.exists():
        return {}
    entries: Entries = json.loads(path.read_text(encoding="utf-8")).get("entries", {})
    return entries


def write(entries: Entries, root: Path = ROOT) -> Path:
    """Replace the ledger as a whole."""
    text = json.dumps({"entries": dict(sorted(entries.items()))}, indent=1, sort_keys=True)
    tidy.write_text(path_of(root), text + "\n")
    return path_of(root)


def measured(root: Path = ROOT) -> list[Row]:
    """The published benchmarks."""
    return tidy.read(root / "reports" / "data" / "kernels.csv")


def problems(root: Path = ROOT) -> dict[str, str]:
    """What is not valid, by function: missing, stale, untested or failed entries, and those of no such function."""
    entries, rows = read(root), measured(root)
    found = {name: problem(name, entries.get(name), rows) for name in functions()}
    gone = {name: "stale: no such function" for name in entries if name not in functions()}
    return {name: words for name, words in sorted({**found, **gone}.items()) if words}


def shown(root: Path = ROOT) -> dict[str, dict[str, Any]]:
    """Entries without the hashes of modules, each with its cases: how many were measured, and how many reach their targets."""
    from experiments.kernels.report.case_results import results_of

    rows = measured(root)
    found = {}
    for name, entry in read(root).items():
        results = [one for run in results_of(benchmarks_of(name, rows)).values() for one in run]
        reached = sum(not one.missed for one in results)
        summary = {key: value for key, value in entry.items() if key != "modules"}
        found[name] = {**summary, "benchmarks": {"measured": len(results), "reached": reached}}
    return found


__all__ = ["path_of", "problems", "read", "shown", "write"]
