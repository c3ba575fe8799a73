"""The roofline picture: every kernel against its floor.

Left, one line per kernel: the fraction of the copy rate at either large shape, its bar as a tick, and the best peer, at the
fraction that its time would be. Right, the rate that was reached over the bytes that were moved, under the ceiling of
copies of the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.kernels.cases.case import LARGE, SMALL
from experiments.kernels.report.lines import Line
from experiments.report.plots import MARKERS, SERIES, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSED = "#cc0000"
PEER = "#888888"
LINE_HEIGHT = 0.19
ROOF_HEIGHT = 5.0


def roofline(lines: Sequence[Line]) -> Figure:
    """Both panels, from the lines of one run. What was not measured keeps its name and has no dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line.shape != SMALL]
    names = list(dict.fromkeys(line.case for line in shown))
    height = 1.6 + LINE_HEIGHT * max(len(names), 30)
    with mpl.rc_context(STYLE):
        figure = pyplot.figure(figsize=(13, height))
        # The roof is as high as it needs to be, however many kernels there are.
        grid = figure.add_gridspec(
            2, 2, width_ratios=(3, 2), height_ratios=(ROOF_HEIGHT, height - ROOF_HEIGHT)
        )
        draw_fractions(figure.add_subplot(grid[:, 0]), shown, names)
        draw_roof(figure.add_subplot(grid[0, 1]), shown)
        figure.tight_layout()
    pyplot.close(figure)
    return figure


def draw_fractions(axis: Axes, lines: Sequence[Line], names: Sequence[str]) -> None:
    """Fractions of the copy rate, bars and best peers, a line per kernel."""
    bad = next((line.shape for line in lines if line.missed and "fraction" in line.values), None)
    for number, shape in enumerate(shapes_of(lines)):
        mine = [line for line in lines if line.shape == shape]
        places = {line.case: -names.index(line.case) - 0.16 * number for line in mine}
        for missed in (False, True):
            dots = [line for line in mine if "fraction" in line.values and bool(line.missed) == missed]
            label = ("below a bar" if shape == bad else None) if missed else shape
            scatter(axis, dots, places, MISSED if missed else SERIES[number % 5], MARKERS[number % 5], label)
        draw_peers(axis, mine, places, number == 0)
        draw_bars(axis, mine, places, number == 0)
    axis.axvline(1, color="#888888", linewidth=0.8)
    axis.set_yticks([-place for place in range(len(names))], names, fontsize=7.5)
    axis.set_ylim(-len(names) + 0.3, 0.7)
    axis.set_xlim(left=0)
    axis.set_xlabel("fraction of the copy rate on the fewest bytes")
    axis.set_title("Kernels against their floors", loc="left", pad=22)
    if names:
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=6, fontsize=7)


def scatter(
    axis: Axes, lines: Sequence[Line], places: dict[str, float], color: str, marker: str, label: str | None
) -> None:
    """Dots of some lines; nothing where there are none, so that the legend stays true."""
    if lines:
        x = [line.values["fraction"] for line in lines]
        axis.scatter(x, [places[line.case] for line in lines], s=18, color=color, marker=marker, label=label)


def draw_peers(axis: Axes, lines: Sequence[Line], places: dict[str, float], labelled: bool) -> None:
    """The best peer's fraction: ours, divided by the ratio of the times."""
    best = [(line, line.best_peer) for line in lines if "fraction" in line.values]
    drawn = [(line, peer.ratio) for line, peer in best if peer is not None and peer.ratio]
    x = [line.values["fraction"] / ratio for line, ratio in drawn]
    y = [places[line.case] for line, _ in drawn]
    axis.scatter(x, y, s=18, color=PEER, marker="x", linewidths=1, label="best peer" if labelled else None)


def draw_bars(axis: Axes, lines: Sequence[Line], places: dict[str, float], labelled: bool) -> None:
    """The bar on the fraction as an upright tick, also where nothing was measured."""
    asked = [
        (bar.value, places[line.case]) for line in lines for bar in line.bars if bar.metric == "fraction"
    ]
    x, y = zip(*asked, strict=True) if asked else ((), ())
    axis.scatter(x, y, s=45, color="black", marker="|", linewidths=1.2, label="bar" if labelled else None)


def draw_roof(axis: Axes, lines: Sequence[Line]) -> None:
    """Rates over bytes moved, and the copies' rates as the roof."""
    measured = [line for line in lines if "rate" in line.values]
    for number, shape in enumerate(shapes_of(measured)):
        for missed in (False, True):
            mine = [line for line in measured if line.shape == shape and bool(line.missed) == missed]
            points(axis, mine, MISSED if missed else SERIES[number % 5], MARKERS[number % 5], shape)
    roof = roof_of(measured)
    axis.plot(
        [size for size, _ in roof], [rate for _, rate in roof], color="black", linewidth=1.2, label="copy"
    )
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("bytes moved (GB)")
    axis.set_ylabel("rate reached (TB/s)")
    axis.set_title("Roofline", loc="left")
    if measured:
        axis.legend(loc="lower right", fontsize=7)


def points(axis: Axes, lines: Sequence[Line], color: str, marker: str, shape: str) -> None:
    """Dots of the roofline; what lies below a bar is named on the left."""
    x = [line.values["bytes moved"] / 1e9 for line in lines]
    y = [line.values["rate"] for line in lines]
    label = None if color == MISSED or not lines else shape
    axis.scatter(x, y, s=18, color=color, marker=marker, alpha=0.8, label=label)


def roof_of(lines: Sequence[Line]) -> list[tuple[float, float]]:
    """(GB that a copy moves, its rate): the median of the copies of each size, from the smallest up."""
    import numpy as np

    found: dict[float, list[float]] = {}
    for line in lines:
        found.setdefault(2 * line.values["bytes read"] / 1e9, []).append(line.values["copy rate"])
    return [(size, float(np.median(rates))) for size, rates in sorted(found.items())]


def shapes_of(lines: Sequence[Line]) -> list[str]:
    """Shapes that occur, the two large ones first."""
    found: Any = dict.fromkeys(line.shape for line in lines)
    return [shape for shape in LARGE if shape in found] + [shape for shape in found if shape not in LARGE]
