"""Where the time of a 2:4 training step goes, on a GPU: kernels, host, and the whole, beside dense.

    PYTHONPATH=. python tests/gpu/sparsity/profile_training_layer.py [--seconds 90]

One linear layer, float16, forward and backward at the two published shapes: dense, ours with masks found in each step, and with
masks kept. For each: the median time of a step launched one by one, the time that the host takes to launch it, and the kernels
that torch's profiler saw, by the time of one step; then the same step in a CUDA graph, or why there is none. After --seconds
nothing new starts. profile_training_layer.json in the folder $OUT, where that is set, has the same. Exits with 1 where a side
raised.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, os.getcwd())

from experiments.sparsity.speed.linear import SHAPES, dense, sparse

Step = Callable[[], object]
CALLS, PROFILED = 30, 10


def sides(shape: tuple[int, int, int]) -> dict[str, Callable[[], Step]]:
    """What is timed, by name."""
    own = partial(sparse, shape, "cuda", 0, "sparse_wgmma")
    return {
        "dense": partial(dense, shape, "cuda", 0),
        "ours, masks found": partial(own, renew=True),
        "ours, masks kept": partial(own, renew=False),
    }


def device_time(step: Step) -> float:
    """Median of the milliseconds of a call, by events around batches of five, which hide the first launch."""
    times = []
    for _ in range(CALLS // 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(5):
            step()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 5)
    return statistics.median(times)


def host_time(step: Step) -> float:
    """Median of the milliseconds after which a call returns, the GPU being idle before."""
    times = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def table(step: Step) -> tuple[list[tuple[float, float, str]], list[tuple[float, float, str]]]:
    """Kernels and host's operations of a step: (microseconds a step, calls a step, name), the longest first."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    kernels, host = [], []
    for event in seen.key_averages():
        on_device = str(event.device_type).endswith("CUDA")
        spent = event.self_device_time_total if on_device else event.self_cpu_time_total
        row = (spent / PROFILED, event.count / PROFILED, event.key[:110])
        (kernels if on_device else host).append(row)
    return sorted(kernels, reverse=True), sorted(host, reverse=True)


def captured(step: Step) -> float:
    """The milliseconds of the step in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()
    made = device_time(graph.replay)
    del kept
    return made


def report(name: str, made: dict[str, Any]) -> None:
    """Print one side."""
    print(f"\n== {name}: {made['ms']:.3f} ms a step, host {made['host_ms']:.3f} ms", flush=True)
    for title in ("kernels", "host"):
        rows = made[title]
        print(f"  {title}: {sum(r[0] for r in rows):.0f} us a step, {sum(r[1] for r in rows):.1f} calls")
        for spent, calls, key in rows[:14]:
            print(f"    {spent:8.1f} us {calls:6.1f} x {key}")


def examine(name: str, make: Callable[[], Step]) -> dict[str, Any]:
    """Everything of one side; the graph last, as a failed capture may leave the context unusable."""
    step = make()
    for _ in range(5):
        step()
    kernels, host = table(step)
    made = {"ms": device_time(step), "host_ms": host_time(step), "kernels": kernels, "host": host}
    report(name, made)
    return made


def try_graph(name: str, make: Callable[[], Step]) -> str | float:
    """Milliseconds in a graph, or why there is none."""
    try:
        made: str | float = captured(make())
        print(f"== {name}, CUDA graph: {made:.3f} ms", flush=True)
    except Exception as error:
        made = f"{type(error).__name__}: {error}"[:300]
        print(f"== {name}, CUDA graph: none, {made}", flush=True)
    return made


def main() -> int:
    """Steps one by one, then graphs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    began, failed = time.monotonic(), 0
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    every = [(f"{shape} {name}", make) for shape in SHAPES for name, make in sides(shape).items()]
    for doing in (examine, try_graph):
        for name, make in every:
            if time.monotonic() - began > options.seconds:
                print(f"{name}: left out, {options.seconds} s are over")
                continue
            try:
                found[f"{name}, {doing.__name__}"] = doing(name, make)
            except Exception:
                failed = 1
                traceback.print_exc()
            if os.environ.get("OUT"):
                (Path(os.environ["OUT"]) / "profile_training_layer.json").write_text(json.dumps(found, indent=1))
    print(f"{time.monotonic() - began:.0f} s")
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
