"""`column_sums` on a GPU: the bits of the model of its order, exact sums of integers, times beside torch's sum and a copy.

    PYTHONPATH=. python tests/gpu/sparsity/training/column_sums.py [--seconds 150] [--no-checks]

A copy of half a matrix moves as many bytes as a sum of its columns reads. All times are of CUDA graphs whose calls go over as
many matrices as L2 does not hold; the host's are of calls launched one by one. Plans are named by columns and warps of a
program, programs across, chunks and rows of one; the rule's is the first. column_sums.json in the folder $OUT, where that is
set, has the times. Exits with 1 where a bit differs or a call raises, with 2 where something was left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from fast.kernels.layers import column_sums as kernels
from fast.kernels.layers.column_sums import WIDTHS, Plan, plan_of
from fast.layers.column_sums import LEAST, column_sums
from tests.gpu.sparsity.progress import Progress
from tests.gpu.sparsity.training.sum_model import bound, model

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Rows and columns. Whole chunks and cut ones, columns that fill no program, all of their widths.
SHAPES = ((13008, 4096), (13008, 1024), (2048, 1024), (4099, 1040), (8200, 256), (2051, 11008), (65536, 1024))
WIDE = (150_000, 14336)
#: The published layers, one of a large model, and small ones, where torch may be faster.
PUBLISHED = ((13008, 4096), (13008, 1024))
TIMED = (*PUBLISHED, (16384, 14336), (4096, 1024), (2048, 1024), (1024, 1024), (512, 4096), (8192, 256))
BYTES, CALLS, ROUNDS = 250_000_000, 12, 9


def checks(progress: Progress) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name."""
    for dtype in DTYPES:
        yield f"column sums {dtype}", partial(check, progress, dtype)
    yield "column sums, 64-bit offsets", partial(check_wide, progress)


def check(progress: Progress, dtype: torch.dtype) -> None:
    """Both outputs against the model, of a second call, the operator and a matrix at an odd address too; what torch sums."""
    for rows, length in SHAPES:
        memory = torch.randn(rows * length + 1, device="cuda").mul(1.5).exp().to(dtype)
        memory *= torch.where(torch.rand_like(memory, dtype=torch.float32) < 0.5, -1, 1).to(dtype)
        for first in (0, 1):
            g = memory[first : first + rows * length].view(rows, length)
            plan, wide = plan_of(rows, length), g.float().cpu().numpy()
            right = model(wide, plan.parts, plan.chunk)
            label = f"column sums {dtype} {(rows, length)} from element {first}"
            far = abs(right - wide.astype("float64").sum(0)) > bound(wide, plan.parts, plan.chunk)
            progress.check(f"{label}, bound", not far.any(), f"{int(far.sum())} columns")
            for out in dict.fromkeys((dtype, torch.float32)):
                wanted = torch.from_numpy(right).to(out)
                calls = (column_sums, column_sums, torch.ops.ao_lab.column_sums)
                for name, made in enumerate(call(g, out).cpu() for call in calls):
                    progress.check(f"{label}, {out}, call {name}", torch.equal(made, wanted), "bits differ")
    g = torch.randint(-3, 4, (LEAST // 1024 - 1, 1024), device="cuda").to(dtype)
    for small in (g, g[:, :1000], g.t(), g[:0]):
        wanted = small.double().sum(0).to(dtype)
        progress.check(f"column sums {dtype} {tuple(small.shape)}", torch.equal(column_sums(small), wanted))


def check_wide(progress: Progress) -> None:
    """More elements than 32 bits count."""
    codes = torch.randint(-3, 4, WIDE, device="cuda", dtype=torch.int8)
    wanted = codes.sum(0, dtype=torch.int64).double()
    g = codes.to(torch.bfloat16)
    del codes
    progress.check(f"column sums {WIDE}", torch.equal(column_sums(g, torch.float32).double(), wanted))


def times(progress: Progress, rows: int, length: int, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Microseconds by name, of every plan too, all in turn."""
    count = max(2, math.ceil(BYTES / (rows * length * 2)))
    matrices = [torch.randn(rows, length, device="cuda").to(dtype) for _ in range(count)]
    halves = [(torch.empty_like(g[: rows // 2]), g[: rows // 2]) for g in matrices]
    calls: dict[str, list[Callable[[], object]]] = {
        "copy of as many bytes": [partial(to.copy_, part) for to, part in halves],
        "torch": [partial(torch.sum, g, 0) for g in matrices],
    }
    for plan in dict.fromkeys((plan_of(rows, length), *plans(rows, length))):
        named = "x".join(map(str, plan))
        calls[named] = [partial(kernels.column_sums, g, dtype, None, plan) for g in matrices]
    graphs = {name: captured(each) for name, each in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, done) in graphs.items():
            found[name].append(replayed(graph) / done)
    made = {name: statistics.median(each) for name, each in found.items()}
    chosen = "x".join(map(str, plan_of(rows, length)))
    made |= {"host, torch": host(lambda: matrices[0].sum(0)), "host": host(lambda: column_sums(matrices[0]))}
    progress.say(f"column sums {(rows, length)} {dtype}, us, chosen {chosen}:")
    for name, one in made.items():
        progress.say(f"  {name}: {one:.1f}")
    return {**made, "chosen": chosen}


def plans(rows: int, length: int) -> list[Plan]:
    """Other widths, and other numbers of warps on a multiprocessor."""
    widths = [width for width in WIDTHS if length % width == 0]
    return [plan_of(rows, length, width, beside) for width in widths for beside in (8, 16, 32, 48)]


def captured(calls: Sequence[Callable[[], object]]) -> tuple[torch.cuda.CUDAGraph, int]:
    """At least CALLS calls in a CUDA graph, and how many they are."""
    work = list(calls) * math.ceil(CALLS / len(calls))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    return graph, len(work)


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay after another one."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def host(call: Callable[[], object]) -> float:
    """Median of the microseconds after which a call returns, the GPU being idle before."""
    found = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e6)
    return statistics.median(found)


def main() -> int:
    """Bits, then times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--no-checks", action="store_true")
    options = parser.parse_args()
    progress = Progress(options.seconds)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for label, call in () if options.no_checks else checks(progress):
        progress.attempt(label, call)
    for rows, length in TIMED:

        def kept(rows: int = rows, length: int = length) -> None:
            found[f"{rows}x{length}"] = times(progress, rows, length)

        progress.attempt(f"times {(rows, length)}", kept)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "column_sums.json").write_text(json.dumps(found, indent=1))
    return progress.verdict()


__all__ = ["PUBLISHED", "checks", "times"]

if __name__ == "__main__":
    raise SystemExit(main())
