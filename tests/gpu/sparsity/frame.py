"""What the commands of this folder share: jobs compared bit for bit, then calls timed beside a copy of as many bytes.

Times are medians of single launches, of eager calls and of CUDA graphs, with buffers that are used in turn and exceed the
second-level cache several times, so every read comes from the memory. A copy moves as many bytes as the call reads and writes;
the bar is 0.90 of its rate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

import fast
from fast.kernels.launch import cache
from tests.gpu.harness.pool import Job, perform
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


def compare(jobs: Sequence[Job], settings: Settings) -> int:
    """Checks that did not pass, over all jobs."""
    wrong = 0
    for job in jobs:
        done = perform(job, settings, fast)
        bad = [check for check in done.checks if check.status != "ok"]
        wrong += len(bad)
        by_reference = sum(check.handed_on for check in done.checks)
        say(f"{job.label}: {len(done.checks)} checks, {len(bad)} wrong, {by_reference} by the reference")
        for check in bad[:3]:
            say("\n    ".join(("   ", check.function, check.label, check.status, *check.detail[:3])))
    return wrong


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


def measure(shape: tuple[int, int], calls: Calls) -> None:
    """Each call beside a copy of as many bytes, eager and, where the host need not wait, as a graph."""
    for name, (make, call, bytes_each) in calls.items():
        moved = int(bytes_each * shape[0] * shape[1])
        count = max(3, COLD // moved)
        inputs = [make() for _ in range(count)]
        halves = [torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda") for _ in range(count)]
        for graph in (False, True):
            took = in_turn(call, inputs, graph)
            copied = in_turn(lambda pair: pair[0].copy_(pair[1]), halves, graph)
            again = in_turn(call, inputs, graph)
            how = f"{shape} {name} {'graph' if graph else 'eager'}"
            rate, share = moved / took / 1e6, copied / min(took, again)
            say(
                f"{how}: {took:.1f} us (again {again:.1f}), {rate:.2f} TB/s, copy {copied:.1f} us, {share:.2f} of its rate"
            )
        del inputs, halves


def command(
    text: str | None, jobs: Callable[[Settings], Sequence[Job]], calls: Callable[[tuple[int, int]], Calls],
    arguments: list[str] | None = None,
) -> int:  # fmt: skip
    """Compare, then time; 1 on any difference."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--fraction", type=float, default=1.0)
    options = parser.parse_args(arguments)
    settings = Settings(device=options.device, fraction=options.fraction)
    wrong = compare(jobs(settings), settings)
    say("agreed" if not wrong else f"{wrong} checks wrong")
    if options.device == "cuda":
        say(torch.cuda.get_device_name())
        for shape in SHAPES:
            measure(shape, calls(shape))
    return int(bool(wrong))
