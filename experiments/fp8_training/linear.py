"""One linear layer, forward and backward; and the grid of LayerNorm, linear layer and sigmoid.

All methods of a shape are timed in turn, eager and from a CUDA graph, each after calls of its own, bfloat16 first and once more
last; then in single calls after a pause. A method's outputs and gradients are compared with those of the same operands in
float32 before it is timed. On a CPU small shapes take the same path; errors mean there what they mean on a GPU, times do not.

The floor is the least time: a layer's operations at the measured matrix rate of the units that its operands need (8-bit
floats with one scale for a row or a tensor at that of `torch._scaled_mm`, all others at that of bfloat16), and its casts at the
rate of a copy: each tensor is read once, 2 bytes an element, and written in each of the two layouts that its products ask for.

The grid is the published one: 36 by 6 shapes, LayerNorm without parameters, a linear layer without bias. Both sides run eagerly
here, compiled there. Two times are taken: the GPU's while the host is ahead of it, which like the published sum of the kernels'
times does not see launches, and the larger of it and the host's, which is what an eager step takes. Ours runs with the recipe
forced, and after `ao_lab.tune`: for CUDA graphs in `grid`; for eager mode in `grid_eager`, the cells whose steps wait for the
host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.gemm.choices import choices_for, default_choices
from ao_lab.measure.turns import AGAIN, Plan, Span, Watch, prepare, summary, watch_of
from ao_lab.training.products import is_one_scale
from ao_lab.tuning.measure import host_seconds, reading, release
from experiments.fp8_training.methods import FLOAT8, OURS, PLAIN, SUMMED_FAST, Method, methods
from experiments.harness.bench import (
    IDLE,
    SETTLE,
    Rates,
    after_pause,
    host_times,
    measure_rates,
    repeated,
    steady,
)
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Deadline, Values, Wrong, attempt, free, status
from reference.training.recipe import Operand, Product, recipe_of

KIND = "linear"
EAGER, GRAPH = "eager", "CUDA graph"
#: Rows, inputs, outputs.
Shape = tuple[int, int, int]
SHAPES: tuple[Shape, ...] = ((16384, 4096, 14336), (8192, 4096, 4096), (4096, 1024, 2048), (2048, 1024, 1024))
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
        values |= timing.values()
        if base is not None:
            values["time over bfloat16"] = (timing.median / base, "ratio")
        if bench.rates is not None:
            least = floor_seconds(shape, method.recipe, bench.rates)
            values["fraction of the floor"] = (least / timing.median, "ratio")
    if base is not None and AGAIN in times:
        found[setting, PLAIN.name] |= repeated(times, PLAIN.name)


def data_of(shape: Shape) -> str:
    """How tables call a shape."""
    m, k, n = shape
    return f"{m}x{k}x{n}"


def floor_seconds(shape: tuple[int, int, int], recipe: str, rates: Rates) -> float:
    """Seconds of forward and backward of a layer (M, K, N) by a recipe; "" is bfloat16."""
    m, k, n = shape
    record = recipe_of(recipe or "bf16")
    products = (record.output, record.input_grad, record.weight_grad)
    work = sum(2 * m * k * n / rate_of(one, rates) for one in products)
    sizes = {"x": m * k, "w": n * k, "g": m * n}
    x, w, g, w_t, g_t, x_t = record.operands
    casts = {"x": (x, x_t), "w": (w, w_t), "g": (g, g_t)}
    return work + sum(cast_bytes(sizes[name], *pair) for name, pair in casts.items()) / rates.copy


def rate_of(product: Product, rates: Rates) -> float:
    """Operations a second of the units that a product's operands need."""
    schemes = [operand.scheme for operand in (product.a, product.b)]
    plain = all(
        one is not None and one.element.startswith("float8_") and is_one_scale(one) for one in schemes
    )
    return rates.float8 if plain else rates.bfloat16


def cast_bytes(elements: int, rows: Operand, columns: Operand) -> float:
    """Bytes of a tensor's casts: one read for both copies; none where neither is quantized."""
    made = [one.scheme.format.bits / 8 for one in (rows, columns) if one.scheme is not None]
    return elements * (2 + sum(made)) if made else 0.0


GRID_KIND, EAGER_KIND = "grid", "grid_eager"
#: How tables call the module.
MODULE = "layernorm-linear-sigmoid"
#: Rows, inputs, outputs.
Cell = tuple[int, int, int]
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
CELLS: tuple[Cell, ...] = tuple(product(SIZES, SIZES, SIZES))
GRID_STAND_INS: tuple[Cell, ...] = ((128, 128, 128), (256, 128, 256))
#: Cells of at most so many multiplications a product: others take the GPU longer than the host (1.2 ms in bfloat16, H200).
EAGER_MOST = 2**37
EAGER_CELLS = tuple(cell for cell in CELLS if prod(cell) <= EAGER_MOST)
RECIPE = "rowwise"
FORCED, TUNED = Method(library=OURS, recipe=RECIPE), Method(library=OURS, recipe=RECIPE, tuned=True)
CELL_PLAIN, CELL_FORCED, CELL_TUNED = "bfloat16", "forced", "tuned"
SIDES = {PLAIN: CELL_PLAIN, FORCED: CELL_FORCED, TUNED: CELL_TUNED}
#: Bytes beyond which a cell is not tried: operands, gradients, codes and outputs of all sides.
MEMORY = 120e9
#: Seconds of timing a cell, the fewest and most rounds.
SECONDS, FEWEST, MOST = 0.15, 5, 40


class NormLinearSigmoid(nn.Module):
    """(rows, inputs) to (rows, outputs) by a linear layer that others may share the weight of."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False, device="meta")
        self.linear.weight = weight
        self.linear.out_features, self.linear.in_features = weight.shape

    def forward(self, x: Tensor) -> Tensor:
        """sigmoid(linear(layer_norm(x)))."""
        return torch.sigmoid(self.linear(functional.layer_norm(x, (self.linear.in_features,))))


@dataclass(frozen=True)
class CellTimes:
    """Seconds on the GPU by side, seconds of the host by side, and the products that the tuned layer runs in low precision."""

    gpu: dict[str, float]
    host: dict[str, float]
    low: str
    tuning: float

    def speed(self, side: str, over: str = CELL_PLAIN) -> float:
        """How many times as quick a side is."""
        return self.gpu[over] / self.gpu[side]


def time_cell(
    cell: tuple[int, int, int],
    recipe: str = "rowwise",
    device: str = "cuda",
    *,
    compiled: bool = False,
    launches: str = "graph",
    seed: int = 0,
) -> CellTimes:
    """The times of a cell (rows, inputs, outputs). compiled: all sides by torch.compile. launches: see `ao_lab.tune`."""
    from ao_lab import convert_for_training_, tune

    m, k, n = cell
    draw = {"generator": torch.Generator(device).manual_seed(seed), "device": device, "dtype": torch.bfloat16}
    x, g = torch.randn(m, k, **draw).requires_grad_(), torch.randn(m, n, **draw)
    weight = nn.Parameter(torch.randn(n, k, **draw) * k**-0.5)
    sides = {name: NormLinearSigmoid(weight) for name in (CELL_PLAIN, CELL_FORCED, CELL_TUNED)}
    for name in (CELL_FORCED, CELL_TUNED):
        convert_for_training_(sides[name], recipe)
    choices_for(x.device).clear()
    started = time.perf_counter()
    made = tune(sides[CELL_TUNED], lambda model: (model(x) * g).sum(), launches=launches, save_choices=False)
    tuning = time.perf_counter() - started
    low = next(choice.kernel for choice in made.choices if choice.problem.direction == "training")
    steps = {name: _step(module, x, g, name, compiled) for name, module in sides.items()}
    for step in steps.values():
        step()
        with compiled_runs(compiled):
            step()
    found = _timed(steps, x.device)
    choices_for(x.device).clear()
    release()
    return CellTimes(*found, low, tuning)


def _step(module: nn.Module, x: Tensor, g: Tensor, name: str, compiled: bool) -> Callable[[], object]:
    """A forward and a backward; the forced recipe follows no choice."""
    run = torch.compile(module, dynamic=False) if compiled else module
    weight = module.linear.weight

    def step() -> object:
        return torch.autograd.grad(run(x), (x, weight), g)

    def forced() -> object:
        with default_choices():
            return step()

    return forced if name == CELL_FORCED else step


def _timed(
    steps: dict[str, Callable[[], object]], device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Medians on the GPU, and of the host, in rounds that begin with another side each time."""
    host = {name: host_seconds(step, device) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    names, rounds, started = list(steps), 0, time.perf_counter()
    while rounds < FEWEST or (time.perf_counter() - started < SECONDS and rounds < MOST):
        for name in names[rounds % 3 :] + names[: rounds % 3]:
            times[name].append(reading(steps[name], device, host[name]))
        rounds += 1
    return {name: statistics.median(one) for name, one in times.items()}, host


def grid_measure(device: str, seed: int, cell: Cell, launches: str = "graph") -> dict[Method, Values]:
    """Values of bfloat16, the forced recipe and the tuned one, timed in turns; a status where the cell fails. launches: what
    is tuned for."""
    m, k, n = cell
    if 2 * (4 * m * k + 4 * m * n + 6 * n * k) > MEMORY:
        return dict.fromkeys(SIDES, status("not run: it does not fit the memory"))
    times: list[CellTimes] = []

    def timed() -> Values:
        times.append(time_cell(cell, RECIPE, device, launches=launches, seed=seed))
        return {}

    went = attempt(timed)
    return {
        method: {**(values_of(times[0], side) if times else {}), **went} for method, side in SIDES.items()
    }


def values_of(times: CellTimes, side: str) -> Values:
    """A side's times in ms, and its speed over bfloat16."""
    eager = {name: max(times.gpu[name], times.host[name]) for name in times.gpu}
    return {
        "time of kernels": (times.gpu[side] * 1e3, "ms"),
        "time": (eager[side] * 1e3, "ms"),
        "speed over bfloat16, kernels": (times.speed(side), "ratio"),
        "speed over bfloat16": (eager[CELL_PLAIN] / eager[side], "ratio"),
    }


def setting_of(cell: Cell) -> str:
    """The setting of a cell's rows, as the published grid names it."""
    m, k, n = cell
    return f"M={m} K={k} N={n}"
