"""Where the time of a token of transformers' `generate()` goes, bfloat16 beside int4: GPU, graphs, host.

    PYTHONPATH=. python tests/gpu/profile_generate.py [--layers 8 --configs bfloat16 "int4 g128" --budget 200]
    PYTHONPATH=. python tests/gpu/profile_generate.py --device cpu --divide 32 --layers 1

The models of experiment `generate` at batch 1, compiled and eager. Of each: milliseconds a token without a profiler; by
torch.profiler over --steps steps of decoding in steady state what the GPU does (in all, inside graphs, between them), its
largest kernels, and the host by names of operations; of eager mode cProfile of 10 steps. Times under a profiler are longer
than without: compare them with each other alone. What one layer's call takes the host says `linear/eager_host.py`. If OUT
is set, all of it is in $OUT/profile_generate.json.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile, schedule

from experiments.generate.tables import BASE, METHODS, Stage
from tests.gpu.harness import traces

#: Steps before the window: prompt, and what is slow in the first ones; those that the profiler runs before it counts.
BEFORE, WARM, PYTHON_STEPS, LARGEST, MOST_KERNELS = 16, 4, 10, 25, 15


#: Whether a profiler has run.
PROFILED: list[bool] = []


def stage_of(args: argparse.Namespace) -> Stage:
    """The model and its calls."""
    return Stage(args.layers, args.device, args.divide, args.new)


def configured(base: Any, name: str) -> Any:
    """A copy of the model in a configuration."""
    model = copy.deepcopy(base)
    next(one for one in METHODS if one.name == name).apply(model)
    return model


class Steps(transformers.StoppingCriteria):
    """Calls a function after each step of a generation; stops none."""

    def __init__(self, after: Callable[[], None]) -> None:
        self.after = after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **rest: Any) -> torch.Tensor:
        self.after()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def traced(model: Any, compiled: bool, args: argparse.Namespace) -> list[traces.Event]:
    """The trace's events of some steps."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if args.device == "cuda" else [])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        window = schedule(wait=BEFORE, warmup=WARM, active=args.steps, repeat=1)
        with profile(
            activities=activities, schedule=window, on_trace_ready=lambda p: p.export_chrome_trace(str(path))
        ) as seen:
            stage_of(args).steps(model, 1, compiled, Steps(seen.step))
        return traces.complete(json.loads(path.read_text()))


def python_functions(model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Functions of Python, and those built in, by their own time a token of eager steps; the 40 largest."""
    profiler, count = cProfile.Profile(), 0

    def after() -> None:
        nonlocal count
        count += 1
        if count == BEFORE:
            profiler.enable()
        if count == BEFORE + PYTHON_STEPS:
            profiler.disable()

    stage_of(args).steps(model, 1, False, Steps(after))
    rows = []
    for (file, line, name), (_, calls, own, total, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        where = name if file == "~" else f"{'/'.join(Path(file).parts[-3:])}:{line}({name})"
        per = 1e6 / PYTHON_STEPS
        rows.append(
            {"function": where, "calls": calls / PYTHON_STEPS, "own_us": own * per, "total_us": total * per}
        )
    return sorted(rows, key=lambda row: -row["own_us"])[:40]


def profiled(model: Any, compiled: bool, args: argparse.Namespace) -> dict[str, Any]:
    """All of one configuration in one mode."""
    torch.compiler.reset()
    for _ in range(2 if compiled else 1):  # compiles; records the graph
        stage_of(args).steps(model, 1, compiled)
    # Once a profiler has run, launches of the process take the host longer: times of later ones would say nothing.
    token = None if PROFILED else statistics.median(stage_of(args).steps(model, 1, compiled))
    PROFILED.append(True)
    events = traced(model, compiled, args)
    wall = [
        event["dur"]
        for event in events
        if event["name"].startswith(traces.STEP) and event["cat"] == "user_annotation"
    ]
    return {
        "ms": None if token is None else token * 1e3,
        "profiled_ms": statistics.median(wall) / 1e3,
        "gpu": traces.gpu_times(events, args.steps),
        "kernels": traces.kernels(events, args.steps),
        "host": traces.host(events, args.steps),
        "python": [] if compiled else python_functions(model, args),
    }


def beside(title: str, found: dict[str, dict[str, dict[str, float]]], key: str, most: int) -> None:
    """Names with the most time in any configuration, one column each: microseconds (and how often)."""
    largest = {
        name: max(one.get(name, {}).get(key, 0.0) for one in found.values())
        for one in found.values()
        for name in one
    }
    print(f"  {title}: " + " | ".join(found))
    for name in sorted(largest, key=lambda name: -largest[name])[:most]:
        cells = [one.get(name) for one in found.values()]
        texts = [
            f"{'-':>16}" if cell is None else f"{cell.get(key, 0.0):9.1f} ({cell['count']:4.0f})"
            for cell in cells
        ]
        print(f"    {' | '.join(texts)}  {name[:110]}", flush=True)


def show(mode: str, found: dict[str, dict[str, Any]]) -> None:
    """One mode, its configurations beside each other."""
    print(f"{mode}, a token:")
    for name, one in found.items():
        numbers = ", ".join(f"{key} {value:.1f}" for key, value in one["gpu"].items())
        token = "-" if one["ms"] is None else f"{one['ms']:.3f} ms"
        print(f"  {name:16} {token}, profiled {one['profiled_ms']:.3f} ms; GPU: {numbers}")
    beside("kernels, us", {name: one["kernels"] for name, one in found.items()}, "us", MOST_KERNELS)
    beside("host, us", {name: one["host"] for name, one in found.items()}, "us", LARGEST)
    beside(
        "host without what is inside, us",
        {name: one["host"] for name, one in found.items()},
        "self_us",
        LARGEST,
    )
    for name, one in found.items():
        for row in one["python"][:LARGEST]:
            print(
                f"    {name} {row['own_us']:9.1f} own {row['total_us']:9.1f} ({row['calls']:5.0f})  {row['function']}"
            )


def main() -> int:
    """Both modes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--divide", type=int, default=1, help="widths and vocabulary, for a stand-in")
    names = [one.name for one in METHODS]
    parser.add_argument("--configs", nargs="+", default=[BASE.name, "int4 g128"], choices=names)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--budget", type=float, default=200.0, help="seconds; modes that begin later are left out"
    )
    args = parser.parse_args()
    args.new = BEFORE + WARM + args.steps + 8
    began, base = time.perf_counter(), stage_of(args).model(0)
    card = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    result: dict[str, Any] = {
        "device": card,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    models = {name: configured(base, name) for name in args.configs}
    for compiled, mode in ((True, "compiled"), (False, "eager")):
        if time.perf_counter() - began > args.budget:
            print(f"{mode}: left out", flush=True)
            continue
        result[mode] = {name: profiled(model, compiled, args) for name, model in models.items()}
        show(mode, result[mode])
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "profile_generate.json").write_text(json.dumps(result, indent=1))
    print(f"{time.perf_counter() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
