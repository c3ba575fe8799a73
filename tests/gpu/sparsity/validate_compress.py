"""On a GPU: the kernels of 2:4 bit for bit, then their times beside a copy of the same bytes.

    PYTHONPATH=. python tests/gpu/sparsity/validate_compress.py [--device cpu] [--fraction 1]

Times are medians of single launches, of eager calls and of CUDA graphs, with buffers that are used in turn and exceed the
second-level cache several times, so every read comes from the memory. A copy moves as many bytes as the call reads and writes;
the bar is 0.90 of its rate. Graphs of `compress` without "2:4" leave out that the host waits for one number, which no graph can
hold. Exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from fast.kernels.launch import cache
from tests.gpu.harness.pool import perform
from tests.gpu.harness.run import Settings
from tests.gpu.sparsity import storage

#: Bytes that buffers in turn have together: several times the second-level cache.
COLD = 1 << 29
ROUNDS = 60
SHAPES = ((8192, 8192), (14336, 4096), (4096, 1024))


def compare(settings: Settings) -> int:
    """Checks that did not pass, over all jobs."""
    wrong = 0
    for job in storage.jobs(settings):
        done = perform(job, settings, fast)
        bad = [check for check in done.checks if check.status != "ok"]
        wrong += len(bad)
        by_reference = sum(check.handed_on for check in done.checks)
        print(
            f"{job.label}: {len(done.checks)} checks, {len(bad)} wrong, {by_reference} by the reference",
            flush=True,
        )
        for check in bad[:3]:
            print(
                "   ", check.function, check.label, check.status, *check.detail[:3], sep="\n    ", flush=True
            )
    return wrong


def calls(shape: tuple[int, int]) -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any], float]]:
    """By name: what makes an input, the call, and the bytes of an element that it reads and writes."""

    def dense(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: torch.randn(shape, device="cuda").to(dtype)

    def sparse(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: (lambda w: (w * fast.prune(w)).to(dtype))(torch.randn(shape, device="cuda"))

    def stored(dtype: torch.dtype) -> Callable[[], Any]:
        return lambda: fast.compress(sparse(dtype)())

    scale = torch.full((shape[0], 1), 0.01, device="cuda")
    return {
        "compress bf16 2:4": (dense(torch.bfloat16), lambda w: fast.compress(w, "2:4"), 3.125),
        "compress bf16": (sparse(torch.bfloat16), fast.compress, 3.125),
        "compress e4m3": (sparse(torch.float8_e4m3fn), fast.compress, 1.625),
        "compress int8 2:4": (
            lambda: torch.randint(-128, 128, shape, device="cuda", dtype=torch.int8),
            lambda w: fast.compress(w, "2:4"),
            1.625,
        ),
        "compress float32 2:4": (dense(torch.float32), lambda w: fast.compress(w, "2:4"), 6.125),
        "quantize_compressed bf16": (
            dense(torch.bfloat16),
            lambda w: fast.quantize_compressed(w, "fp8_rowwise", scale),
            2.625,
        ),
        "prune bf16": (dense(torch.bfloat16), fast.prune, 3.0),
        "prune bf16 4:8": (dense(torch.bfloat16), lambda w: fast.prune(w, pattern="4:8"), 3.0),
        "decompress bf16": (stored(torch.bfloat16), lambda c: fast.decompress(*c), 3.125),
        "decompress e4m3": (stored(torch.float8_e4m3fn), lambda c: fast.decompress(*c), 1.625),
    }


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


def measure(shape: tuple[int, int]) -> None:
    """Each call beside a copy of as many bytes, eager and, where the host need not wait, as a graph."""
    for name, (make, call, bytes_each) in calls(shape).items():
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
            print(f"{how}: {took:.1f} us (again {again:.1f}), {rate:.2f} TB/s", end=", ", flush=True)
            print(f"copy {copied:.1f} us, {share:.2f} of its rate", flush=True)
        del inputs, halves


def main(arguments: list[str] | None = None) -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--fraction", type=float, default=1.0)
    options = parser.parse_args(arguments)
    wrong = compare(Settings(device=options.device, fraction=options.fraction))
    print("agreed" if not wrong else f"{wrong} checks wrong", flush=True)
    if options.device == "cuda":
        print(torch.cuda.get_device_name(), flush=True)
        for shape in SHAPES:
            measure(shape)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
