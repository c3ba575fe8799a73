"""A heat map of ratios in the style of `experiments.report.plots`: a colour each side of 1, the value in every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.report.plots import SMALLEST, measured_lines, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Ratios at the ends of the colours, and their inverse: what is beyond has the same colour. Neighbours that differ by a
#: hundredth look alike.
END = 4.0
#: From which part of the way to an end a cell is so dark that its value is written in white.
DARK = 0.55


@dataclass(frozen=True)
class Ratios:
    """What a map shows: a ratio, or None, of each row in each column. label: what the ratios are; xlabel: what the columns are
    of; end: the ratio at the end of the colours."""

    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    label: str
    xlabel: str = ""
    end: float = END

    def measured(self) -> Ratios:
        """Without lines that have no value."""
        rows, values = measured_lines(self.rows, self.values)
        return replace(self, rows=rows, values=values)

    def part(self, start: int, last: int) -> Ratios:
        """Those columns, empty ones behind the last."""
        missing = last - len(self.columns)
        values = [[*line[start:last], *[None] * missing] for line in self.values]
        return replace(self, columns=[*self.columns[start:last], *[""] * missing], values=values)


def ratio_map(ratios: Ratios) -> Figure:
    """A grid of colours, purple above 1 and orange below, as colour-blind readers can tell apart; missing ones stay white,
    lines without any value are left out."""
    shown, end = ratios.measured(), ratios.end
    height = max(2.4, 1.2 + 0.24 * len(shown.rows)) + LETTER * long_names(shown.columns)
    figure, (axis,) = subplots(1, 1, (2.6 + 0.46 * len(shown.columns), height))
    bar = figure.colorbar(draw_ratios(axis, shown), ax=axis, pad=0.02)
    ticks = (1 / end, 1 / math.sqrt(end), 1.0, math.sqrt(end), end)
    bar.set_ticks([math.log2(tick) for tick in ticks], labels=[f"{tick:g}" for tick in ticks])
    bar.set_label(shown.label)
    return figure


def narrow_ratio_map(ratios: Ratios) -> Figure:
    """The same for a phone: grids of so many columns below each other, without the scale of colours, which the values tell."""
    shown, columns = ratios.measured(), ratios.columns
    grids = math.ceil(len(columns) / NARROW_COLUMNS)
    width = math.ceil(len(columns) / max(1, grids))
    starts = range(0, len(columns), width)
    tall = 0.05 + 0.15 * max((name.count("\n") + 1 for name in shown.rows), default=1)
    size = (3.6, len(starts) * (0.75 + tall * len(shown.rows) + LETTER * long_names(columns)))
    figure, axes = subplots(len(starts), 1, size)
    for axis, start in zip(axes, starts, strict=True):
        draw_ratios(axis, shown.part(start, start + width))
    axes[0].set_title(shown.label, loc="left")
    figure.tight_layout()
    return figure


#: Columns of a grid on a phone.
NARROW_COLUMNS = 7


def draw_ratios(axis: Axes, ratios: Ratios) -> Any:
    """Colours and values of a grid of ratios; returns the image, for its scale."""
    import numpy as np

    columns, reach = ratios.columns, math.log2(ratios.end)
    powers = np.array([[power_of(value) for value in line] for line in ratios.values], dtype=float)
    image = axis.imshow(powers, aspect="auto", cmap="PuOr", interpolation="nearest", vmin=-reach, vmax=reach)
    write_values(axis, ratios.values, DARK * reach)
    slanted = {"rotation": SLANT, "ha": "right", "rotation_mode": "anchor"} if long_names(columns) else {}
    axis.set_xticks(range(len(columns)), columns, fontsize=7.5, **slanted)
    axis.set_yticks(range(len(ratios.rows)), ratios.rows, fontsize=7.5)
    axis.set_xlabel(ratios.xlabel)
    axis.grid(False)
    return image


#: Letters of a column's name that stand beside those of the next; degrees of longer ones, and inches that a letter adds then.
BESIDE, SLANT, LETTER = 7, 50, 0.05


def long_names(columns: Sequence[str]) -> int:
    """Letters of the longest name of columns that do not fit beside each other; 0 where all do."""
    longest = max((len(one) for name in columns for one in name.splitlines()), default=0)
    return longest if longest > BESIDE else 0


def write_values(axis: Axes, values: Sequence[Sequence[float | None]], dark: float) -> None:
    """Each value in its cell, in white where its power of two is further from 0 than `dark`."""
    for place, line in enumerate(values):
        for column, value in enumerate(line):
            if not math.isnan(power := power_of(value)):
                color = "white" if abs(power) > dark else "black"
                axis.text(
                    column, place, f"{value:.2f}", ha="center", va="center", fontsize=SMALLEST, color=color
                )


def power_of(value: float | None) -> float:
    """The power of two that a ratio is; NaN for one that is missing or no positive number."""
    return math.log2(value) if value is not None and 0 < value < math.inf else math.nan
