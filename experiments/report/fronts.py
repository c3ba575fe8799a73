"""Scatter plots with lines of the best points and labels that do not cover each other (style: `experiments.report.plots`).

A front is the line of the points that none is better than: of all that are no larger (or no slower) the best. Labels are placed
when the figure has its final size: each takes the first of a few places around its point where it covers no label and no point.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from experiments.report.plots import FAR, Point, draw_points, family_legend, leader, subplots

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

#: Places of a label around its point: offset in points of type, horizontal and vertical alignment; the best first.
PLACES = (
    (5, 0, "left", "center"), (-5, 0, "right", "center"), (0, 5, "center", "bottom"), (0, -5, "center", "top"),
    (5, 7, "left", "bottom"), (5, -7, "left", "top"), (-5, 7, "right", "bottom"), (-5, -7, "right", "top"),
    (12, 15, "left", "bottom"), (12, -15, "left", "top"), (-12, 15, "right", "bottom"), (-12, -15, "right", "top"),
    (20, 25, "left", "bottom"), (20, -25, "left", "top"), (-20, 25, "right", "bottom"), (-20, -25, "right", "top"),
)  # fmt: skip
#: Size of labels, and half the height of a point, in points of type.
TYPE, DOT = 7.0, 2.5
#: The width of a panel on a phone, and the least height of any, in inches.
NARROW, LOWEST = 3.55, 3.4
#: Names that the legend has beside each other for each inch of width, and the part of a panel's height that a line of it takes.
WORDS, LINE = 0.7, 0.04
#: What a label costs that leaves its panel, and one that the edge of the figure cuts off, in others that it would cover.
OUTSIDE, CUT = 8, 30
#: Slant of words over places of the axis in degrees, their height in points of type, and the letters of a title an inch.
SLANT, TOP, LETTERS = 45, 62, 9.5
#: How far apart the places of a line are that labels do not cover, in pixels.
STRIDE = 4.0


@dataclass(frozen=True)
class Panel:
    """Points, lines by name with the colour and the points that each joins, and words at the top over places of the axis."""

    points: Sequence[Point]
    lines: Mapping[str, tuple[str, Sequence[Point]]]
    tops: Mapping[str, float]


def front(points: Sequence[Point], *, most: bool = False) -> list[Point]:
    """The points that none is better than, from left to right: the least y (or the most) of all up to their x."""
    found: list[Point] = []
    sign = -1 if most else 1
    for point in sorted(points, key=lambda one: (one.x, sign * one.y)):
        if not found or sign * point.y < sign * found[-1].y:
            found.append(point)
    return found


def front_panels(
    panels: Mapping[str, Panel],
    xlabel: str,
    ylabel: str,
    colors: Mapping[str, str],
    *,
    xlog: bool = False,
    ylog: bool = False,
    symlog: float | None = None,
    columns: int = 2,
    width: float = 6.4,
) -> Figure:
    """A panel each on common axes: points by family, lines with their names, labels of points that have one.

    symlog: the value up to which the vertical axis is linear, and above which it is logarithmic where a point lies there.
    columns: panels of a row, at most. width: of a panel, in inches.
    """
    columns = min(columns, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = width * columns, max(LOWEST, 0.72 * width) * rows
    figure, axes = subplots(rows, columns, size, sharex=True, sharey=True)
    for axis, (title, panel) in zip(axes, panels.items(), strict=False):
        draw_points(figure, axis, panel.points, colors)
        for color, joined in panel.lines.values():
            axis.plot(
                [one.x for one in joined],
                [one.y for one in joined],
                color=color,
                linewidth=1.1,
                alpha=0.6,
                zorder=1,
            )
        wrapped = textwrap.fill(title, int(LETTERS * width))
        axis.set_title(wrapped, loc="left", pad=6 + TOP * bool(panel.tops))
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.tick_params(labelbottom=True, labelleft=True)
    set_scales(axes[0], xlog, ylog, None if ylog else symlog)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    families = {point.family for panel in panels.values() for point in panel.points}
    most = int(WORDS * width * columns)
    family_legend(figure, families, colors, most)
    figure.tight_layout(
        rect=(0, 0, 1, 0.97 - 0.02 / rows - LINE * (math.ceil(len(families) / most) - 1) / rows)
    )
    for axis, panel in zip(axes, panels.values(), strict=False):
        write_tops(axis, panel.tops)
        place_labels(figure, axis, panel, colors)
    return figure


def set_scales(axis: Axes, xlog: bool, ylog: bool, symlog: float | None = None) -> None:
    """Logarithmic scales with plain numbers, and room for labels at both sides; `symlog`: as of `front_panels`."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for dimension, log in ((axis.xaxis, xlog), (axis.yaxis, ylog)):
        if log:
            (axis.set_xscale if dimension is axis.xaxis else axis.set_yscale)("log")
            low, high = dimension.get_data_interval()
            subs = (1.0, 2.0, 3.0, 5.0) if high < 20 * low else (1.0, 2.0, 5.0)
            dimension.set_major_locator(LogLocator(base=10, subs=subs))
            dimension.set_major_formatter(StrMethodFormatter("{x:g}"))
            dimension.set_minor_formatter(NullFormatter())
    if symlog is not None and max(map(abs, axis.yaxis.get_data_interval()), default=0.0) > symlog:
        axis.set_yscale("symlog", linthresh=symlog)
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.margins(x=0.2, y=0.1)


def write_tops(axis: Axes, tops: Mapping[str, float]) -> None:
    """Words over places of the horizontal axis, slanted; those of nearly the same place are one label."""
    groups: list[tuple[float, list[str]]] = []
    # Slanted lines of text cover each other where their places are nearer than this.
    apart = 1.1 * TYPE * axis.get_figure(root=True).dpi / 72 / math.sin(math.radians(SLANT))
    for name, x in sorted(tops.items(), key=lambda one: one[1]):
        if groups and pixels(axis, x) - pixels(axis, groups[-1][0]) < apart:
            groups[-1][1].append(name)
        else:
            groups.append((x, [name]))
    for x, names in groups:
        axis.annotate(
            ", ".join(names), (x, 1.0), xycoords=axis.get_xaxis_transform(), xytext=(0, 3), textcoords="offset points",
            rotation=SLANT, rotation_mode="anchor", ha="left", va="bottom", fontsize=TYPE, color="#444444",
            annotation_clip=False,
        )  # fmt: skip
        axis.axvline(x, color="#cccccc", linewidth=0.6, zorder=0)


def pixels(axis: Axes, x: float) -> float:
    """Where a value of the horizontal axis lies, in pixels."""
    return float(axis.transData.transform((x, axis.get_ylim()[0]))[0])


def place_labels(figure: Figure, axis: Axes, panel: Panel, colors: Mapping[str, str]) -> None:
    """Names of lines at their ends, then labels of points, each where it covers nothing that stands there already."""
    dots = [dot_of(figure, axis, point) for point in panel.points]
    strokes = [box for _, joined in panel.lines.values() for box in along(axis, joined)]
    taken: list[Bbox] = []
    ends = [
        (name, joined[-1], color, "bold") for name, (color, joined) in panel.lines.items() if joined and name
    ]
    labels = [(one.label, one, colors[one.family], "normal") for one in panel.points if one.label]
    for text, point, color, weight in [*ends, *labels]:
        note = axis.annotate(
            text, (point.x, point.y), xytext=(0, 0), textcoords="offset points", fontsize=TYPE, color=color, fontweight=weight,
            annotation_clip=False,
        )  # fmt: skip
        own = dot_of(figure, axis, point)
        place(axis, note, taken, [*strokes, *(one for one in dots if not same(one, own))])
        taken.append(note.get_window_extent())


def place(axis: Axes, note: Annotation, taken: Sequence[Bbox], drawn: Sequence[Bbox]) -> None:
    """Move a label to the first of its places that is free, or else to the one that covers least; a far one gets a line."""
    costs = []
    for number, (x, y, across, along) in enumerate(PLACES):
        move(note, x, y, across, along)
        box = note.get_window_extent()
        outside = (
            box.x0 < axis.bbox.x0 or box.x1 > axis.bbox.x1 or box.y0 < axis.bbox.y0 or box.y1 > axis.bbox.y1
        )
        hidden = (
            3 * sum(box.overlaps(one) for one in taken)
            + sum(box.overlaps(one) for one in drawn)
            + OUTSIDE * outside
            + CUT * (box.x1 > axis.get_figure(root=True).bbox.x1)
        )
        costs.append((hidden, number))
        if not hidden:
            break
    _, number = min(costs)
    move(note, *PLACES[number])
    if abs(PLACES[number][1]) > FAR:
        leader(note)


def move(note: Annotation, x: float, y: float, across: str, along: str) -> None:
    """Set a label's offset and alignment."""
    note.set_position((x, y))
    note.set_ha(across)
    note.set_va(along)


def dot_of(figure: Figure, axis: Axes, point: Point) -> Bbox:
    """The box of a point, in pixels."""
    from matplotlib.transforms import Bbox

    x, y = axis.transData.transform((point.x, point.y))
    half = DOT * figure.dpi / 72
    return Bbox([[x - half, y - half], [x + half, y + half]])


def along(axis: Axes, joined: Sequence[Point]) -> list[Bbox]:
    """Small boxes along a line, in pixels."""
    from matplotlib.transforms import Bbox

    corners = [axis.transData.transform((one.x, one.y)) for one in joined]
    found = []
    for start, end in pairwise(corners):
        count = max(1, math.ceil(float(math.dist(start, end)) / STRIDE))
        for number in range(count + 1):
            x, y = start + (end - start) * number / count
            found.append(Bbox([[x - 0.5, y - 0.5], [x + 0.5, y + 0.5]]))
    return found


def same(one: Bbox, other: Bbox) -> bool:
    """Whether two boxes are of one point."""
    return bool(abs(one.x0 - other.x0) < 1e-6 and abs(one.y0 - other.y0) < 1e-6)
