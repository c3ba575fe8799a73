"""Figures in two widths: as wide as a page, and as wide as a phone, whose labels are broken into lines."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.report.plots import NARROW, dots
from experiments.report.ratio_maps import Ratios, long_names, narrow_ratio_map, ratio_map

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Letters of a line of a label beside an axis, and of one below it.
BESIDE, BELOW = 22, 42
#: Inches of a line of text, and of what lies between two labels.
LINE, BETWEEN = 0.15, 0.07


def dots_twice(
    labels: Sequence[str], series: Mapping[str, Sequence[float | None]], xlabel: str, **options: Any
) -> tuple[Figure, Figure]:
    """`plots.dots` of the values, and the same for a phone. options: those of `dots` that are of values; height is of the wide
    one."""
    wide = dots(labels, series, xlabel, **options)
    broken = [textwrap.fill(label, BESIDE) for label in labels]
    lines = max((label.count("\n") + 1 for label in broken), default=1)
    least = options.get("height", 0.0)
    narrow = {"width": NARROW, "height": max(least, lines * LINE + BETWEEN), "legend": 1}
    return wide, dots(broken, series, textwrap.fill(xlabel, BELOW), **(options | narrow))


def ratio_map_twice(ratios: Ratios) -> tuple[Figure, Figure]:
    """`ratio_maps.ratio_map`, and the same for a phone, its names broken into lines."""
    names = [textwrap.fill(name, BESIDE) for name in ratios.rows]
    heads = [name.replace(", ", ",\n") for name in ratios.columns]
    broken = replace(ratios, rows=names, columns=ratios.columns if long_names(heads) else heads)
    return ratio_map(ratios), narrow_ratio_map(broken)
