"""What quality costs: loss against bytes (or bits, or time), with the points that nothing beats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from ao_lab.install.extras import WrongInput
from ao_lab.intervals import quantile
from ao_lab.plot.style import Theme, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """A configuration: its name, what it costs (bytes, for instance), its loss, and half of the loss's 95% interval.

    reference: whether others are compared with it, as with the unquantized model. losses: those of the windows of a text, whose
    mean is the loss; of all points the same windows. Empty where they are not known.
    """

    name: str
    cost: float
    loss: float
    error: float = 0.0
    reference: bool = False
    losses: tuple[float, ...] = ()


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points of finite loss that are better than every other of no more cost, by cost; see `is_better`."""
    cheaper: list[Point] = []
    best: list[Point] = []
    for one in sorted(points, key=lambda point: (point.cost, point.loss)):
        if math.isfinite(one.loss):
            if all(is_better(one, other) for other in cheaper):
                best.append(one)
            cheaper.append(one)
    return best


def are_paired(one: Point, other: Point) -> bool:
    """Whether both have losses of the same windows, two or more."""
    return len(one.losses) == len(other.losses) > 1


def is_better(one: Point, other: Point) -> bool:
    """Whether the loss of one point is less than another's.

    By the paired difference on the same windows where both have their losses: the whole 95% interval of its mean is below 0
    (Student's t). By the two losses alone otherwise: intervals of two points, each around a difference from a third, say
    nothing of the difference between them.
    """
    if not are_paired(one, other):
        return one.loss < other.loss
    differences = [a - b for a, b in zip(one.losses, other.losses, strict=True)]
    count = len(differences)
    spread = stdev(differences) / math.sqrt(count)
    return fmean(differences) + quantile(count) * spread < 0


def tradeoff(
    points: Sequence[Point],
    xlabel: str = "size of the weights, MB (10^6 bytes)",
    ylabel: str = "loss, nats per token",
    *,
    scale: float = 1e-6,
    title: str = "Loss against size",
    ax: Axes | None = None,
    theme: str | None = None,
) -> Figure:
    """Loss against cost, a point a configuration with its 95% interval and its name.

    Points that are better than every other of no more cost are coloured and joined by steps; others are gray. Better is what
    the paired difference of both on the same windows says, with its 95% interval, where points have `losses` of windows; a
    lower loss, whatever the bars, where they have none. A legend says all this. Points of about the same cost stand side by
    side, so that each bar is seen. A reference is a horizontal line through a
    square. scale: costs are multiplied by it for the axis. Losses that are infinite or NaN cannot be drawn: they are named in
    the title.

    ValueError where there is no point, or no finite loss.
    """
    drawn = [one for one in points if math.isfinite(one.loss)]
    if not drawn:
        raise WrongInput("tradeoff draws one point or more of finite loss; got none")
    with canvas(ax, theme, (8.0, 4.8)) as (figure, (axis,), colors):
        best, places = frontier(drawn), side_by_side(drawn)
        axis.step(
            [scale * one.cost for one in best],
            [one.loss for one in best],
            where="post",
            color=colors.series[0],
            linewidth=1,
        )
        for one in drawn:
            if one.reference:
                axis.axhline(one.loss, color=colors.muted, linewidth=0.9, linestyle="--")
            axis.errorbar(
                [scale * places[one]], [one.loss], yerr=[one.error], **_look(one, one in best, colors)
            )
        axis.set(xlabel=xlabel, ylabel=ylabel)
        axis.margins(x=0.16, y=0.12)
        axis.autoscale_view()
        lost = [one.name for one in points if one not in drawn]
        axis.set_title(title + (f" (not finite: {', '.join(lost)})" if lost else ""), loc="left")
        _legend(axis, drawn, best, colors)
        if ax is None:  # names are placed in pixels, which the layout moves
            figure.draw_without_rendering()
        _names(axis, drawn, best, {one: scale * at for one, at in places.items()}, colors)
    return figure


#: Parts of the axis: costs no further apart are drawn side by side, and how far.
SAME, APART = 0.004, 0.01


def side_by_side(points: Sequence[Point]) -> dict[Point, float]:
    """Where each point stands: at its cost, or beside those of about the same cost, the middle of which stays."""
    ordered = sorted(points, key=lambda one: (one.cost, one.loss))
    span = ordered[-1].cost - ordered[0].cost
    groups: list[list[Point]] = []
    for one in ordered:
        if groups and one.cost - groups[-1][0].cost <= SAME * span:
            groups[-1].append(one)
        else:
            groups.append([one])
    step = APART * (span or abs(ordered[0].cost) or 1.0)
    return {
        one: fmean(each.cost for each in group) + step * (number - (len(group) - 1) / 2)
        if len(group) > 1
        else one.cost
        for group in groups
        for number, one in enumerate(group)
    }


#: What the colours of points, the square and the bars say, and by what one point is called better than another.
BEST, BEATEN = "no other is as good at no more cost", "another is as good at no more cost"
REFERENCE, BARS = "unquantized", "bars: 95% interval"
PAIRED, ALONE = (
    "as good: by the paired difference on the same windows, 95%",
    "as good: by the losses alone, whatever the bars",
)


def _legend(axis: Axes, points: Sequence[Point], best: Sequence[Point], theme: Theme) -> None:
    """What is drawn, below the axes."""
    first = {_kind(one, one in best): one for one in reversed(points)}
    if any(one.error > 0 for one in points):
        first[BARS] = points[0]
    paired = all(are_paired(*two) for two in combinations(points, 2))
    handles = []
    for label in (name for name in (BEST, BEATEN, REFERENCE, BARS) if name in first):
        look = _look(first[label], label == BEST, theme)
        drawn = {BARS: {"fmt": "|", "color": theme.ink}}.get(label, look)
        handles.append(axis.errorbar([], [], yerr=[], **{**look, **drawn}, label=label))
    axis.legend(
        handles=handles,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=2,
        frameon=False,
        fontsize=TYPE,
        title=(PAIRED if paired else ALONE) if len(points) > 1 else None,
        title_fontsize=TYPE,
    )


def _kind(one: Point, best: bool) -> str:
    return REFERENCE if one.reference else BEST if best else BEATEN


def _look(one: Point, best: bool, theme: Theme) -> dict[str, Any]:
    color = theme.ink if one.reference else theme.series[0] if best else theme.muted
    return {
        "fmt": "s" if one.reference else "o",
        "color": color,
        "markersize": 6,
        "elinewidth": 1,
        "capsize": 2,
    }


#: Size of the type of names, the width of a letter and the height of a line as parts of it.
TYPE, LETTER, LINE = 7.5, 0.62, 1.3
#: Where a name stands from its point, in points of type: the first place that is free.
PLACES = [(x, y) for y in (5, -12, 16, -23, 27, -34, 38, -45, 49, -56, 60) for x in (7, -7)]
#: What a point and its bars' caps cover around it, and from how far a line leads from a name to its point; in points of type.
AROUND, FAR = 5, 12


def _names(
    axis: Axes, points: Sequence[Point], best: Sequence[Point], across: Mapping[Point, float], theme: Theme
) -> None:
    """Each name beside its point, where it covers no other name, no point, and does not leave the axes."""
    figure = axis.figure
    unit = figure.dpi / 72
    frame = axis.get_window_extent()
    places = {one: axis.transData.transform((across[one], one.loss)) for one in points}
    around = AROUND * unit
    taken = [(x - around, y - around, x + around, y + around) for x, y in places.values()]
    taken += [(frame.x0, places[one][1] - 1, frame.x1, places[one][1] + 1) for one in points if one.reference]
    for (x, y), (right, low) in pairwise(places[one] for one in best):  # a step goes right, then down
        taken += [(x, y - 1, right, y + 1), (right - 1, low, right + 1, y)]
    for one, (x, y) in sorted(places.items(), key=lambda pair: (pair[0] not in best, pair[0].cost)):
        boxes = {at: _box(len(one.name), x, y, at, unit) for at in PLACES}
        inside = {at: box for at, box in boxes.items() if frame.x0 <= box[0] and box[2] <= frame.x1}
        free = (at for at, box in inside.items() if not any(_cross(box, other) for other in taken))
        at = next(free, None) or min(inside or boxes, key=partial(_covered, boxes, taken))
        taken.append(boxes[at])
        written = axis.annotate(
            one.name,
            (across[one], one.loss),
            at,
            textcoords="offset points",
            ha="left" if at[0] > 0 else "right",
            fontsize=TYPE,
            color=theme.ink if one in best or one.reference else theme.muted,
            arrowprops=_leader(at, theme),
        )
        written.set_in_layout(False)


def _leader(at: tuple[int, int], theme: Theme) -> dict[str, Any] | None:
    """The line from a name that stands far from its point, from the name's near end."""
    if abs(at[1]) <= FAR:
        return None
    near = (0.0 if at[0] > 0 else 1.0, 0.5)
    return {"arrowstyle": "-", "color": theme.muted, "linewidth": 0.5, "relpos": near}


Box = tuple[float, float, float, float]


def _box(letters: int, x: float, y: float, at: tuple[int, int], unit: float) -> Box:
    """What a name of so many letters covers, about, in pixels."""
    width = letters * LETTER * TYPE * unit
    left = x + at[0] * unit - (width if at[0] < 0 else 0)
    low = y + at[1] * unit - 1
    return left, low, left + width, low + LINE * TYPE * unit


def _covered(boxes: Mapping[tuple[int, int], Box], taken: Sequence[Box], at: tuple[int, int]) -> float:
    """How many pixels of others a name would cover at a place."""
    left, low, right, high = boxes[at]
    return sum(
        max(0.0, min(right, other[2]) - max(left, other[0]))
        * max(0.0, min(high, other[3]) - max(low, other[1]))
        for other in taken
    )


def _cross(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


__all__ = ["Point", "tradeoff"]
