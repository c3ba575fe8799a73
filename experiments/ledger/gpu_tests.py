"""Running the GPU tests that some entries need, job by job: what is finished stays finished, however a run ends.

The validator (``tests/gpu/validate_kernels.py``) writes a line of JSON for each job that it finished into a journal, and skips
jobs that the journal has. Its first line names the code that was tested: jobs that tested other code are dropped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.harness.rows import write_text
from experiments.ledger.entries import Entries, entry_of

TESTS = "tests/gpu/validate_kernels.py"
#: The part of the inputs and repetitions that fits; all of them are `python tests/gpu/validate_kernels.py`.
FRACTION = 0.1
#: Seconds between the end of the tests' time and the end of their process.
GRACE = 30.0
#: Outcomes from bad to good.
ORDER = ("error", "different", "missing", "ok", "skipped")


def journal_of(root: Path) -> Path:
    """Where a refresh that is not over keeps the jobs that are."""
    return root / "reports" / "gpu" / "ledger.partial.jsonl"


def begin(root: Path, hashes: Mapping[str, str]) -> None:
    """Go on with the journal, but for jobs that tested other code, or start one. hashes: of the entries to test."""
    path = journal_of(root)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    before = json.loads(lines[0])["sources"] if lines else {}
    if not lines or any(before.get(name) != text for name, text in hashes.items()):
        kept = [line for line in lines[1:] if is_of_code(line, before, hashes)]
        write_text(path, "\n".join([json.dumps({"sources": dict(hashes)}), *kept]) + "\n")


def is_of_code(line: str, before: Mapping[str, str], hashes: Mapping[str, str]) -> bool:
    """Whether a line is a finished job whose entries are all to test, and were as they are."""
    try:
        tested = {entry_of(test["name"]) for test in json.loads(line).get("tests", ())}
    except ValueError:  # cut short by a kill
        return False
    return bool(tested) and all(name in hashes and before.get(name) == hashes[name] for name in tested)


def families(name: str, entries: Entries) -> list[str] | None:
    """The families that tested an entry when it was last tested; None, which may be any, where it was not."""
    return entries.get(name, {}).get("tests", {}).get("families") or None


def run_tests(
    root: Path, names: Sequence[str], entries: Entries, seconds: float, of_new: Sequence[str] = ()
) -> str:
    """Run the jobs that some entries need and the journal lacks, for at most so long; in words how that ended.

    These are the jobs of the families that tested them last, or that say that they test them. Where one was never tested, those
    of the families `of_new`, or all where none are named.
    """
    known = [families(name, entries) or list(of_new) for name in names]
    chosen = sorted({family for one in known for family in one or ()}) if all(known) else None
    script = root / TESTS
    if not script.is_file():
        return f"{TESTS} does not exist"
    command = [sys.executable, TESTS, "--journal", str(journal_of(root)), "--fraction", str(FRACTION)]
    command += ["--seconds", str(max(seconds - GRACE, 1.0))]
    command += ["--families", ",".join(chosen), "--functions", ",".join(names)] if chosen is not None else []
    try:
        # Their own words are no result of the ledger's: they go where progress goes.
        done = subprocess.run(
            command, cwd=root, env=environment(root), stdout=2, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    return "ran" if done.returncode == 0 else f"exit code {done.returncode}"


def environment(root: Path) -> dict[str, str]:
    """This process's variables, with the clone on the module path."""
    parts = [str(root), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}


def finished(root: Path) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """What the journal holds: finished jobs, and how many jobs each family has; a line that a kill cut short counts as none."""
    jobs: list[dict[str, Any]] = []
    sizes: dict[str, int] = {}
    for line in journal_of(root).read_text(encoding="utf-8").splitlines()[1:]:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if "families" in found:
            sizes = found["families"]
        else:
            jobs.append(found)
    return jobs, sizes


def open_families(jobs: Iterable[Mapping[str, Any]], sizes: Mapping[str, int]) -> set[str]:
    """Families with jobs that are not finished."""
    done = {(job["family"], job["function"], job["label"]) for job in jobs}
    return {family for family, size in sizes.items() if sum(one == family for one, *_ in done) < size}


def tests_of(jobs: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Tests by entry, summed over jobs."""
    tests: dict[str, dict[str, Any]] = {}
    for job in jobs:
        for test in job["tests"]:
            known = tests.setdefault(test["name"], {**test, "count": 0, "different": 0, "handed_on": 0})
            for key in ("count", "different", "handed_on"):
                known[key] += test[key]
            known["status"] = min(known["status"], test["status"], key=ORDER.index)
    by_entry: dict[str, list[dict[str, Any]]] = {}
    for name, test in tests.items():
        by_entry.setdefault(entry_of(name), []).append(test)
    return by_entry


__all__ = [
    "TESTS",
    "begin",
    "families",
    "finished",
    "is_of_code",
    "journal_of",
    "open_families",
    "run_tests",
    "tests_of",
]
