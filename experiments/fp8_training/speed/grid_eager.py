"""The cells of the grid whose eager steps wait for the host, tuned for eager mode: a recipe's speed over bfloat16's there.

`grid` tunes for CUDA graphs, where launches cost nothing, and its times of kernels are what the published grid has. In eager
mode a layer takes the larger of the GPU's time and the host's, and `ao_lab.tune` chooses by that by default.
"""

from __future__ import annotations

from math import prod

from experiments.fp8_training.methods import PLAIN, Method
from experiments.fp8_training.speed import grid, grid_cell
from experiments.harness.outcome import Values, attempt

KIND = "grid_eager"
#: Cells of at most so many multiplications a product: others take the GPU longer than the host (1.2 ms in bfloat16, H200).
MOST = 2**37
CELLS = tuple(cell for cell in grid.CELLS if prod(cell) <= MOST)
SIDES = (PLAIN, grid.FORCED, grid.TUNED)


def measure(device: str, seed: int, cell: grid.Cell) -> dict[Method, Values]:
    """Values of bfloat16, the forced recipe and the one tuned for eager mode, timed in turns; a status where the cell fails."""
    times: list[grid_cell.CellTimes] = []

    def timed() -> Values:
        times.append(grid_cell.time_cell(cell, grid.RECIPE, device, launches="eager", seed=seed))
        return {}

    went = attempt(timed)
    return {
        method: {**(grid.values_of(times[0], grid.SIDES[method]) if times else {}), **went}
        for method in SIDES
    }


__all__ = ["CELLS", "KIND", "SIDES", "measure"]
