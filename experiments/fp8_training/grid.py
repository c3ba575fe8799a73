"""LayerNorm, linear layer, sigmoid, forward and backward, at 36 by 6 shapes: a recipe's speed over bfloat16's.

The module is that of the published grid: LayerNorm without parameters, a linear layer without bias, bfloat16. Both sides run
eagerly here, compiled there. Two times are taken: the GPU's while the host is ahead of it, which like the published sum of the
kernels' times does not see launches, and the larger of it and the host's, which is what an eager step takes. Ours runs with
the recipe forced, and after `ao_lab.tune`; the three are timed in turns, operands come from memory. Shared by all: the input,
the weight, the output's gradient.

`grid` tunes for CUDA graphs, where launches cost nothing; `grid_eager` has the cells whose eager steps wait for the host, tuned
for eager mode, in which a layer takes the larger of the GPU's time and the host's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.gemm.choices import choices_for, default_choices
from ao_lab.tuning.measure import host_seconds, reading, release
from experiments.fp8_training.methods import OURS, PLAIN, Method
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Values, attempt, status

KIND, EAGER_KIND = "grid", "grid_eager"
#: How tables call the module.
MODULE = "layernorm-linear-sigmoid"
#: Rows, inputs, outputs.
Cell = tuple[int, int, int]
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
CELLS: tuple[Cell, ...] = tuple(product(SIZES, SIZES, SIZES))
STAND_INS: tuple[Cell, ...] = ((128, 128, 128), (256, 128, 256))
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


def measure(device: str, seed: int, cell: Cell, launches: str = "graph") -> dict[Method, Values]:
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
