"""The ledger: ``reports/gpu/ledger.json``, what a GPU said of each kernel file, and of which text of it.

CI has no GPU. So an entry holds a digest of the kernel's source and of what it imports from `fast`, the date, the GPU, its
driver and the library versions, the outcome of the GPU tests that concern the file, and its benchmarks. A kernel whose
digest is not today's has to be tested and measured again: `check` names it, `refresh` does it, in one command.

A test or benchmark concerns a file where the function that it is about is defined there, or in a file that imports it. A
test names its function behind a slash (``family/quantize``), and perhaps its kernel's file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from experiments.harness.rows import ROOT, write_text
from experiments.ledger.sources import dependencies, digest, kernel_files, public_functions

if TYPE_CHECKING:
    from experiments.kernels.report.lines import Line

TESTS = "tests/gpu/validate_kernels.py"
#: The tests take at most this long.
TEST_SECONDS = 270.0
#: The part of the inputs and repetitions that fits; all of them are `python tests/gpu/validate_kernels.py`.
TEST_FRACTION = 0.1
#: Peers are compared until the whole has taken this long, save for the last comparison begun.
TOTAL_SECONDS = 490.0
#: What our own kernels' benchmarks and JAX's calls take (208 s when last looked at); the time for peers is what remains.
OWN_SECONDS = 210.0
Entries = dict[str, dict[str, Any]]


def path_of(root: Path = ROOT) -> Path:
    """Where a clone keeps its ledger."""
    return root / "reports" / "gpu" / "ledger.json"


def has_device() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def read(root: Path = ROOT) -> dict[str, Any]:
    """The ledger as it was written; without entries where there is none."""
    path = path_of(root)
    if not path.exists():
        return {"kernels": {}, "tests": {}}
    made: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return made


def problems(root: Path = ROOT) -> dict[str, str]:
    """What does not stand, by file: missing, stale, untested, failed or unmeasured entries, and those of no kernel file."""
    entries: Entries = read(root)["kernels"]
    files = kernel_files(root)
    found = {name: problem(root, name, entries.get(name)) for name in files}
    gone = {name: "stale: no such kernel file" for name in entries if name not in files}
    return {name: words for name, words in sorted({**found, **gone}.items()) if words}


def problem(root: Path, name: str, entry: Mapping[str, Any] | None) -> str:
    """Why an entry does not stand, or nothing."""
    if entry is None:
        return "missing: never tested on a GPU"
    if entry["sha256"] != digest(root, name):
        return "stale: its source, or what it imports from fast, has changed"
    tests = entry["tests"]
    if tests["failed"]:
        return f"failed: {len(tests['failed'])} of {tests['run']} tests ({', '.join(tests['failed'][:3])})"
    if not tests["passed"]:
        return f"untested: {tests['state']}"
    wrong = [one["case"] for one in entry["benchmarks"] if one["status"].startswith(("wrong", "error"))]
    if wrong:
        return f"failed: benchmarks {', '.join(wrong[:3])}"
    return "" if entry["benchmarks"] else "unmeasured: no benchmark uses it"


def refresh(root: Path = ROOT, with_peers: bool = True) -> Path:
    """Run the GPU tests and all benchmarks, publish these, and write every entry anew."""
    from experiments.kernels.bench import complete

    started = time.monotonic()
    before = {name: digest(root, name) for name in kernel_files(root)}
    tests = run_tests(root, TEST_SECONDS)
    left = TOTAL_SECONDS - OWN_SECONDS - (time.monotonic() - started)
    lines, _ = complete(with_peers=with_peers, seconds=max(left, 0.0))
    made = {"tests": tests_summary(tests), "kernels": entries_of(root, tests, lines, about(), before)}
    path = path_of(root)
    write_text(path, json.dumps(made, indent=1) + "\n")
    return path


def run_tests(root: Path, seconds: float) -> dict[str, Any]:
    """What the GPU tests say: their JSON with a `state`, which is the reason where there is none."""
    script = root / TESTS
    if not script.is_file():
        return {"state": f"{TESTS} does not exist", "tests": []}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tests.json"
        command = [sys.executable, TESTS, "--json", str(out), "--fraction", str(TEST_FRACTION)]
        command += ["--seconds", str(seconds - 30)]
        try:
            # Their own words are no result of the ledger's: they go where progress goes.
            done = subprocess.run(
                command, cwd=root, env=environment(root), stdout=sys.stderr, check=False, timeout=seconds
            )
            state = "ran" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            state = f"stopped after {seconds:.0f} s"
        # A run that broke off may have written what it had.
        found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"tests": []}
    return {**found, "state": state}


def environment(root: Path) -> dict[str, str]:
    """This process's variables, with the clone on the module path."""
    parts = [str(root), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in parts if part)}


def entries_of(
    root: Path,
    tests: Mapping[str, Any],
    lines: Sequence[Line],
    machine: Mapping[str, Any],
    before: Mapping[str, str] | None = None,
) -> Entries:
    """An entry per kernel file. `before`: digests when the run began, which is what it ran."""
    homes = public_functions(root)
    made: Entries = {}
    for name in kernel_files(root):
        made[name] = {
            "sha256": (before or {}).get(name, digest(root, name)),
            "imports": dependencies(root, name),
            **machine,
            "tests": outcome([one for one in tests["tests"] if concerns(one, name, homes)], tests),
            "benchmarks": [brief(line) for line in lines if name in files_of_case(line.case, homes)],
        }
    return made


def concerns(test: Mapping[str, Any], name: str, homes: Mapping[str, Sequence[str]]) -> bool:
    """Whether a test is about a file: its `kernel` is the file, or the file stands behind its function."""
    path = PurePosixPath(name)
    aliases = {name, name.removeprefix("fast/"), path.name, path.stem}
    return test["kernel"] in aliases or name in homes.get(test["name"].rpartition("/")[2], ())


def files_of_case(case: str, homes: Mapping[str, Sequence[str]]) -> set[str]:
    """Files behind the function that a case measures: the first that it needs."""
    from experiments.kernels.cases.all_cases import CASES

    known = CASES.get(case)
    return set(homes.get(known.needs[0].partition(":")[0], ())) if known else set()


def outcome(tests: Iterable[Mapping[str, Any]], run: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of some tests, and the names of those that did not pass."""
    tests = list(tests)
    ran = [one for one in tests if one["status"] != "skipped"]
    failed = [one["name"] for one in ran if not passed(one)]
    return {
        "state": run["state"] if ran else f"no test of it ran ({run['state']})",
        "run": len(ran),
        "passed": len(ran) - len(failed),
        "failed": failed,
        "compared": sum(int(one.get("count") or 0) for one in tests),
        "different": sum(int(one.get("different") or 0) for one in tests),
        # Calls that fast gave to the reference compare it with itself: they say nothing of a kernel.
        "by_the_reference": sum(int(one.get("handed_on") or 0) for one in tests),
    }


def passed(test: Mapping[str, Any]) -> bool:
    """Whether a test says that it passed and found no difference."""
    return test["status"] in ("ok", "pass", "passed") and not test.get("different")


def tests_summary(tests: Mapping[str, Any]) -> dict[str, Any]:
    """All tests together."""
    seconds = sum(float(one.get("seconds") or 0) for one in tests["tests"])
    return {**outcome(tests["tests"], tests), "state": tests["state"], "seconds": round(seconds, 1)}


def brief(line: Line) -> dict[str, Any]:
    """A benchmark in the ledger: three digits are enough."""
    best = line.best_peer
    kept = ("time", "fraction", "speedup over unfused", "time over elementwise", "host time")
    return {
        "case": line.case,
        "shape": line.shape,
        "status": line.status,
        **{name: float(f"{line.values[name]:.3g}") for name in kept if name in line.values},
        "bars": {bar.metric: bar.value for bar in line.bars},
        "missed": line.missed,
        "best_peer": {"name": best.peer, "ratio": float(f"{best.ratio:.3g}")} if best else None,
    }


def about() -> dict[str, Any]:
    """Date, GPU, driver and library versions."""
    import torch

    from experiments.kernels.run import version

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "driver": driver(),
        "versions": {"torch": torch.__version__, "triton": version("triton")},
    }


def driver() -> str:
    """The driver's version by nvidia-smi, or unknown."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    words = done.stdout.split()
    return words[0] if done.returncode == 0 and words else "unknown"
