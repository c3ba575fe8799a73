"""Host microseconds of quantized layers that are called one by one on a GPU, and where they go.

    PYTHONPATH=. python tests/gpu/linear/eager_host.py [--rows 1] [--shapes 4096x4096 ...] [--only NAME ...] [--json FILE]

For each shape and configuration a stack of layers whose weights are other memory each. "layer": the module's call; "linear":
`F.linear`; "program": what the weight keeps prepared, where it does; "gpu": between two events, launches waiting for nothing.
The host is ahead of the GPU in none of the first three: each is the least of many loops that end with a wait outside of the
time. Methods are called in turn. What `tests/gpu/host_time.py` says without a GPU is the same but for the driver's part.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import ao_lab
from ao_lab.quantization.prepared_products import PROGRAMS
from experiments.linear.tables import float8_dynamic, integers

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096))
CONFIGS: dict[str, Callable[[], Any] | None] = {
    "bfloat16": None,
    "int4 g128": integers(4, 128),
    "int4 g128, zero points": lambda: ao_lab.Int4WeightOnlyConfig(group_size=128),
    "int8": lambda: ao_lab.Int8WeightOnlyConfig(),
    "int8 dynamic": lambda: ao_lab.Int8DynamicActivationInt8WeightConfig(),
    "fp8 dynamic, rows": float8_dynamic(ao_lab.PerRow()),
    "fp8 dynamic, tensor": float8_dynamic(ao_lab.PerTensor()),
    "mxfp4": lambda: ao_lab.MXWeightOnlyConfig("float4_e2m1fn"),
}
#: Layers, loops, and calls before: the second one of many rows prepares the product.
LAYERS, LOOPS, BEFORE = 16, 40, 3


def stack(shape: tuple[int, int], config: Callable[[], Any] | None) -> list[nn.Linear]:
    """Layers of (out, in) with weights of their own."""
    n, k = shape
    layers = nn.ModuleList(
        nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)
    )
    layers.requires_grad_(False)
    if config is not None:
        ao_lab.quantize_(layers, config())
    return list(layers)  # type: ignore[arg-type]


def ways(layers: list[nn.Linear], x: torch.Tensor) -> dict[str, Callable[[], None]]:
    """What is timed of one stack."""

    def modules() -> None:
        for one in layers:
            one(x)

    weights = [one.weight for one in layers]

    def linears() -> None:
        for one in weights:
            F.linear(x, one)

    for _ in range(BEFORE):
        modules()
    found = {"layer": modules, "linear": linears}
    known = [getattr(one, "__dict__", {}).get("_settled", {}).get(PROGRAMS) for one in weights]
    if all(one is not None and one(x, None) is not None for one in known):

        def programs() -> None:
            for one in known:
                one(x, None)

        found["program"] = programs
    return found


def host(call: Callable[[], None]) -> float:
    """Microseconds of one loop, before which the GPU has nothing to do."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) / LAYERS * 1e6


def gpu(call: Callable[[], None]) -> float:
    """Microseconds a layer of a captured loop."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(LOOPS):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / LAYERS * 1e3)
    return statistics.median(times)


@torch.no_grad()
def measured(shape: tuple[int, int], rows: int, names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Of each configuration its ways, median and least of loops in turn."""
    x = torch.randn(1, rows, shape[1], device="cuda", dtype=torch.bfloat16)
    calls = {name: ways(stack(shape, CONFIGS[name]), x) for name in names}
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(LOOPS):
        for name, found in calls.items():
            for way, call in found.items():
                times.setdefault((name, way), []).append(host(call))
    result: dict[str, dict[str, float]] = {
        name: {"gpu": gpu(found["linear"])} for name, found in calls.items()
    }
    for (name, way), taken in times.items():
        result[name] |= {way: statistics.median(taken), f"{way}, least": min(taken)}
    return result


def shape_of(text: str) -> tuple[int, int]:
    """Of a weight, as arguments have it: 4096x14336."""
    n, k = map(int, text.split("x"))
    return n, k


def main() -> int:
    """All shapes, each as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--shapes", nargs="*", type=shape_of, default=SHAPES)
    parser.add_argument("--only", nargs="*", choices=[*CONFIGS], default=[*CONFIGS])
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("there is no GPU that torch sees; tests/gpu/host_time.py runs without one\n")
        return 2
    found = {}
    for shape in options.shapes:
        found[str(shape)] = measured(shape, options.rows, options.only)
        for name, values in found[str(shape)].items():
            text = "  ".join(f"{way} {value:.1f}" for way, value in values.items())
            sys.stdout.write(f"{shape} {name:24} {text}\n")
        sys.stdout.flush()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
