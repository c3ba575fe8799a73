"""Drawing: four kinds of figure in one style. Takes numbers, returns matplotlib figures; knows nothing of experiments.

Figures are SVG with their text as text and a fixed hash salt, so that the same rows give the same file.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ao_lab",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = {
    "plain": "#000000",
    "FP8": "#0072b2",
    "MX": "#d55e00",
    "NVFP4": "#cc79a7",
    "integer": "#009e73",
    "NF4": "#e69f00",
}
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
MARKERS = ("o", "D", "s", "^", "v")


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot, with its family (colour) and perhaps a label."""

    x: float
    y: float
    family: str
    label: str = ""


def svg(figure: Figure) -> str:
    """A figure as SVG text, without date, doctype or trailing blanks."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    body = text[text.index("<svg") :]
    # Coordinates to a hundredth of a point: half the size, and nothing that an eye can see.
    body = re.sub(r"-?\d+\.\d{3,}", lambda match: f"{float(match.group()):.2f}", body)
    return "\n".join(line.rstrip() for line in body.splitlines()) + "\n"


def scatter_panels(
    panels: Mapping[str, Sequence[Point]],
    xlabel: str,
    ylabel: str,
    *,
    symlog: float | None = None,
    columns: int = 2,
) -> Figure:
    """One scatter plot per panel, on common axes; points with a label carry it.

    symlog: the value up to which the vertical axis is linear, and above which it is logarithmic.
    """
    rows = math.ceil(len(panels) / columns)
    figure, axes = _subplots(rows, columns, (5.4 * columns, 3.8 * rows), sharex=True, sharey=True)
    for axis, (title, points) in zip(axes, panels.items(), strict=False):
        _scatter(axis, points, symlog)
        axis.set_title(title, loc="left")
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.tick_params(labelbottom=True, labelleft=True)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    _family_legend(figure, {point.family for points in panels.values() for point in points})
    figure.tight_layout(rect=(0, 0, 1, 0.97 - 0.02 / rows))
    return figure


def dots(
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    xlabel: str,
    *,
    errors: Mapping[str, Sequence[float | None]] | None = None,
    symlog: float | None = None,
) -> Figure:
    """One line per label, one marker per series, bars of plus and minus one error; missing numbers leave a gap.

    symlog: the value up to which the axis is linear on both sides of zero, and beyond which it is logarithmic.
    """
    figure, (axis,) = _subplots(1, 1, (8.2, 0.7 + 0.175 * len(labels)))
    places = [-place for place in range(len(labels))]
    ends = [0.0]
    for number, (name, values) in enumerate(series.items()):
        spread = (errors or {}).get(name) or [None] * len(values)
        drawn = [
            (value, place, error or 0.0)
            for value, place, error in zip(values, places, spread, strict=True)
            if value is not None and math.isfinite(value)
        ]
        x, y, bars = zip(*drawn, strict=True) if drawn else ((), (), ())
        ends += [end for value, _, error in drawn for end in (value - error, value + error)]
        color, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
        axis.errorbar(
            x,
            y,
            xerr=bars if errors else None,
            fmt=marker,
            color=color,
            markersize=4,
            elinewidth=1,
            label=name,
        )
    axis.set_yticks(places, labels, fontsize=7.5)
    axis.set_ylim(-len(labels) + 0.3, 0.7)
    if symlog is not None:
        axis.set_xscale("symlog", linthresh=symlog)
        axis.axvline(0, color="#888888", linewidth=0.8)
        # Autoscaling a symmetric-log axis reaches far to the side on which there is nothing.
        axis.set_xlim(1.3 * min(-symlog, *ends), 1.3 * max(symlog, *ends))
    axis.set_xlabel(xlabel)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(3, len(series)))
    return figure


def heatmap(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], label: str
) -> Figure:
    """A grid of colours; missing numbers stay white. Infinite ones take the end of the scale."""
    import numpy as np

    grid = np.array(
        [[math.nan if value is None else value for value in line] for line in values], dtype=float
    )
    finite = grid[np.isfinite(grid)]
    figure, (axis,) = _subplots(1, 1, (1.8 + 0.36 * len(columns), 1.6 + 0.175 * len(rows)))
    limits = {"vmin": finite.min(), "vmax": finite.max()} if finite.size else {}
    image = axis.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest", **limits)
    axis.set_xticks(
        range(len(columns)), columns, rotation=60, ha="right", fontsize=7.5, rotation_mode="anchor"
    )
    axis.set_yticks(range(len(rows)), rows, fontsize=7.5)
    axis.grid(False)
    bar = figure.colorbar(image, ax=axis, shrink=min(1.0, 12 / len(rows)), pad=0.02, anchor=(0.0, 1.0))
    bar.set_label(label)
    return figure


def _subplots(
    rows: int, columns: int, size: tuple[float, float], **shared: bool
) -> tuple[Figure, Sequence[Axes]]:
    import matplotlib as mpl

    # Figures are files: no window, whatever the machine.
    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **shared)
    pyplot.close(figure)
    return figure, list(axes.flat)


def _scatter(axis: Axes, points: Sequence[Point], symlog: float | None) -> None:
    for name, color in COLORS.items():
        mine = [point for point in points if point.family == name]
        axis.scatter([p.x for p in mine], [p.y for p in mine], s=16, color=color, alpha=0.75, linewidths=0)
    if symlog is not None:
        axis.set_yscale("symlog", linthresh=symlog)
    for number, point in enumerate(sorted((p for p in points if p.label), key=lambda p: (p.x, p.y))):
        # Labels alternate above and below, so that neighbours do not cover each other.
        above = number % 2 == 0
        axis.annotate(
            point.label,
            (point.x, point.y),
            xytext=(4, 5 if above else -9),
            textcoords="offset points",
            fontsize=7,
            color=COLORS[point.family],
        )


def _family_legend(figure: Figure, families: set[str]) -> None:
    from matplotlib.lines import Line2D

    shown = [name for name in COLORS if name in families]
    handles = [Line2D([], [], marker="o", linestyle="", color=COLORS[name], label=name) for name in shown]
    figure.legend(handles=handles, loc="upper center", ncols=len(shown))
