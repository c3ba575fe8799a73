"""Line plots in the style of `experiments.report.plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.report.plots import MARKERS, SERIES, subplots

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curves(
    series: Mapping[str, Sequence[float | None]], xlabel: str, ylabel: str, *, base: float | None = None
) -> Figure:
    """One line per series over 1, 2, ...; missing values leave a gap.

    base: where a horizontal line marks what is compared with. Colours repeat behind the fifth series with another marker and
    a dashed line.
    """
    figure, (axis,) = subplots(1, 1, (7.6, 4.2))
    for number, (name, values) in enumerate(series.items()):
        drawn = [(x, y) for x, y in enumerate(values, 1) if y is not None and math.isfinite(y)]
        if not drawn:
            continue
        x, y = zip(*drawn, strict=True)
        turn = number // len(SERIES)
        axis.plot(
            x,
            y,
            color=SERIES[number % len(SERIES)],
            marker=MARKERS[(number + turn) % len(MARKERS)],
            linestyle="--" if turn else "-",
            markersize=3.5,
            linewidth=1.1,
            label=name,
        )
    if base is not None:
        axis.axhline(base, color="#444444", linewidth=0.9)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    if series:
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, fontsize=7.5)
    return figure


__all__ = ["curves"]
