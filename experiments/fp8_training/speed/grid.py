"""LayerNorm, linear layer, sigmoid, forward and backward, at 36 by 6 shapes: a recipe's speed over bfloat16's.

The module is that of the published grid: LayerNorm without parameters, a linear layer without bias, bfloat16. Both sides run
eagerly here, compiled there. Two times are taken: the GPU's while the host is ahead of it, which like the published sum of the
kernels' times does not see launches, and the larger of it and the host's, which is what an eager step takes. Ours runs with
the recipe forced, and after `ao_lab.tune`.
"""

from __future__ import annotations

from itertools import product

from experiments.fp8_training.methods import OURS, PLAIN, Method
from experiments.fp8_training.speed import grid_cell
from experiments.harness.outcome import Values, attempt, status

KIND = "grid"
#: How tables call the module.
MODULE = "layernorm-linear-sigmoid"
Cell = tuple[int, int, int]
SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
#: Rows, inputs, outputs.
CELLS: tuple[Cell, ...] = tuple(product(SIZES, SIZES, SIZES))
STAND_INS: tuple[Cell, ...] = ((128, 128, 128), (256, 128, 256))
RECIPE = "rowwise"
FORCED, TUNED = Method(library=OURS, recipe=RECIPE), Method(library=OURS, recipe=RECIPE, tuned=True)
SIDES = {PLAIN: grid_cell.PLAIN, FORCED: grid_cell.FORCED, TUNED: grid_cell.TUNED}
#: Bytes beyond which a cell is not tried: operands, gradients, codes and outputs of all sides.
MEMORY = 120e9


def measure(device: str, seed: int, cell: Cell) -> dict[Method, Values]:
    """Values of bfloat16, the forced recipe and the tuned one, timed in turns; a status where the cell fails."""
    m, k, n = cell
    if 2 * (4 * m * k + 4 * m * n + 6 * n * k) > MEMORY:
        return dict.fromkeys(SIDES, status("not run: it does not fit the memory"))
    times: list[grid_cell.CellTimes] = []

    def timed() -> Values:
        times.append(grid_cell.time_cell(cell, RECIPE, device, launches="graph", seed=seed))
        return {}

    went = attempt(timed)
    return {
        method: {**(values_of(times[0], side) if times else {}), **went} for method, side in SIDES.items()
    }


def values_of(times: grid_cell.CellTimes, side: str) -> Values:
    """A side's times in ms, and its speed over bfloat16."""
    eager = {name: max(times.gpu[name], times.host[name]) for name in times.gpu}
    return {
        "time of kernels": (times.gpu[side] * 1e3, "ms"),
        "time": (eager[side] * 1e3, "ms"),
        "speed over bfloat16, kernels": (times.speed(side), "ratio"),
        "speed over bfloat16": (eager[grid_cell.PLAIN] / eager[side], "ratio"),
    }


def setting_of(cell: Cell) -> str:
    """The setting of a cell's rows, as the published grid names it."""
    m, k, n = cell
    return f"M={m} K={k} N={n}"


__all__ = ["CELLS", "FORCED", "KIND", "MODULE", "SIZES", "STAND_INS", "TUNED", "measure", "setting_of"]
