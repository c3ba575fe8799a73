"""A heat map of ratios in the style of `experiments.report.plots`: a colour each side of 1, the value in every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from experiments.report.plots import subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Ratios at the ends of the colours, and their inverse: what is beyond has the same colour. Neighbours that differ by a
#: hundredth look alike.
END = 4.0
#: How far from 1, as a power of two, a cell is so dark that its value is written in white.
DARK = 1.1


def ratio_map(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], label: str
) -> Figure:
    """A grid of colours, purple above 1 and orange below, as colour-blind readers can tell apart; missing ones stay white."""
    import numpy as np

    powers = np.array([[power_of(value) for value in line] for line in values], dtype=float)
    figure, (axis,) = subplots(1, 1, (2.6 + 0.46 * len(columns), 1.2 + 0.24 * len(rows)))
    reach = math.log2(END)
    image = axis.imshow(powers, aspect="auto", cmap="PuOr", interpolation="nearest", vmin=-reach, vmax=reach)
    write_values(axis, values)
    axis.set_xticks(range(len(columns)), columns, fontsize=7.5)
    axis.set_yticks(range(len(rows)), rows, fontsize=7.5)
    axis.grid(False)
    bar = figure.colorbar(image, ax=axis, pad=0.02)
    ticks = (1 / END, 0.5, 1.0, 2.0, END)
    bar.set_ticks([math.log2(tick) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
    bar.set_label(label)
    return figure


def write_values(axis: Axes, values: Sequence[Sequence[float | None]]) -> None:
    """Each value in its cell."""
    for place, line in enumerate(values):
        for column, value in enumerate(line):
            if not math.isnan(power := power_of(value)):
                color = "white" if abs(power) > DARK else "black"
                axis.text(column, place, f"{value:.2f}", ha="center", va="center", fontsize=6.5, color=color)


def power_of(value: float | None) -> float:
    """The power of two that a ratio is; NaN for one that is missing or no positive number."""
    return math.log2(value) if value is not None and 0 < value < math.inf else math.nan


__all__ = ["ratio_map"]
