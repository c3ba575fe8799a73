"""Prompts and tokens of transformers' `generate()` that is not compiled, and host times of the model's linear layers.

    PYTHONPATH=. python tests/gpu/linear/eager_model.py [--layers 8] [--length 2048] [--only NAME ...] [--ordinary]

"prompt": milliseconds from a prompt to its first token; "token": of a decoding step, batch 1; medians of methods in turn, and
how many times as fast as bfloat16. Then what linear layers take the host, microseconds in the model, where caches are cold: q,
k, v, o, gate, up, down of the median layer, and the output layer. --ordinary: products of many rows are not prepared.

A static cache waits for the GPU once in each layer (`transformers.cache_utils`), so that the host's time of a prompt's layer is
not hidden behind the GPU's. `--device cpu --divide 16` runs without a GPU, to see that it does.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ao_lab.quantization.prepared_products import PreparedProducts
from experiments.generate.tables import METHODS, Stage

NAMES = ("bfloat16", "fp8 dynamic, rows", "int4 g128", "int8", "mxfp4")
#: Linear layers of a decoder layer; calls before the first that counts; rounds.
KINDS, BEFORE, ROUNDS = 7, 3, 5


def models_of(stage: Stage, names: list[str]) -> dict[str, Any]:
    """The same weights by each method."""
    base, made = stage.model(0), {}
    for name in names:
        made[name] = copy.deepcopy(base)
        next(one for one in METHODS if one.name == name).apply(made[name])
    return made


def in_turn(calls: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Medians in milliseconds of calls that give seconds, each round beginning with another one."""
    for call in calls.values():
        for _ in range(BEFORE):
            call()
    names, times = [*calls], {name: list[float]() for name in calls}
    for at in range(ROUNDS):
        for name in names[at % len(names) :] + names[: at % len(names)]:
            times[name].append(calls[name]() * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def host_times(call: Callable[[], Any], layers: int) -> list[float]:
    """Microseconds of the calls of linear layers: the median layer's by kind, then the output layer's."""
    forward, times = nn.Linear.forward, list[float]()

    def timed(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        y = forward(self, x)
        times.append((time.perf_counter() - started) * 1e6)
        return y

    nn.Linear.forward = timed  # type: ignore[method-assign]
    try:
        for _ in range(BEFORE):
            call()
    finally:
        nn.Linear.forward = forward  # type: ignore[method-assign]
    each = KINDS * layers + 1
    columns = [statistics.median(times[at::each]) for at in range(each)]
    return [*(statistics.median(columns[kind:-1:KINDS]) for kind in range(KINDS)), columns[-1]]


def measured(stage: Stage, models: dict[str, Any], length: int) -> None:
    """All of it, each line as soon as it is known."""
    ways: dict[str, Callable[[Any], float]] = {
        "prompt": lambda model: stage.prefill(model, length, False),
        "token": lambda model: statistics.median(stage.steps(model, 1, False)),
    }
    for way, run in ways.items():
        found = in_turn({name: lambda m=model: run(m) for name, model in models.items()})  # type: ignore[misc] # noqa: B023
        for name, taken in found.items():
            times = host_times(lambda m=models[name]: run(m), stage.layers)  # type: ignore[misc] # noqa: B023
            faster = found["bfloat16"] / taken if "bfloat16" in found else float("nan")
            text = " ".join(f"{one:.1f}" for one in times)
            sys.stdout.write(f"{way} {name:20} {taken:8.3f} ms  {faster:.3f}  host us {text}\n")
            sys.stdout.flush()


def main() -> int:
    """The methods that are named, or all of NAMES."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--only", nargs="*", choices=[one.name for one in METHODS], default=[*NAMES])
    parser.add_argument("--ordinary", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--divide", type=int, default=1)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stderr.write("there is no GPU that torch sees; --device cpu --divide 16 runs without one\n")
        return 2
    if options.ordinary:
        PreparedProducts._is_new = lambda self, key: True  # type: ignore[method-assign]
    stage = Stage(options.layers, options.device, options.divide, options.new)
    measured(stage, models_of(stage, options.only), options.length)
    return 0


if __name__ == "__main__":
    sys.exit(main())
