"""Drawing in one style; heat maps of ratios: `ratio_maps` beside it. Takes values, returns figures; knows no experiment.

Figures are SVG with their text as text and a fixed hash salt, so that the same rows give the same file. Every marker has a
`<title>`, which browsers show under the pointer, without a script.
"""

from __future__ import annotations

import html
import io
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard
from weakref import WeakKeyDictionary

from ao_lab.plot.style import COLORS, MARKERS, SERIES, STYLE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


#: Offsets in points and alignments of labels that would else cover others.
SPOTS = (
    (4, 5, "left"), (4, -9, "left"), (-4, 5, "right"), (-4, -9, "right"),
    (4, 13, "left"), (4, -17, "left"), (-4, 13, "right"), (-4, -17, "right"), (6, -2, "left"), (-6, -2, "right"),
    (0, 7, "center"), (0, -12, "center"), (8, 22, "left"), (8, -26, "left"), (-8, 22, "right"), (-8, -26, "right"),
)  # fmt: skip
#: Points above or below its dot from which a label has a line to it.
FAR = 10
#: Colours and markers of series: no two of seven are the same.
DOT_COLORS, DOT_MARKERS = (*SERIES, "#000000", "#56b4e9"), (*MARKERS, "P", "X")
#: Points of the smallest text: nine pixels, where a figure is as wide as a page or narrower.
SMALLEST = 7.0
#: Inches of a figure for a phone.
NARROW = 3.5
#: Titles of the markers of each figure, by the group of the SVG that holds them.
TITLES: WeakKeyDictionary[Figure, dict[str, list[str]]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot: its family (colour), its name under the pointer, perhaps a label beside it, and half of the
    interval of y, which is drawn as a bar."""

    x: float
    y: float
    family: str
    label: str = ""
    name: str = ""
    error: float = 0.0


def set_titles(figure: Figure, artist: Artist, titles: Sequence[str]) -> None:
    """Give each marker of an artist the text that browsers show under the pointer."""
    groups = TITLES.setdefault(figure, {})
    group = f"titled-{len(groups)}"
    groups[group] = list(titles)
    artist.set_gid(group)


#: A number with more digits than a coordinate needs.
LONG = re.compile(r"-?\d+\.\d{2,}")


def svg(figure: Figure) -> str:
    """A figure as SVG text, without date, doctype, comments or indentation; ValueError where titles do not match markers."""
    import matplotlib as mpl

    buffer = io.StringIO()
    plain_ticks(figure)
    with mpl.rc_context(STYLE):
        figure.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    body = text[text.index("<svg") :]
    # Coordinates to a tenth of a point: less than half the size, and nothing that an eye can see. Texts keep their digits.
    body = re.sub(
        r"<[^>]*>", lambda tag: LONG.sub(lambda found: f"{float(found.group()):.1f}", tag.group()), body
    )
    for group, titles in TITLES.get(figure, {}).items():
        body = _titled(body, group, titles)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    lines = (line.strip() for line in body.splitlines())
    return _with_classes("\n".join(line for line in lines if line) + "\n")


def plain_ticks(figure: Figure) -> None:
    """Numbers without powers at logarithmic axes: an exponent would be smaller than all other text."""
    from matplotlib.ticker import LogFormatter, LogFormatterSciNotation, StrMethodFormatter

    for axis in figure.axes:
        for dimension in (axis.xaxis, axis.yaxis):
            if isinstance(dimension.get_major_formatter(), LogFormatterSciNotation):
                dimension.set_major_formatter(StrMethodFormatter("{x:g}"))
            if isinstance(dimension.get_minor_formatter(), LogFormatterSciNotation):
                dimension.set_minor_formatter(LogFormatter(labelOnlyBase=False))


def _titled(body: str, group: str, titles: Sequence[str]) -> str:
    """The markers (`<use/>`) of one group with their titles inside."""
    opening = f'<g id="{group}">'
    start = body.index(opening)
    end = _end_of_group(body, start)
    found = body[start + len(opening) : end]
    if found.count("<use ") != len(titles):
        raise ValueError(
            f"{len(titles)} titles for {found.count('<use ')} markers: some lie outside the axes"
        )
    left = iter(titles)

    def with_title(match: re.Match[str]) -> str:
        return f"<use {match.group(1)}><title>{html.escape(next(left))}</title></use>"

    return body[:start] + "<g>" + re.sub(r"<use ([^>]*?)/>", with_title, found) + body[end:]


def _end_of_group(body: str, start: int) -> int:
    """Where the group that begins at `start` is closed."""
    depth = 0
    for match in _groups(body, start):
        depth += 1 if match.group() == "<g" else -1
        if depth == 0:
            return match.start()
    raise ValueError("a group of the SVG is not closed")


def _groups(body: str, start: int) -> Iterator[re.Match[str]]:
    return re.compile(r"<g(?=[ >])|</g>").finditer(body, start)


def _with_classes(body: str) -> str:
    """Styles that repeat, as classes: a third of the size. A class is named by its style, so figures of one page agree."""
    repeated = {style for style, times in Counter(re.findall(r' style="([^"]*)"', body)).items() if times > 3}
    names = {style: f"s{zlib.crc32(style.encode()):08x}" for style in sorted(repeated)}

    def short(match: re.Match[str]) -> str:
        return f' class="{names[match.group(1)]}"' if match.group(1) in names else match.group()

    rules = "".join(f".{name}{{{style.replace('&quot;', chr(34))}}}" for style, name in names.items())
    body = re.sub(r' style="([^"]*)"', short, body)
    head = body.index(">") + 1
    return f"{body[:head]}<style>{rules}</style>{body[head:]}" if rules else body


def scatter_panels(
    panels: Mapping[str, Sequence[Point]],
    xlabel: str,
    ylabel: str,
    *,
    symlog: float | None = None,
    columns: int = 2,
    width: float = 5.4,
    colors: Mapping[str, str] = COLORS,
) -> Figure:
    """One scatter plot per panel, on common axes; points with a label carry it. width: of a panel, in inches.

    symlog: the value up to which the vertical axis is linear, and above which it is logarithmic where a point lies there.
    colors: of the families that points name, in the legend's order.
    """
    rows = math.ceil(len(panels) / columns)
    if symlog is not None and all(abs(point.y) <= symlog for points in panels.values() for point in points):
        symlog = None
    figure, axes = subplots(rows, columns, (width * columns, 3.8 * rows), sharex=True, sharey=True)
    for axis, (title, points) in zip(axes, panels.items(), strict=False):
        _scatter(figure, axis, points, symlog, colors)
        axis.set_title(title, loc="left")
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.tick_params(labelbottom=True, labelleft=True)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    families = {point.family for points in panels.values() for point in points}
    family_legend(figure, families, colors, most=int(0.9 * width * columns))
    figure.tight_layout(rect=(0, 0, 1, 0.97 - 0.02 / rows))
    for axis, points in zip(axes, panels.values(), strict=False):
        separate(axis.texts, boxes(axis, [(point.x, point.y) for point in points]))
    return figure


def is_number(value: float | None) -> TypeGuard[float]:
    """Whether a value was measured and can be drawn."""
    return value is not None and math.isfinite(value)


def dots(
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    xlabel: str,
    *,
    errors: Mapping[str, Sequence[float | None]] | None = None,
    symlog: float | None = None,
    base: float | None = None,
    width: float = 8.2,
    height: float = 0.175,
    legend: int = 3,
    written: bool = False,
) -> Figure:
    """One line per label that has a value, one marker per series, plus and minus one error; missing values leave a gap.

    base: where a vertical line marks the value to compare with. With errors series lie below each other within a line, so that
    none hides another, and a thin line marks 0.
    symlog: the value up to which the axis is linear on both sides of zero, and beyond which it is logarithmic.
    width, height: of the figure and of a line, in inches. legend: how many series stand beside each other in it. written:
    whether each value stands at its marker, in the marker's colour.
    """
    places = [
        place for place in range(len(labels)) if any(is_number(values[place]) for values in series.values())
    ]
    labels = [labels[place] for place in places]
    series = {name: [values[place] for place in places] for name, values in series.items()}
    errors = {name: [values[place] for place in places] for name, values in (errors or {}).items()}
    figure, (axis,) = subplots(1, 1, (width, 0.7 + height * max(1, len(labels))))
    heights = [-height for height in range(len(labels))]
    apart = 0.7 / len(series) if errors and series else 0.0
    ends, notes = [0.0], list[Any]()
    for number, (name, values) in enumerate(series.items()):
        spread = errors.get(name) or [None] * len(values)
        drawn = [
            (value, label, -place - apart * (number - (len(series) - 1) / 2), error or 0.0)
            for place, (value, label, error) in enumerate(zip(values, labels, spread, strict=True))
            if is_number(value)
        ]
        if not drawn:
            continue
        x, _, y, widths = zip(*drawn, strict=True)
        ends += [end for value, *_, error in drawn for end in (value - error, value + error)]
        color, marker = DOT_COLORS[number % len(DOT_COLORS)], DOT_MARKERS[number % len(DOT_MARKERS)]
        drawing = axis.errorbar(
            x,
            y,
            xerr=widths if errors else None,
            fmt=marker,
            color=color,
            markersize=5,
            elinewidth=1,
            label=name,
        )
        titles = [f"{label}, {name}: {value:.4g}".replace("\n", " ") for value, label, *_ in drawn]
        set_titles(figure, drawing[0], titles)
        notes += [note_of(axis, value, place, color) for value, _, place, _ in drawn if written]
    axis.set_yticks(heights, labels, fontsize=min(9, 43 * height))
    axis.set_ylim(-max(1, len(labels)) + 0.3, 0.7)
    if symlog is not None and axis.has_data():
        axis.set_xscale("symlog", linthresh=symlog)
        axis.xaxis.get_major_locator().set_params(numticks=6 if width > NARROW else 4)
        axis.axvline(0, color="#888888", linewidth=0.8)
        # Autoscaling a symmetric-log axis reaches far to the side on which there is nothing.
        axis.set_xlim(1.3 * min(-symlog, *ends), 1.3 * max(symlog, *ends))
    if errors and axis.has_data():
        axis.axvline(0, color="#888888", linewidth=0.6, zorder=0)
    if base is not None and axis.has_data():
        axis.axvline(base, color="#444444", linewidth=1.8 if errors else 0.9)
    axis.set_xlabel(xlabel)
    if axis.has_data():
        axis.legend(
            loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(legend, len(series)), frameon=False
        )
    separate(notes)
    return figure


def note_of(axis: Axes, value: float, place: float, color: str) -> Any:
    """A value over its marker, until it is moved away from others."""
    spot, side = (0, 4), "center"
    return axis.annotate(
        f"{value:.2f}", (value, place), spot, textcoords="offset points", ha=side, fontsize=7, color=color
    )


def measured_lines(
    rows: Sequence[str], values: Sequence[Sequence[float | None]]
) -> tuple[list[str], list[Sequence[float | None]]]:
    """The lines of a grid that have a value; all where none has."""
    kept = [
        (name, line)
        for name, line in zip(rows, values, strict=True)
        if any(value is not None and not math.isnan(value) for value in line)
    ] or list(zip(rows, values, strict=True))
    return [name for name, _ in kept], [line for _, line in kept]


def heatmap(
    rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]], label: str
) -> Figure:
    """A grid of colours; missing values stay white, lines without any are left out. Infinite ones take the scale's end."""
    import numpy as np

    rows, values = measured_lines(rows, values)
    grid = np.array(
        [[math.nan if value is None else value for value in line] for line in values], dtype=float
    )
    finite = grid[np.isfinite(grid)]
    written = grid.size <= MOST_WRITTEN
    # As wide as a page at most: a browser would make a wider figure smaller, and its text with it.
    width = WRITTEN_CELL if written else min(0.36, WIDEST_GRID / len(columns))
    figure, (axis,) = subplots(1, 1, (1.8 + width * len(columns), 1.6 + 0.175 * len(rows)))
    limits = {"vmin": finite.min(), "vmax": finite.max()} if finite.size else {}
    image = axis.imshow(grid, aspect="auto", cmap="viridis", interpolation="nearest", **limits)
    axis.set_xticks(
        range(len(columns)), columns, rotation=60, ha="right", fontsize=7.5, rotation_mode="anchor"
    )
    if finite.size and written:
        write_cells(axis, grid, (finite.min() + finite.max()) / 2)
    axis.set_yticks(range(len(rows)), rows, fontsize=7.5)
    axis.grid(False)
    bar = figure.colorbar(image, ax=axis, shrink=min(1.0, 12 / len(rows)), pad=0.02, anchor=(0.0, 1.0))
    bar.set_label(label)
    return figure


#: Cells of a grid whose values are written into them.
MOST_WRITTEN = 1200
#: Inches of a cell with its value in it, and of all columns of a grid.
WRITTEN_CELL, WIDEST_GRID = 0.46, 8.8


def write_cells(axis: Axes, grid: Any, middle: float) -> None:
    """Each finite value in its cell, of three digits, dark where the colour is light."""
    import numpy as np

    for (place, column), value in np.ndenumerate(grid):
        if math.isfinite(value):
            color = "black" if value > middle else "white"
            axis.text(column, place, f"{value:.3g}", ha="center", va="center", fontsize=SMALLEST, color=color)


def subplots(
    rows: int, columns: int, size: tuple[float, float], **shared: bool
) -> tuple[Figure, Sequence[Axes]]:
    """A figure in this module's style and its axes, row by row."""
    import matplotlib as mpl

    # Figures are files: no window, whatever the machine.
    mpl.use("Agg")
    from matplotlib import pyplot

    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, **shared)
    pyplot.close(figure)
    return figure, list(axes.flat)


def draw_points(figure: Figure, axis: Axes, points: Sequence[Point], colors: Mapping[str, str]) -> None:
    """Points in the colours and shapes of their families, each with its name under the pointer."""
    for family, color in colors.items():
        mine = [point for point in points if point.family == family]
        if not mine:
            continue
        x, y = [point.x for point in mine], [point.y for point in mine]
        if any(point.error for point in mine):
            bars = [point.error for point in mine]
            axis.errorbar(x, y, bars, fmt="none", ecolor=color, alpha=0.4, elinewidth=0.8)
        artist = axis.scatter(
            x, y, s=22, color=color, marker=marker(colors, family), alpha=0.75, linewidths=0
        )
        titles = [f"{point.name or point.label}: {point.y:.4g} at {point.x:.4g}" for point in mine]
        set_titles(figure, artist, titles)


#: Shapes of points, by the place of their family.
SHAPES = ("o", "s", "D", "^", "v", "P", "X", "<", ">", "p")


def marker(colors: Mapping[str, str], family: str) -> str:
    """The shape of a family's points, which tells it from others without its colour."""
    return SHAPES[list(colors).index(family) % len(SHAPES)]


def _scatter(
    figure: Figure, axis: Axes, points: Sequence[Point], symlog: float | None, colors: Mapping[str, str]
) -> None:
    draw_points(figure, axis, points, colors)
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
            color=colors[point.family],
        )


def separate(notes: Iterable[Any], dots: Sequence[Any] = ()) -> None:
    """Move labels that cover an earlier one, or one of the boxes of dots, to the first of SPOTS where they cover nothing; where
    there is none, to the one that covers least."""
    taken: list[Any] = []
    for note in notes:
        costs = []
        places = ((*note.xyann, note.get_ha()), *SPOTS)
        for number, place in enumerate(places):
            covered = covers(move(note, place), taken, dots)
            costs.append((covered, number))
            if not covered:
                break
        best = places[min(costs)[1]]
        taken.append(move(note, best))
        if abs(best[1]) > FAR:
            leader(note)


def leader(note: Any) -> None:
    """A thin line from a label that stands away from its point."""
    note.axes.annotate(
        "", note.xy, xytext=note.xyann, textcoords="offset points",
        arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": note.get_color()},
    )  # fmt: skip


def move(note: Any, place: tuple[float, float, str]) -> Any:
    """Put a label at an offset in points with an alignment; returns its box in pixels."""
    x, y, side = place
    note.set_position((x, y))
    note.set_ha(side)
    return note.get_window_extent()


def covers(box: Any, taken: Sequence[Any], dots: Sequence[Any]) -> int:
    """How much a label's box covers: another label counts as five dots."""
    return 5 * sum(box.overlaps(one) for one in taken) + sum(box.overlaps(one) for one in dots)


def boxes(axis: Axes, places: Iterable[tuple[float, float]], size: float = 3.0) -> list[Any]:
    """The boxes of dots at places of an axis, in pixels, of so many points on either side of their middle."""
    from matplotlib.transforms import Bbox

    half = size * axis.figure.dpi / 72
    found = axis.transData.transform(list(places)) if places else []
    return [Bbox([[x - half, y - half], [x + half, y + half]]) for x, y in found]


def family_legend(figure: Figure, families: set[str], colors: Mapping[str, str], most: int = 12) -> None:
    """Colours and shapes of the families that a figure shows, over it, at most so many beside each other."""
    from matplotlib.lines import Line2D

    shown = [name for name in colors if name in families]
    handles = [
        Line2D([], [], marker=marker(colors, name), linestyle="", color=colors[name], label=name) for name in shown
    ]  # fmt: skip
    figure.legend(handles=handles, loc="upper center", ncols=max(1, min(most, len(shown))), frameon=False)


# Line plots in the style of `experiments.report.plots`.


def curves(
    series: Mapping[str, Sequence[float | None]],
    xlabel: str,
    ylabel: str,
    *,
    base: float | None = None,
    percent: bool = False,
    names: Sequence[str] = (),
    width: float = 7.6,
) -> Figure:
    """One line per series over 1, 2, ...; missing values leave a gap.

    base: where a horizontal line marks what is compared with. percent: values stand at equal parts of 100. names: what stands
    at 1, 2, ... of the axis. width: in inches; in a narrow figure the legend has a line for each series. Colours repeat behind
    the seventh series with another marker and a dashed line.
    """
    beside = max(1, int(width / 2.5))
    figure, (axis,) = subplots(1, 1, (width, 3.0 + 1.2 * (beside > 1) + 0.2 * len(series) * (beside == 1)))
    for number, (name, values) in enumerate(series.items()):
        step = 100 / len(values) if percent and values else 1
        drawn = [(x * step, y) for x, y in enumerate(values, 1) if is_number(y)]
        if not drawn:
            continue
        x, y = zip(*drawn, strict=True)
        turn = number // len(DOT_COLORS)
        axis.plot(
            x,
            y,
            color=DOT_COLORS[number % len(DOT_COLORS)],
            marker=DOT_MARKERS[(number + turn) % len(DOT_MARKERS)],
            linestyle="--" if turn else "-",
            markersize=3.5,
            linewidth=1.1,
            label=name,
        )
    if base is not None and axis.has_data():
        axis.axhline(base, color="#444444", linewidth=0.9)
    if names:
        axis.set_xticks(range(1, len(names) + 1), names)
    axis.set_xlabel(xlabel)
    axis.set_ylabel(ylabel)
    if axis.has_data():
        axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=beside, frameon=False, fontsize=7.5)
    return figure
