"""One linear layer, forward and backward, eager and from a CUDA graph: times, errors, host time, fraction of the floor.

All methods of a shape are timed in turn, round by round, each after calls of its own, bfloat16 first and once more last; then
in single calls after a pause. A method's outputs and gradients are compared with those of the same operands in float32 before
it is timed. On a CPU small shapes take the same path; errors mean there what they mean on a GPU, times do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.methods import FLOAT8, PLAIN, SUMMED_FAST, Method, methods
from experiments.fp8_training.speed.floor import Rates, floor_seconds, measure_rates
from experiments.fp8_training.speed.steady import IDLE, SETTLE, after_pause, steady
from experiments.fp8_training.speed.watch import watch_of
from experiments.harness.compiled import compiled_runs
from experiments.harness.outcome import Values, Wrong, attempt, free, status
from experiments.harness.timing import AGAIN, Plan, Span, Watch, host_times, prepare, summary

KIND = "linear"
EAGER, GRAPH = "eager", "CUDA graph"
#: Rows, inputs, outputs.
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = (
    (16384, 4096, 14336),
    (8192, 4096, 4096),
    (4096, 1024, 2048),
    (2048, 1024, 1024),
)
STAND_INS: tuple[Shape, ...] = ((256, 128, 256),)
MX = ("blockwise", "mxfp8", "mxfp6", "mxfp4", "nvfp4")
PLAN = Plan(rounds=15, warmup=1, seconds=8.0, span=2e-3, most_calls=8)
QUICK = Plan(rounds=2, warmup=0, seconds=0.5, fewest=2, most_calls=1)
#: Largest relative error of an output or gradient; beyond it a method is wrong and gets no time. 4-bit formats reach 0.3.
LIMIT = 0.6


def all_methods(device: str) -> tuple[Method, ...]:
    """Every recipe of ours and torchao's; on a GPU those of 8-bit floats compiled too, which is how torchao is meant to run,
    and with fast sums, which on a CPU are no other sums."""
    if device != "cuda":
        return methods(*FLOAT8, *MX)
    compiled = [one for one in methods(*FLOAT8, fast=SUMMED_FAST, compiled=True) if one.recipe]
    return (*methods(*FLOAT8, *MX, fast=SUMMED_FAST), *compiled)


def label(method: Method) -> str:
    """The method of its rows."""
    return f"{method.name}, compiled" if method.compiled else method.name


@dataclass
class Layer:
    """A layer with its input and output gradient, random normal, and its forward and backward."""

    module: nn.Linear
    x: Tensor
    g: Tensor

    @classmethod
    def of(cls, shape: Shape, device: str, seed: int) -> Layer:
        """The same values for the same shape and seed, in bfloat16."""
        m, k, n = shape
        generator = torch.Generator(device).manual_seed(seed)
        draw = {"generator": generator, "device": device, "dtype": torch.bfloat16}
        module = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
        module.weight.data.normal_(std=k**-0.5, generator=generator)
        return cls(module, torch.randn(m, k, **draw).requires_grad_(), torch.randn(m, n, **draw))

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output, gradient of the input, gradient of the weight; nothing accumulates."""
        y = self.module(self.x)
        dx, dw = torch.autograd.grad(y, (self.x, self.module.weight), self.g)
        return y, dx, dw

    def exact(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in float32 without low precision anywhere."""
        x, w, g = (one.detach().float() for one in (self.x, self.module.weight, self.g))
        return x @ w.t(), g @ w, g.t() @ x


@dataclass
class Bench:
    """What a table of linear layers is measured with."""

    device: str
    seed: int
    watch: Watch
    deadline: Deadline
    rates: Rates | None = None
    plan: Plan = field(default=PLAN)
    #: Seconds of calls of its own before a method is timed.
    settle: float = SETTLE
    #: Seconds without work before a single call.
    idle: float = IDLE

    @classmethod
    def of(cls, device: str, seed: int, deadline: Deadline) -> Bench:
        """On a GPU with its rates, which the floor is made of; on a CPU nothing comes before a call: its times say nothing."""
        watch = watch_of(device)
        if device != "cuda":
            return cls(device, seed, watch, deadline, plan=QUICK, settle=0.0, idle=0.0)
        return cls(device, seed, watch, deadline, measure_rates(watch))


def measure(
    bench: Bench, shape: Shape, chosen: Sequence[Method] | None = None
) -> dict[tuple[str, str], Values]:
    """Values of each (setting, method) for a shape; a method that fails has a status instead."""
    found: dict[tuple[str, str], Values] = {}
    layers: dict[str, tuple[Method, Layer]] = {}
    torch.compiler.reset()
    for method in all_methods(bench.device) if chosen is None else chosen:
        reason = method.missing() or bench.deadline.reason()
        values = status(reason) if reason else attempt(lambda m=method: checked(bench, shape, m, layers))
        found[EAGER, label(method)] = values
    if layers:
        time_eager(bench, shape, layers, found)
    if layers and bench.device == "cuda":
        time_graphs(bench, shape, layers, found)
    layers.clear()
    free()
    return found


def checked(bench: Bench, shape: Shape, method: Method, layers: dict[str, tuple[Method, Layer]]) -> Values:
    """Errors of a method; it is added to the layers. `Wrong` where an error is not below LIMIT."""
    layer = Layer.of(shape, bench.device, bench.seed)
    expected = layer.exact()
    if method.recipe:
        method.prepare(holder := nn.Sequential(layer.module))
        layer = replace(layer, module=holder[0])
    if method.compiled:
        layer.module.compile(dynamic=False)
    values: Values = {}
    for name, made, exact in zip(
        ("output", "input gradient", "weight gradient"), layer.step(), expected, strict=True
    ):
        error = relative_error(made, exact)
        if not error < LIMIT:
            raise Wrong(f"the {name} differs by {error:.3f} of its size")
        values[f"error of the {name}"] = (error, "ratio")
    with compiled_runs(method.compiled):
        layer.step()
    layers[label(method)] = method, layer
    return values


def relative_error(made: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is exact."""
    return float((made.detach().float() - exact).norm() / exact.norm())


def time_eager(
    bench: Bench, shape: Shape, layers: dict[str, tuple[Method, Layer]], found: dict[tuple[str, str], Values]
) -> None:
    """Add device times of launches one by one, and host times."""
    calls: dict[str, Callable[[], object]] = {name: layer.step for name, (_, layer) in layers.items()}
    spans = {name: Span(1, call, call) for name, call in calls.items()}
    for call in calls.values():
        call()
    times = steady(bench.watch, spans, bench.plan, bench.settle, graph=False)
    add_times(bench, shape, layers, times, found, EAGER)
    add_single(bench, calls, found, EAGER)
    if bench.device == "cuda":
        for name, seconds in host_times(calls, bench.watch.sync, batches=4, batch=8).items():
            found[EAGER, name]["host time"] = (seconds * 1e6, "us")


def time_graphs(
    bench: Bench, shape: Shape, layers: dict[str, tuple[Method, Layer]], found: dict[tuple[str, str], Values]
) -> None:
    """Add device times of CUDA graphs, of the methods that can be captured."""
    spans: dict[str, Span] = {}
    single: dict[str, Callable[[], object]] = {}
    for name, (_, layer) in layers.items():

        def capture(name: str = name, layer: Layer = layer) -> Values:
            span = prepare(bench.watch, [layer.step], bench.plan)
            single[name] = span.graph if span.count == 1 else bench.watch.capture([layer.step])
            spans[name] = span
            return {}

        found[GRAPH, name] = attempt(capture)
    if spans:
        kept = {name: layers[name] for name in spans}
        times = steady(bench.watch, spans, bench.plan, bench.settle)
        add_times(bench, shape, kept, times, found, GRAPH)
        add_single(bench, {name: single[name] for name in spans}, found, GRAPH)


def add_single(
    bench: Bench, calls: dict[str, Callable[[], object]], found: dict[tuple[str, str], Values], setting: str
) -> None:
    """Add medians of single calls after a pause."""
    for name, seconds in after_pause(bench.watch, calls, bench.idle).items():
        found[setting, name]["time after a pause"] = (summary(seconds).median * 1e3, "ms")


def add_times(
    bench: Bench, shape: Shape, layers: dict[str, tuple[Method, Layer]], times: dict[str, list[float]],
    found: dict[tuple[str, str], Values], setting: str,
) -> None:  # fmt: skip
    """Median, quantiles, ratio to bfloat16 and fraction of the floor."""
    base = summary(times[PLAIN.name]).median if PLAIN.name in times else None
    for name, (method, _) in layers.items():
        timing, values = summary(times[name]), found[setting, name]
        values["time"] = (timing.median * 1e3, "ms")
        values["time, 20%"], values["time, 80%"] = (timing.low * 1e3, "ms"), (timing.high * 1e3, "ms")
        if base is not None:
            values["time over bfloat16"] = (timing.median / base, "ratio")
        if bench.rates is not None:
            least = floor_seconds(shape, method.recipe, bench.rates)
            values["fraction of the floor"] = (least / timing.median, "ratio")
    if base is not None and AGAIN in times:
        again = summary(times[AGAIN]).median
        found[setting, PLAIN.name]["time again over the first"] = (again / base, "ratio")


def data_of(shape: Shape) -> str:
    """How tables call a shape."""
    m, k, n = shape
    return f"{m}x{k}x{n}"


__all__ = [
    "EAGER",
    "GRAPH",
    "KIND",
    "SHAPES",
    "STAND_INS",
    "Bench",
    "Layer",
    "all_methods",
    "data_of",
    "measure",
]
