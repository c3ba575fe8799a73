"""Remaking on a GPU the entries and benchmarks that are stale, and nothing else; where time ends, the next call goes on.

The same as `ao-lab ledger --refresh`, for a machine where only Python is: ::

    python3 -c "from experiments.ledger.refresh import refresh; refresh(seconds=480)"

Entries that were never tested are tested by every family of tests, as any may test them. Where it is known which do, these
alone run, and no benchmark: ::

   python3 -c 'from experiments.ledger.refresh import ROOT, test_stale; test_stale(["sparsity", "situations"], 110, ROOT)'

What was tested is in ``reports/gpu/ledger.json`` and, as long as not all of it is, ``reports/gpu/ledger.partial.jsonl``; what
was measured in ``reports/data/kernels.csv``. Bring these three to the next machine, and it goes on from there.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.harness import provenance
from experiments.harness.rows import ROOT
from experiments.ledger import entries as known
from experiments.ledger import gpu_tests, ledger

#: How long a refresh takes at most, save for the last comparison begun.
TOTAL_SECONDS = 480.0
#: The part of it that tests may take: what they leave is for benchmarks.
TEST_PART = 0.55
#: What a refresh does, by the names of `--only`.
TESTS, BENCHMARKS = PARTS = ("tests", "benchmarks")


def has_device() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def refresh(
    seconds: float = TOTAL_SECONDS,
    everything: bool = False,
    root: Path = ROOT,
    parts: Sequence[str] = PARTS,
) -> Path:
    """Test and measure what is stale, or all of it, for at most `seconds`; returns the ledger's path.

    An entry is written when all of its tests are over. A call that ends before that, however it ends, leaves its finished jobs
    to the next. everything: forget all entries first, and measure benchmarks that are current too. parts: of PARTS, so that two
    GPUs have one each; a part alone has all of the time.
    """
    started = time.monotonic()
    provenance.forget()
    known.functions.cache_clear()
    if everything:
        ledger.write({}, root)
        gpu_tests.journal_of(root).unlink(missing_ok=True)
    stale = stale_entries(root)
    if stale and TESTS in parts:
        test(stale, root, seconds * (TEST_PART if BENCHMARKS in parts else 1.0), ())
    if BENCHMARKS in parts:
        measure(seconds - (time.monotonic() - started), everything)
    return ledger.path_of(root)


def stale_entries(root: Path = ROOT) -> list[str]:
    """Entries to test: of other code, missing, or failed."""
    entries = ledger.read(root)

    def stands(name: str) -> bool:
        entry = entries.get(name)
        return known.is_fresh(name, entry) and bool(
            entry and entry["tests"]["passed"] and not entry["tests"]["failed"]
        )

    return [name for name in known.functions() if not stands(name)]


def test_stale(of_new: Sequence[str], seconds: float, root: Path) -> list[str]:
    """Test what is stale, entries that were never tested by some families alone, and measure nothing; the entries written."""
    provenance.forget()
    known.functions.cache_clear()
    stale = stale_entries(root)
    return test(stale, root, seconds, of_new) if stale else []


def test(stale: Sequence[str], root: Path, seconds: float, of_new: Sequence[str]) -> list[str]:
    """Run the tests of stale entries and write those whose tests are all over; returns their names.

    of_new: families that test entries which were never tested; all, where none are named.
    """
    entries = ledger.read(root)
    code = {name: known.code_of(name) for name in stale}
    gpu_tests.begin(root, {name: one["source_hash"] for name, one in code.items()})
    state = gpu_tests.run_tests(root, stale, entries, seconds, of_new)
    jobs, sizes = gpu_tests.finished(root)
    tests, unfinished = gpu_tests.tests_of(jobs), gpu_tests.open_families(jobs, sizes)

    def is_over(name: str) -> bool:
        needed = gpu_tests.families(name, entries)
        return bool(sizes) and not unfinished.intersection(sizes if needed is None else needed)

    written, machine = [name for name in stale if is_over(name)], about()
    for name in written:
        entries[name] = {**code[name], **machine, "tests": known.outcome(tests.get(name, ()), state)}
    ledger.write({name: entry for name, entry in entries.items() if name in known.functions()}, root)
    if sizes and not unfinished:
        gpu_tests.journal_of(root).unlink()
    return written


def measure(seconds: float, everything: bool = False) -> None:
    """Time the stale benchmarks, ours first, then the baselines beside them, and publish rows and pages."""
    from experiments.kernels.bench import complete

    complete(seconds=max(seconds, 0.0), published=not everything)


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


__all__ = ["PARTS", "TOTAL_SECONDS", "has_device", "refresh", "stale_entries", "test_stale"]
