"""What a step of an optimizer takes: ours, torch's fused one, torchao's and FlashOptim's on the same parameters and gradients.

On a GPU steps are replayed from CUDA graphs where they can be, and launched one by one too; all take turns in one process. The
floor is the time that a copy takes for the bytes that a step has to read and write. Stand-in: on a CPU a few small parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from ao_lab import optim
from ao_lab.measure.turns import Plan, Span, Watch, in_turn, interleaved, prepare, summary, watch_of
from experiments.harness.bench import copy_rate, repeated
from experiments.harness.cuda_graph import launched
from experiments.harness.measuring import Values, attempt, kernel, status

SPEED, DATA = "speed", "normal"
TIME, FLOOR, GRAPH = "time", "time of a copy of its bytes", ", graph"
PLANS = {"cuda": Plan(rounds=12, warmup=2, span=6e-3, seconds=1.0), "cpu": Plan(rounds=3, warmup=1)}

Parameters = list[torch.nn.Parameter]
Make = Callable[[Parameters], torch.optim.Optimizer]


@dataclass(frozen=True)
class Shape:
    """So many square parameters in bfloat16."""

    count: int
    side: int

    @property
    def elements(self) -> int:
        """Of all."""
        return self.count * self.side**2

    @property
    def name(self) -> str:
        """As a setting of rows."""
        return f"{self.count} x {self.side} x {self.side} bfloat16"


SHAPES = {"full": Shape(28, 4096), "quick": Shape(2, 512)}


@dataclass(frozen=True)
class Method:
    """An optimizer. bytes: that an element's step reads and writes, parameter and gradient included; package: it needs."""

    make: Make
    bytes: float
    package: str = ""
    graph: bool = True


def _ours(kind: str, **options: Any) -> Make:
    return lambda ps: getattr(optim, kind)(ps, lr=1e-4, nonfinite="propagate", **options)


def _torchao(kind: str) -> Make:
    def make(ps: Parameters) -> torch.optim.Optimizer:
        import torchao.optim as theirs

        return getattr(theirs, kind)(ps, lr=1e-4)

    return make


def _flash(ps: Parameters, width: int) -> torch.optim.Optimizer:
    return import_module("flashoptim").FlashAdamW(ps, lr=1e-4, master_weight_bits=width)


def _fused(ps: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ps, lr=1e-4, fused=True, capturable=ps[0].is_cuda)


METHODS: dict[str, Method] = {
    "torch, fused, bfloat16 states": Method(_fused, 14.0),
    "8-bit states": Method(_ours("AdamW8bit"), 10 + 4 * 4 / 256),
    "8-bit states, bfloat16 rounded stochastically": Method(
        _ours("AdamW8bit", bf16_stochastic_round=True), 10 + 4 * 4 / 256
    ),
    "8-bit states, gradients checked": Method(
        lambda ps: optim.AdamW8bit(ps, lr=1e-4), 12 + 4 * 4 / 256, graph=False
    ),
    "8-bit states, 24-bit master": Method(_ours("AdamW8bit", master="24bit"), 12 + 4 * 4 / 256),
    "8-bit states, 32-bit master": Method(_ours("AdamW8bit", master="32bit"), 14 + 4 * 4 / 256),
    "4-bit states": Method(_ours("AdamW4bit"), 8 + 4 * 4 / 128),
    "Lion, 8-bit states": Method(_ours("Lion8bit"), 8 + 2 * 4 / 256),
    "torchao, 8 bits": Method(_torchao("AdamW8bit"), 10 + 4 * 4 / 256, "torchao", graph=False),
    "torchao, 4 bits": Method(_torchao("AdamW4bit"), 8 + 4 * 4 / 128, "torchao", graph=False),
    "FlashOptim, 24-bit master": Method(
        partial(_flash, width=24), 12 + 4 * 2 / 32, "flashoptim", graph=False
    ),
}
#: What a CPU is timed by.
ON_CPUS = ("torch, fused, bfloat16 states", "8-bit states", "4-bit states")


def methods_of(device: str) -> dict[str, Method]:
    """Those of a device."""
    return METHODS if device == "cuda" else {name: METHODS[name] for name in ON_CPUS}


def parameters(shape: Shape, device: str) -> Parameters:
    """Random ones with gradients."""
    ps = []
    for _ in range(shape.count):
        p = torch.nn.Parameter(
            torch.randn(shape.side, shape.side, device=device, dtype=torch.bfloat16) * 0.02
        )
        p.grad = torch.randn_like(p) * 1e-3
        ps.append(p)
    return ps


def measure(shape: Shape, device: str) -> Mapping[str, Values]:
    """Values of every method, all timed in turn; of one that is missing or fails its status."""
    watch, plan, ps = watch_of(device), PLANS[device], parameters(shape, device)
    results: dict[str, Values] = {}
    steps: dict[str, Callable[[], Any]] = {}
    for name, method in methods_of(device).items():
        if method.package and find_spec(method.package) is None:
            results[name] = status(f"missing: {method.package} is not installed")
            continue
        # A graph has addresses alone: what is kept with the step holds the optimizer.
        made: list[torch.optim.Optimizer] = []
        results[name] = attempt(partial(_begin, method, ps, made))
        if made and "status: ok" in results[name]:
            steps[name] = made[0].step
    rate = copy_rate(watch, shape.elements, device, plan)
    for graph in (True, False) if device == "cuda" else (False,):
        some = {name: step for name, step in steps.items() if not graph or METHODS[name].graph}
        spans = {
            name: prepare(watch, [step], plan) if graph else _launches(watch, step, plan)
            for name, step in some.items()
        }
        times = interleaved(watch, spans, plan, graph=graph)
        for name in some:
            floor = METHODS[name].bytes * shape.elements / rate
            values = {
                f"{metric}{GRAPH if graph else ''}": value
                for metric, value in summary(times[name]).values().items()
            }
            results[name] = {**results[name], **values, FLOOR: (floor * 1e3, "ms")}
        first = next(iter(some))
        results[first] = {**results[first], **repeated(times, first)}
    return results


def _begin(method: Method, ps: Parameters, made: list[torch.optim.Optimizer]) -> Values:
    """The first step, which is not timed: what a GPU launched is the method's kernel."""
    optimizer = method.make(ps)
    optimizer.step()
    name = launched(optimizer.step) if method.graph else ""
    made.append(optimizer)
    return kernel(name)


def _launches(watch: Watch, step: Callable[[], Any], plan: Plan) -> Span:
    """Steps that are launched one by one, for those that cannot be captured too."""
    once = max(min(watch.seconds([step] * 3)), 1e-9)
    count = max(1, min(math.ceil(plan.span / once), plan.most_calls))
    return Span(count, in_turn([step] * count), in_turn([step] * count))


__all__ = ["FLOOR", "GRAPH", "METHODS", "SHAPES", "SPEED", "TIME", "measure", "methods_of"]
