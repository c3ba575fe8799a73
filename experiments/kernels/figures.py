"""Figures of the kernels: every kernel by operation, and the roofline.

The roofline has on the left one line per kernel: the fraction of the copy rate at either large shape, its target as a tick, and
the fastest baseline, at the fraction of its time. On the right is the rate reached over the bytes moved, under the ceiling of
copies of the same run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.kernels.operations import LARGE, SMALL
from experiments.kernels.results import CaseResult
from experiments.report.plots import MARKERS, SERIES, SMALLEST, STYLE, boxes, separate, set_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MISSED = "#cc0000"
BASELINE = "#888888"
#: The fraction under which the figure of all operations names a dot.
LOW = 0.8
LINE_HEIGHT = 0.19
ROOF_HEIGHT = 5.0


def operation(line: CaseResult) -> str:
    """The operation of a case: the first part of its name."""
    return line.case.split(".")[0]


#: The width of the figure by operation on a phone, in inches.
NARROW = 4.4


def by_operation(lines: Sequence[CaseResult], width: float = 8.6) -> Figure:
    """One line per operation, one marker per kernel at either large shape: the fraction of the copy rate. width: in inches."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line.shape in LARGE and "fraction" in line.values]
    names = list(dict.fromkeys(operation(line) for line in shown))
    places: dict[tuple[str, str], float] = {}
    with mpl.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(width, 1.2 + 0.34 * max(len(names), 4)))
        for position, shape in enumerate(LARGE):
            mine = [line for line in shown if line.shape == shape]
            heights = {line.case: 0.12 - 0.24 * position - names.index(operation(line)) for line in mine}
            for missed in (False, True):
                some = [line for line in mine if line.below == missed]
                color, label = (MISSED, None) if missed else (SERIES[position], shape)
                scatter(axis, some, heights, color, MARKERS[position], label)
            draw_targets(axis, mine, heights, position == 0)
            places |= {(line.case, shape): heights[line.case] for line in mine}
        notes = name_low(axis, shown, places)
        axis.axvline(1, color="#444444", linewidth=0.9)
        axis.set_yticks([-height for height in range(len(names))], names)
        axis.set_xlim(left=0)
        axis.set_xlabel("memory-bandwidth utilisation")
        if names:
            axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=1 if width <= NARROW else 3)
        figure.tight_layout()
        dots = [(line.values["fraction"], places[line.case, line.shape]) for line in shown]
        separate(notes, boxes(axis, dots))
    pyplot.close(figure)
    return figure


def name_low(axis: Axes, lines: Sequence[CaseResult], places: dict[tuple[str, str], float]) -> list[Any]:
    """The names of cases whose fraction is low, each once, beside its lowest dot."""
    lowest: dict[str, CaseResult] = {}
    for line in sorted(lines, key=lambda one: one.values["fraction"], reverse=True):
        if line.values["fraction"] < LOW:
            lowest[line.case] = line
    return [
        axis.annotate(
            case.partition(".")[2], (line.values["fraction"], places[case, line.shape]), (-5, -2),
            textcoords="offset points", ha="right", fontsize=SMALLEST,
        )
        for case, line in reversed(lowest.items())
    ]  # fmt: skip


def roofline(lines: Sequence[CaseResult]) -> Figure:
    """Both panels, from the lines of one run. What was not measured has its name and no dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line.shape != SMALL]
    names = list(dict.fromkeys(line.case for line in shown))
    height = 1.6 + LINE_HEIGHT * max(len(names), 30)
    with mpl.rc_context(STYLE):
        figure = pyplot.figure(figsize=(12.4, height))
        # The roof is as high as it needs to be, however many kernels there are.
        grid = figure.add_gridspec(
            2, 2, width_ratios=(3, 2), height_ratios=(ROOF_HEIGHT, height - ROOF_HEIGHT)
        )
        draw_fractions(figure.add_subplot(grid[:, 0]), shown, names)
        draw_roof(figure.add_subplot(grid[0, 1]), shown)
        figure.tight_layout()
    pyplot.close(figure)
    return figure


def draw_fractions(axis: Axes, lines: Sequence[CaseResult], names: Sequence[str]) -> None:
    """Fractions of the copy rate, targets and fastest baselines, a line per kernel."""
    bad = next((line.shape for line in lines if line.below and "fraction" in line.values), None)
    for position, shape in enumerate(shapes_of(lines)):
        mine = [line for line in lines if line.shape == shape]
        heights = {line.case: -names.index(line.case) - 0.16 * position for line in mine}
        for missed in (False, True):
            dots = [line for line in mine if "fraction" in line.values and line.below == missed]
            label = ("below a target" if shape == bad else None) if missed else shape
            scatter(
                axis, dots, heights, MISSED if missed else SERIES[position % 5], MARKERS[position % 5], label
            )
        draw_baselines(axis, mine, heights, position == 0)
        draw_targets(axis, mine, heights, position == 0)
    axis.axvline(1, color="#888888", linewidth=0.8)
    axis.set_yticks([-height for height in range(len(names))], names, fontsize=7.5)
    axis.set_ylim(-len(names) + 0.3, 0.7)
    axis.set_xlim(left=0)
    axis.set_xlabel("memory-bandwidth utilisation (fewest bytes, over a copy)")
    axis.set_title("Utilisation by kernel", loc="left", pad=34)
    if names:
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=6, fontsize=7.5)


def scatter(
    axis: Axes,
    lines: Sequence[CaseResult],
    heights: dict[str, float],
    color: str,
    marker: str,
    label: str | None,
) -> None:
    """Dots of some lines; nothing where there are none, so that the legend stays true."""
    if lines:
        x = [line.values["fraction"] for line in lines]
        y = [heights[line.case] for line in lines]
        drawn = axis.scatter(x, y, s=18, color=color, marker=marker, label=label, alpha=0.85)
        set_titles(
            axis.figure, drawn, [f"{one.case}, {one.shape}: {one.values['fraction']:.3f}" for one in lines]
        )


def draw_baselines(
    axis: Axes, lines: Sequence[CaseResult], heights: dict[str, float], labelled: bool
) -> None:
    """The fastest baseline's fraction: ours, divided by the ratio of the times."""
    best = [(line, line.best_baseline) for line in lines if "fraction" in line.values]
    drawn = [(line, one.baseline, one.ratio) for line, one in best if one is not None and one.ratio]
    x = [line.values["fraction"] / ratio for line, _, ratio in drawn]
    y = [heights[line.case] for line, _, _ in drawn]
    label = "fastest baseline" if labelled else None
    markers = axis.scatter(x, y, s=18, color=BASELINE, marker="x", linewidths=1, label=label)
    if drawn:
        titles = [
            f"{line.case}, {line.shape}: {name} takes {ratio:.2f} times as long"
            for line, name, ratio in drawn
        ]
        set_titles(axis.figure, markers, titles)


def draw_targets(axis: Axes, lines: Sequence[CaseResult], heights: dict[str, float], labelled: bool) -> None:
    """The target of the fraction as an upright tick, also where nothing was measured."""
    targets = [
        (target.limit, heights[line.case])
        for line in lines
        for target in line.targets
        if target.name == "fraction"
    ]
    x, y = zip(*targets, strict=True) if targets else ((), ())
    axis.scatter(x, y, s=45, color="black", marker="|", linewidths=1.2, label="target" if labelled else None)


def draw_roof(axis: Axes, lines: Sequence[CaseResult]) -> None:
    """Rates over bytes moved, and the copies' rates as the roof."""
    measured = [line for line in lines if "rate" in line.values]
    for position, shape in enumerate(shapes_of(measured)):
        for missed in (False, True):
            mine = [line for line in measured if line.shape == shape and line.below == missed]
            points(axis, mine, MISSED if missed else SERIES[position % 5], MARKERS[position % 5], shape)
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
        axis.legend(loc="lower right", fontsize=7.5)


def points(axis: Axes, lines: Sequence[CaseResult], color: str, marker: str, shape: str) -> None:
    """Dots of the roofline; what lies below a target is red on the left."""
    x = [line.values["bytes moved"] / 1e9 for line in lines]
    y = [line.values["rate"] for line in lines]
    label = None if color == MISSED or not lines else shape
    if lines:
        drawn = axis.scatter(x, y, s=18, color=color, marker=marker, alpha=0.8, label=label)
        set_titles(
            axis.figure, drawn, [f"{one.case}, {one.shape}: {one.values['rate']:.2f} TB/s" for one in lines]
        )


def roof_of(lines: Sequence[CaseResult]) -> list[tuple[float, float]]:
    """(GB that a copy moves, its rate): the median of the copies of each size, from the smallest up."""
    import numpy as np

    found: dict[float, list[float]] = {}
    for line in lines:
        found.setdefault(2 * line.values["bytes read"] / 1e9, []).append(line.values["copy rate"])
    return [(size, float(np.median(rates))) for size, rates in sorted(found.items())]


def shapes_of(lines: Sequence[CaseResult]) -> list[str]:
    """Shapes that occur, the two large ones first."""
    found: Any = dict.fromkeys(line.shape for line in lines)
    return [shape for shape in LARGE if shape in found] + [shape for shape in found if shape not in LARGE]
