"""The style of all figures, for light and dark pages: colours, markers, axes that are made or taken, and files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ao_lab.install.extras import WrongInput, needed
from reference.arrays.namespace import choice

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
LINES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Theme:
    """Colours of a page: its background, its text, what stands back (grid, points without a name), and of series."""

    name: str
    paper: str
    ink: str
    faint: str
    muted: str
    series: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of matplotlib."""
        text = dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.labelcolor", "ytick.labelcolor"),
            self.ink,
        )
        paper = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), self.paper)
        lines = {"grid.color": self.faint, "xtick.color": self.muted, "ytick.color": self.muted}
        return {**STYLE, **text, **paper, **lines}


#: The same palette; on dark its blue is Okabe and Ito's lighter one.
THEMES = {
    "light": Theme("light", "#ffffff", "#1a1a1a", "#e3e3e3", "#767676", SERIES),
    "dark": Theme(
        "dark",
        "#15181c",
        "#eceff2",
        "#343a41",
        "#9aa3ad",
        ("#56b4e9", "#e0743a", "#2bbd92", "#dd93bd", "#e69f00"),
    ),
}
LIGHTEST_DARK = 0.5


def theme_of(name: str | None, ax: Axes | None = None) -> Theme:
    """The theme of a name; None: of the background of axes, else the light one. ValueError for another name."""
    if name is None and ax is not None:
        red, green, blue = needed("matplotlib.colors").to_rgb(ax.get_facecolor())
        return THEMES["dark" if (2 * red + 5 * green + blue) / 8 < LIGHTEST_DARK else "light"]
    name = "light" if name is None else name
    choice(name, tuple(THEMES), "theme")
    return THEMES[name]


@contextmanager
def canvas(
    ax: Any, theme: str | None, size: tuple[float, float], columns: int = 1
) -> Iterator[tuple[Figure, list[Any], Theme]]:
    """Figure, axes and theme to draw with; a figure of our own is laid out at the end.

    ax: axes of the caller, one or, where `columns` are more, so many; None: a figure of `size` inches is made. ValueError for
    another number of axes.
    """
    given = [] if ax is None else list(ax) if isinstance(ax, Sequence) or hasattr(ax, "flat") else [ax]
    if ax is not None and len(given) != columns:
        raise ValueError(f"ax= takes {columns} axes here, got {len(given)}")
    colors = theme_of(theme, given[0] if given else None)
    if given:
        yield given[0].figure, given, colors
        return
    matplotlib, pyplot = needed("matplotlib"), needed("matplotlib.pyplot")
    with matplotlib.rc_context(colors.settings):
        figure, axes = pyplot.subplots(1, columns, figsize=size, squeeze=False, layout="constrained")
        # pyplot would keep it, and notebooks would show it twice.
        pyplot.close(figure)
        yield figure, list(axes.flat), colors


def look(theme: Theme, number: int) -> dict[str, Any]:
    """Colour, marker and line of the series of a number: no two of twenty are the same."""
    colors = theme.series
    turn = number // len(colors)
    return {
        "color": colors[number % len(colors)],
        "marker": MARKERS[(number + turn) % len(MARKERS)],
        "linestyle": LINES[turn % len(LINES)],
    }


FILES = (".svg", ".png", ".pdf")


def save(figure: Figure, path: str | Path, description: str = "") -> Path:
    """Write a figure as .svg, .png or .pdf, by the end of the file's name; returns the path.

    description: what the figure says, in a sentence, for readers who cannot see it: it goes into the file's metadata, which
    screen readers read of an SVG, and is drawn nowhere; by default the figure's title. The text of an SVG stays text, and
    equal figures give equal files. An earlier file stays until the new one is whole. ValueError for another kind of file.
    """
    path = Path(path)
    if path.suffix not in FILES:
        raise WrongInput(f"{path} is no figure's file: its name ends in {', '.join(FILES)}")
    first = figure.axes[0].get_title(loc="left") if figure.axes else ""
    about: dict[str, Any] = {}
    if path.suffix == ".svg":
        about = {"Date": None, "Creator": None, "Title": first, "Description": description or first}
    elif path.suffix == ".png":
        about = {"Title": first, "Description": description or first}
    settings = needed("matplotlib").rc_context({"svg.fonttype": "none", "svg.hashsalt": "ao_lab"})
    with settings, TemporaryDirectory(dir=path.parent, prefix=".ao_lab-") as place:
        made = Path(place) / path.name
        figure.savefig(made, metadata=about, dpi=160)
        made.replace(path)
    return path
