"""What the commands of this folder share: jobs compared bit for bit, then calls timed beside a copy of as many bytes.

Jobs run on processes of their own, as in `validate_kernels`: most of their time is compilation. What has not started when the
time is over is named, and has not passed.

Times are medians of single launches, of eager calls and of CUDA graphs, with buffers that are used in turn and exceed the
second-level cache several times, so every read comes from the memory. A copy moves as many bytes as the call reads and writes;
the bar is 0.90 of its rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from fast.launch import cache
from tests.gpu.harness.pool import Done, Job, run_jobs
from tests.gpu.harness.run import Settings

#: Bytes that buffers in turn have together: several times the second-level cache.
COLD = 1 << 29
ROUNDS = 60
SHAPES = ((8192, 8192), (14336, 4096), (4096, 1024))
#: By name: what makes an input, the call, and the bytes of an element that it reads and writes.
Calls = dict[str, tuple[Callable[[], Any], Callable[[Any], Any], float]]


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def compare(jobs: Sequence[Job], settings: Settings, workers: int, seconds: float) -> tuple[int, int]:
    """Checks that did not pass, and jobs that no time was left for, over all jobs; a line for each as it ends."""
    wrong, late, started = 0, [], time.monotonic()
    for done in run_jobs(jobs, settings, workers, seconds):
        if done.late:
            late.append(f"{done.job.function} {done.job.label}")
            continue
        wrong += told(done, time.monotonic() - started)
    if late:
        say(f"NOT COMPARED, no time: {'; '.join(late)}")
    return wrong, len(late)


def told(done: Done, after: float) -> int:
    """Print how a job ended; its checks that did not pass."""
    bad = [check for check in done.checks if check.status != "ok"]
    by_reference = sum(check.handed_on for check in done.checks)
    counts = f"{len(done.checks)} checks, {len(bad)} wrong, {by_reference} by the reference"
    say(f"[{after:5.1f}] {done.job.function} {done.job.label}: {counts}, {done.seconds:.1f} s")
    for check in bad[:3]:
        say("\n    ".join(("   ", check.function, check.label, check.status, *check.detail[:3])))
    return len(bad)


def in_turn(call: Callable[[Any], Any], inputs: list[Any], graph: bool) -> float:
    """Median microseconds of a call, with each input in turn; graph: replayed, without what the host does."""
    from fast.kernels.sparsity import host  # needs triton

    runs: list[Callable[[], Any]] = [lambda x=x: call(x) for x in inputs]  # type: ignore[misc]
    for run in runs:
        run()
    torch.cuda.synchronize()
    if graph:
        with mock.patch.object(host, "_counted", lambda made: made[:2]):
            cache.CALLS.clear()  # remembered calls would count
            runs[0]()
            runs = [captured(run) for run in runs]
        cache.CALLS.clear()
    took = []
    for i in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[i % len(runs)]()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) * 1e3)
    return statistics.median(took)


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """A call as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    graph.kept = kept  # type: ignore[attr-defined]
    return graph.replay


def measure(shape: tuple[int, int], calls: Calls, end: float) -> list[str]:
    """Each call beside a copy of as many bytes, eager and, where the host need not wait, as a graph; names of those that no
    time was left for."""
    left_out = []
    for name, one in calls.items():
        if time.monotonic() > end:
            left_out.append(f"{shape} {name}")
        else:
            measure_one(f"{shape} {name}", shape, *one)
    return left_out


def measure_one(
    label: str, shape: tuple[int, int], make: Callable[[], Any], call: Callable[[Any], Any], bytes_each: float
) -> None:
    """One call; a failure is printed."""
    moved = int(bytes_each * shape[0] * shape[1])
    count = max(3, COLD // moved)
    inputs = [make() for _ in range(count)]
    halves = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in range(count)]
    for graph in (False, True):
        how = f"{label} {'graph' if graph else 'eager'}"
        try:
            took = in_turn(call, inputs, graph)
            copied = in_turn(lambda pair: pair[0].copy_(pair[1]), halves, graph)
            again = in_turn(call, inputs, graph)
        except Exception as error:  # noqa: BLE001  others go on
            say(f"{how}: {type(error).__name__}: {str(error)[:200]}")
            continue
        rate, share = moved / took / 1e6, copied / min(took, again)
        say(
            f"{how}: {took:.1f} us (again {again:.1f}), {rate:.2f} TB/s, copy {copied:.1f} us, {share:.2f} of its rate"
        )


def command(
    text: str | None, jobs: Callable[[Settings], Sequence[Job]], calls: Callable[[tuple[int, int]], Calls],
    arguments: list[str] | None = None,
) -> int:  # fmt: skip
    """Compare, then time; 1 on any difference, 2 where not all was compared."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="0: this process")
    parser.add_argument(
        "--seconds",
        type=float,
        default=45.0,
        help="after these no comparison starts; those that run have 20 more",
    )
    parser.add_argument("--times", type=float, default=30.0, help="after these seconds no timing starts")
    options = parser.parse_args(arguments)
    settings = Settings(device=options.device, fraction=options.fraction)
    todo = jobs(settings)
    say(f"{len(todo)} jobs on {options.workers} processes, device {options.device}")
    wrong, late = compare(todo, settings, options.workers, options.seconds)
    say(f"{wrong} checks wrong" if wrong else f"{late} jobs not compared" if late else "agreed")
    if options.device == "cuda" and options.times > 0:
        say(torch.cuda.get_device_name())
        end = time.monotonic() + options.times
        left_out = [name for shape in SHAPES for name in measure(shape, calls(shape), end)]
        say(f"not timed: {'; '.join(left_out)}" if left_out else "all timed")
    return 1 if wrong else 2 if late else 0
