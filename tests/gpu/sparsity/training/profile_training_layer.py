"""A 2:4 training step by our own kernels on a GPU: bits of its kernels, then where its time goes, beside dense.

    PYTHONPATH=. python tests/gpu/sparsity/training/profile_training_layer.py [--seconds 95] [--no-checks]

First bits: masked weights compressed in both directions against the reference, products by every tile that such a step may get
against exact ones, sums of columns, the gradient of a bias (`column_sums`), gradients of weight and bias together
(`linear_gradients`), the step in a CUDA graph against eager ones. Then times of single products, and of sums beside torch's and
a copy. Then one linear layer, float16, forward and backward at the two published shapes: dense, ours with masks found in each
step, and with masks kept. For each: the median time of a step launched one by one, the time that the host takes to launch it,
and the kernels that torch's profiler saw, by the time of one step; then the same step in a CUDA graph, or why there is none.
After --seconds nothing new starts.
profile_training_layer.json in the folder $OUT, where that is set, has the same. Exits with 1 where a bit differs or a call
raises, with 2 where something was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import ao_lab
from experiments.sparsity.products import SHAPES, layer_of, linear_dense, sparse
from fast.sparsity.compress import DTYPES
from tests.gpu.sparsity.progress import Progress
from tests.gpu.sparsity.training import column_sums, kernels, linear_gradients

Step = Callable[[], object]
CALLS, PROFILED = 30, 10


def sides(shape: tuple[int, int, int]) -> dict[str, Callable[[], Step]]:
    """What is timed, by name."""
    own = partial(sparse, shape, "cuda", 0, "sparse_wgmma")
    return {
        "dense": partial(linear_dense, shape, "cuda", 0),
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


def graph_of(step: Step) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The step in a CUDA graph, and what it returns."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    return graph, made


def check_graph(progress: Progress, shape: tuple[int, int, int]) -> None:
    """Replays after the weight has changed: masks, outputs and gradients of eager steps, bit for bit."""
    model, x, g = layer_of(shape, "cuda", 0, torch.float16)
    config = ao_lab.SparseTrainingConfig(
        masks="recomputed", transposable=True, gradient="straight-through", products="sparse_wgmma"
    )
    ao_lab.sparsify_(model, config)

    def step() -> tuple[torch.Tensor, ...]:
        ao_lab.step_sparsity_(model)
        y = model(x)
        return (y.detach(), *torch.autograd.grad(y, (x, *model.parameters()), g), model[0].sparse_mask)

    graph, made = graph_of(step)
    for again in range(3):
        with torch.no_grad():
            model[0].weight.normal_(std=0.03)
        graph.replay()
        found = [t.clone() for t in made]
        right = step()
        good = all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
        progress.check(f"graph {shape}, replay {again}", good, "bits differ")
    # Three before the capture, three replays and three eager steps; a capture adds nothing.
    progress.check(f"graph {shape}, steps", int(model[0].sparse_step) == 9, str(int(model[0].sparse_step)))
    progress.check(f"graph {shape}, count", ao_lab.step_sparsity_(model).step == 10)


def report(name: str, made: dict[str, Any]) -> None:
    """Print one side."""
    print(f"\n== {name}: {made['ms']:.3f} ms a step, host {made['host_ms']:.3f} ms", flush=True)
    for title in ("kernels", "host"):
        rows = made[title]
        print(f"  {title}: {sum(r[0] for r in rows):.0f} us a step, {sum(r[1] for r in rows):.1f} calls")
        for spent, calls, key in rows[:14]:
            print(f"    {spent:8.1f} us {calls:6.1f} x {key}")


def examine(name: str, make: Callable[[], Step]) -> dict[str, Any]:
    """Everything of one side but its graph."""
    step = make()
    for _ in range(5):
        step()
    times, host = device_time(step), host_time(step)
    on_device, on_host = table(step)
    made = {"ms": times, "host_ms": host, "kernels": on_device, "host": on_host}
    report(name, made)
    return made


def try_graph(name: str, make: Callable[[], Step]) -> float:
    """Milliseconds in a graph."""
    graph, kept = graph_of(make())
    made = device_time(graph.replay)
    del kept
    print(f"== {name}, CUDA graph: {made:.3f} ms", flush=True)
    return made


def compile_all(progress: Progress) -> None:
    """Side by side what takes seconds each; failures show again where a kernel is used."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(kernels.compile_variant, (one, name)) for one in kernels.variants() for name in names
        ]
        jobs += [
            pool.submit(kernels.compile_masked, (dtype, shape, turned))
            for dtype in DTYPES
            for shape in ((128, 128), (16, 16))
            for turned in (False, True)
        ]
        jobs += [pool.submit(kernels.compile_mask, dtype) for dtype in (torch.float16, torch.float32)]
        failed = [str(one.exception())[:300] for one in jobs if one.exception()]
    progress.say(f"{len(jobs)} kernels compiled, {len(failed)} not: {failed[:1]}")


def main() -> int:
    """Bits, products, steps one by one, then graphs, as a failed capture may leave the context unusable."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=95.0)
    parser.add_argument("--no-checks", action="store_true")
    options = parser.parse_args()
    progress = Progress(options.seconds)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def kept(label: str, call: Callable[[], Any]) -> None:
        found[label] = call()
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "profile_training_layer.json").write_text(json.dumps(found, indent=1))

    compile_all(progress)
    for label, call in (
        ()
        if options.no_checks
        else (*kernels.checks(progress), *column_sums.checks(progress), *linear_gradients.checks(progress))
    ):
        progress.attempt(label, call)
    for rows, length in column_sums.PUBLISHED:
        label = f"column sums {(rows, length)}"
        progress.attempt(label, partial(kept, label, partial(column_sums.times, progress, rows, length)))
    for shape in kernels.PUBLISHED:
        label = f"products {shape}"
        progress.attempt(
            label, partial(kept, label, partial(kernels.time_products, progress, shape, torch.float16))
        )
    every = [(f"{shape} {name}", make) for shape in SHAPES for name, make in sides(shape).items()]
    for doing in (examine, try_graph):
        for name, make in every:
            label = f"{name}, {doing.__name__}"
            progress.attempt(label, partial(kept, label, partial(doing, name, make)))
    for shape in () if options.no_checks else SHAPES:
        progress.attempt(f"graph {shape}", partial(check_graph, progress, shape))
    return progress.verdict()


if __name__ == "__main__":
    raise SystemExit(main())
