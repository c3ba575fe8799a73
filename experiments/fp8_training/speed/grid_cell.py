"""One cell of the grid of LayerNorm, linear layer and sigmoid: bfloat16, a recipe forced, and what `ao_lab.tune` left of it.

LayerNorm has no parameters, the linear layer no bias. Times are of forward and backward on the GPU while the host is ahead of
it, so launches do not count, as in the published grid (sums of kernels' times there); what the host takes is beside them. The
three are timed in turns, operands come from memory. Shared by all: the input, the weight, the output's gradient.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.gemm.choices import choices_for, default_choices
from ao_lab.tuning.measure import host_seconds, reading, release
from experiments.harness.compiled import compiled_runs

PLAIN, FORCED, TUNED = "bfloat16", "forced", "tuned"
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

    def speed(self, side: str, over: str = PLAIN) -> float:
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
    sides = {name: NormLinearSigmoid(weight) for name in (PLAIN, FORCED, TUNED)}
    for name in (FORCED, TUNED):
        convert_for_training_(sides[name], recipe)
    choices_for(x.device).clear()
    started = time.perf_counter()
    made = tune(sides[TUNED], lambda model: (model(x) * g).sum(), launches=launches, save_choices=False)
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

    return forced if name == FORCED else step


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


__all__ = ["FORCED", "PLAIN", "TUNED", "CellTimes", "NormLinearSigmoid", "time_cell"]
