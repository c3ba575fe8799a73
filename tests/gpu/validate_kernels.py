"""On a GPU: every function of `fast` against the NumPy reference, bit for bit.

    PYTHONPATH=. python tests/gpu/validate_kernels.py [--only SUBSTRING] [--quick] [--json OUT.json] [--allow-missing]

One line for each family of tests and function: values compared, values that differ; after it the first differences in
hexadecimal. Exits with 1 on any difference, error or missing function, with 2 where there is no CUDA device. With
`--device cpu`, where `fast` runs the reference, the program itself can be tried anywhere (see
tests/repo/test_gpu_validation.py).

The work is split into jobs, which run on processes of their own (`harness.pool`): compiling kernels takes longer than
computing with NumPy, and both spread over the cores. Families and their jobs are in `kernels/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.gpu.harness.pool import Done, Job, run_jobs
from tests.gpu.harness.run import Check, Settings
from tests.gpu.kernels import (
    fused,
    jax_calls,
    layouts,
    linear,
    linear_of_codes,
    scales,
    schemes,
    sparsity,
    torch_calls,
)

FAMILIES = (schemes, layouts, scales, torch_calls, fused, linear, linear_of_codes, jax_calls, sparsity)
QUICK = 0.1
SLOWEST = 12  # jobs whose times the file names
SHOWN = 4  # failing checks that a family shows
#: From bad to good: a family is as bad as its worst check.
ORDER = ("error", "different", "missing", "ok", "skipped")


@dataclass
class Test:
    """All checks of one function in one family."""

    name: str
    status: str = "skipped"
    count: int = 0
    different: int = 0
    cases: int = 0
    failed: int = 0
    #: Calls that `fast` handed on to the reference: they tested no kernel.
    handed_on: int = 0
    seconds: float = 0.0
    #: Jobs that the time did not reach: they say nothing of the function.
    late: int = 0
    detail: list[str] = field(default_factory=list)

    def add(self, check: Check, seconds: float) -> None:
        """Take in one check and its share of the job's time."""
        self.status = min(self.status, check.status, key=ORDER.index)
        self.count, self.different = self.count + check.count, self.different + check.different
        self.cases, self.seconds = self.cases + 1, self.seconds + seconds
        bad = check.status in ("error", "different", "missing")
        self.failed += bad
        self.handed_on += check.handed_on
        if bad and check.detail and len(self.detail) < 8 * SHOWN:
            self.detail += [" ".join(f"{check.label}: {line}".split())[:1200] for line in check.detail]

    def line(self) -> str:
        """What the terminal shows."""
        return (
            f"{self.status:9} {self.name:28} {self.count:15,} values {self.cases:7,} calls {self.different:10,} different "
            f"in {self.failed:,} calls, {self.handed_on:,} by the reference {self.seconds:8.1f} s"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="only jobs whose 'family label' holds this, or one of these: a,b"
    )
    parser.add_argument("--families", help="only these families, by name: a,b")
    parser.add_argument("--functions", help="only jobs that test these functions of fast first: a,b")
    parser.add_argument("--quick", action="store_true", help=f"the same as --fraction {QUICK}")
    parser.add_argument("--fraction", type=float, default=1.0, help="part of the inputs and repetitions")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="0: this process")
    parser.add_argument("--seconds", type=float, default=540.0, help="after these, what is left fails")
    parser.add_argument(
        "--allow-missing", action="store_true", help="functions that fast lacks are no failure"
    )
    parser.add_argument("--fast", default="fast", help="the module under test")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen jobs and say what differs."""
    options = parse(arguments)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(
            "validate_kernels: no CUDA device here; use --device cpu to try the program itself\n"
        )
        return 2
    settings = Settings(options.device, options.fast, QUICK if options.quick else options.fraction)
    chosen = [
        job
        for job in all_jobs(settings)
        if any(part in f"{job.family} {job.label}" for part in options.only.split(","))
    ]
    chosen = of_families(chosen, options.families)
    if options.functions is not None:
        chosen = [job for job in chosen if job.function in options.functions.split(",")]
    say(f"{len(chosen)} jobs on {options.workers} processes, device {options.device}")
    start = time.perf_counter()
    slowest: list[tuple[float, str]] = []
    results = noted(run_jobs(chosen, settings, options.workers, options.seconds), slowest)
    tests = collect(results, chosen)
    report(tests, options, time.perf_counter() - start, sorted(slowest, reverse=True)[:SLOWEST])
    bad = ("error", "different") if options.allow_missing else ("error", "different", "missing")
    return int(not chosen or any(test.status in bad for test in tests))


def noted(results: Iterable[Done], seconds: list[tuple[float, str]]) -> Iterator[Done]:
    """Pass results on and keep how long each took."""
    for done in results:
        seconds.append((round(done.seconds, 1), f"{done.job.family} {done.job.label}"))
        yield done


def all_jobs(settings: Settings) -> list[Job]:
    """Every family's jobs."""
    return [job for module in FAMILIES for job in module.jobs(settings)]


def of_families(jobs: list[Job], families: str | None) -> list[Job]:
    """The jobs of some families; all, if none are named."""
    return [job for job in jobs if families is None or job.family in families.split(",")]


def collect(results: Iterable[Done], jobs: list[Job]) -> list[Test]:
    """Sum up by family and function; a family's lines appear when its last job is done."""
    left = {family: sum(job.family == family for job in jobs) for family in {job.family for job in jobs}}
    tests: dict[str, Test] = {}
    for done in results:
        share = done.seconds / max(1, len(done.checks))
        for check in done.checks:
            name = f"{done.job.family}/{check.function}"
            test = tests.setdefault(name, Test(name))
            test.add(check, share)
            test.late += done.late
        left[done.job.family] -= 1
        if not left[done.job.family]:
            show([test for name, test in tests.items() if name.startswith(f"{done.job.family}/")])
    return list(tests.values())


def show(tests: list[Test]) -> None:
    """Lines of a family, each with its first differences."""
    for test in tests:
        say(test.line())
        for line in test.detail[:SHOWN]:
            say(f"    {line}")


def report(
    tests: list[Test], options: argparse.Namespace, seconds: float, slowest: list[tuple[float, str]]
) -> None:
    """The last lines, and the file."""
    failed = [test.name for test in tests if test.status not in ("ok", "skipped")]
    total = sum(test.count for test in tests)
    say(
        f"{total:,} values, {sum(t.different for t in tests):,} different, {seconds:.0f} s; failed: {failed or 'none'}"
    )
    say("slowest jobs: " + ", ".join(f"{label} {took} s" for took, label in slowest[:4]))
    if options.json:
        body = {"tests": [vars(test) for test in tests], "seconds": round(seconds, 1), "slowest": slowest}
        body |= {"gpu": gpu(), "versions": versions()}
        options.json.write_text(json.dumps(body, indent=1) + "\n")


def gpu() -> str | None:
    """Name of the GPU."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def versions() -> dict[str, Any]:
    """Versions of what the results depend on."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "numpy", "ml_dtypes", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def say(line: str) -> None:
    """One line, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
