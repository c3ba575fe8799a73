"""Gives rows of before 2026-11-28 their date, commit, versions and kernel, once; then this module goes.

    python -m experiments.runs.convert_history

A row carried a hash of code that was overwritten whenever code moved. What is known of its origin stands in the history: the
commit at which its *value* last changed, that commit's time, and the versions that ``origins.json`` or ``environment.json``
named at that commit (the latter where its record of the run changed in the same commit). What neither says stays empty.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from experiments.harness.rows import ROOT
from experiments.runs.validations import Validation, record

KEY = ("experiment", "table", "setting", "method", "metric", "device", "seed")
NAMED = ("torch", "triton", "numpy", "jax", "torchao")
COLUMNS = (
    "experiment", "table", "setting", "method", "metric", "value", "unit", "published", "device", "seed", "kernel", "date",
    "commit", "versions",
)  # fmt: skip
KERNEL = "kernel: "
Record = dict[str, str]


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def records(commit: str, path: str) -> list[Record]:
    """The rows of a file at a commit; none where it was not there."""
    try:
        return list(csv.DictReader(io.StringIO(git("show", f"{commit}:{path}"))))
    except subprocess.CalledProcessError:
        return []


def key(record: Record) -> tuple[str, ...]:
    """What tells a row from others."""
    return tuple(record[name] for name in KEY)


def origins(path: str) -> dict[tuple[str, ...], tuple[str, str, str]]:
    """Of every row, its value at the head, the commit at which it took that value, and the hash that it had there."""
    lines = git("rev-list", "--topo-order", "--reverse", "--parents", "HEAD", "--", path).split("\n")
    states: dict[str, dict[tuple[str, ...], tuple[str, str, str]]] = {}
    last = ""
    for line in filter(None, lines):
        last, *parents = line.split()
        before = [states[one] for one in parents if one in states]
        states[last] = {}
        for row in records(last, path):
            name, value = key(row), row["value"]
            known = next((one[name] for one in before if name in one and one[name][0] == value), None)
            states[last][name] = known or (value, last, row.get("source_hash", ""))
    return states[last]


@cache
def document(commit: str, name: str) -> dict[str, Any]:
    """A JSON file of reports/data at a commit."""
    try:
        return json.loads(git("show", f"{commit}:reports/data/{name}"))
    except (subprocess.CalledProcessError, ValueError):
        return {}


@cache
def time_of(commit: str) -> str:
    """When a commit was made, in UTC."""
    seconds = int(git("show", "-s", "--format=%ct", commit))
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions(record: Record, commit: str, source_hash: str) -> str:
    """The libraries that a row was measured with, or nothing."""
    name = f"{record['experiment']}/{record['table']}/{record['device']}/{source_hash}"
    origin = document(commit, "origins.json").get(name)
    if origin is not None:
        return text(origin["libraries"], origin["processor"], record["device"])
    return from_runs(record["experiment"], record["table"], record["device"], commit)


@cache
def from_runs(experiment: str, table: str, device: str, commit: str) -> str:
    """The same by the record of the run, where the commit wrote it."""
    _, scale, data = table.split("/")
    names = [f"{experiment}/{scale}/{device}", f"{experiment}/{scale}/{device}/{data.partition('-')[0]}"]
    parents = git("show", "-s", "--format=%P", commit).split()
    now, before = document(commit, "environment.json"), [document(one, "environment.json") for one in parents]
    for name in reversed(names):
        run = now.get(name)
        if run is not None and all(one.get(name) != run for one in before):
            return text(run["libraries"], run["machine"]["processor"], device)
    return ""


def text(libraries: dict[str, str], processor: str, device: str) -> str:
    """As rows have it."""
    found = [f"{name} {libraries[name]}" for name in NAMED if name in libraries]
    return "; ".join([*found, *([processor] if device == "cpu" else [])])


def convert(path: Path) -> str:
    """Rewrite one file; says what is known of its rows."""
    name = path.relative_to(ROOT).as_posix()
    found, rows = origins(name), records("HEAD", name)
    line = ("table", "setting", "method", "device", "seed")
    kernels = {
        tuple(row[one] for one in line): row["metric"].removeprefix(KERNEL)
        for row in rows
        if row["metric"].startswith(KERNEL)
    }
    out = []
    for row in rows:
        if row["metric"].startswith(KERNEL):
            continue
        _, commit, source_hash = found[key(row)]
        more = {
            "kernel": kernels.get(tuple(row[one] for one in line), ""),
            "date": time_of(commit),
            "commit": commit[:8],
            "versions": versions(row, commit, source_hash),
        }
        out.append({column: {**row, **more}[column] for column in COLUMNS})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(out)
    known = sum(bool(row["versions"]) for row in out)
    return f"{path.name}: {len(out)} rows, {len({r['commit'] for r in out})} commits, {known} with versions"


def convert_ledger() -> str:
    """Entries of ``ledger.json`` as lines of ``validations.csv``, with the commit at which each took its date and counts."""
    path = "reports/gpu/ledger.json"

    def entries(commit: str) -> dict[str, Any]:
        return json.loads(git("show", f"{commit}:{path}"))["entries"]

    def known(entry: dict[str, Any]) -> tuple[Any, ...]:
        return entry["date"], entry["gpu"], entry["tests"]["run"], entry["tests"]["compared"]

    commits = git("rev-list", "--first-parent", "HEAD", "--", path).split()
    found = []
    for name, entry in entries(commits[0]).items():
        same = commits[0]
        for commit in commits[1:]:
            before = entries(commit).get(name)
            if before is None or known(before) != known(entry):
                break
            same = commit
        tests = entry["tests"]
        counts = tests["run"], tests["compared"], tests["different"], len(tests["failed"])
        libraries = "; ".join(f"{one} {entry['versions'][one]}" for one in NAMED if one in entry["versions"])
        words = f"{libraries}; driver {entry['driver']}"
        found.append(Validation(name, *counts, entry["date"], same[:8], entry["gpu"], words))
    found += of_the_reference()
    record(found)
    return f"{len(found)} validations"


def of_the_reference() -> list[Validation]:
    """What ``reference.json`` and ``hopper.csv`` say of the reference on CUDA and of its model of FP8 products."""
    commit = git("log", "-1", "--format=%H", "--", "reports/gpu/reference.json").strip()
    report = json.loads(git("show", f"{commit}:reports/gpu/reference.json"))
    cases = sum(len(report[name]) for name in ("schemes", "formats", "jax"))
    words = "; ".join(f"{name} {version}" for name, version in report["versions"].items())
    made = [
        Validation(
            "reference on CUDA and JAX",
            cases,
            0,
            0,
            len(report["failed"]),
            time_of(commit),
            commit[:8],
            report["gpu"],
            words,
        )
    ]
    commit = git("log", "-1", "--format=%H", "--", "reports/gpu/hopper.csv").strip()
    best: dict[tuple[str, ...], tuple[int, int]] = {}
    for row in records(commit, "reports/gpu/hopper.csv"):
        name = row["backend"], row["k"], row["distribution"]
        best[name] = max(best.get(name, (0, 0)), (int(row["equal"]), int(row["total"])))
        device, _, words = row["machine"].partition(", ")
    total, equal = sum(one[1] for one in best.values()), sum(one[0] for one in best.values())
    name = "matmul, accumulation hopper_fp8"
    return [
        *made,
        Validation(name, len(best), total, total - equal, 0, time_of(commit), commit[:8], device, words),
    ]


def main() -> None:
    """All files."""
    if sys.argv[1:] == ["ledger"]:
        sys.stdout.write(convert_ledger() + "\n")
        return
    for path in sorted((ROOT / "reports" / "data").glob("*.csv")):
        sys.stdout.write(convert(path) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
