"""What quality costs: loss against bytes (or bits, or time), with the points that nothing beats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ao_lab.plot.style import Theme, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """A configuration: its name, what it costs (bytes, for instance), its loss, and the loss's standard error.

    reference: whether others are compared with it, as with the unquantized model.
    """

    name: str
    cost: float
    loss: float
    error: float = 0.0
    reference: bool = False


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points of finite loss that no other matches at no more cost, by cost."""
    best: list[Point] = []
    for one in sorted(points, key=lambda point: (point.cost, point.loss)):
        if math.isfinite(one.loss) and (not best or one.loss < best[-1].loss):
            best.append(one)
    return best


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
    """Loss against cost, a point a configuration with its interval (95%, 1.96 standard errors) and its name.

    Points that nothing beats (less loss at no more cost) are coloured and joined by steps; others are gray. A reference is a
    horizontal line through a square. scale: costs are multiplied by it for the axis. Losses that are infinite or NaN cannot be
    drawn: they are named in the title.

    ValueError where there is no point, or no finite loss.
    """
    drawn = [one for one in points if math.isfinite(one.loss)]
    if not drawn:
        raise ValueError("tradeoff draws one point or more of finite loss; got none")
    with canvas(ax, theme, (8.0, 4.8)) as (figure, (axis,), colors):
        best = frontier(drawn)
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
                [scale * one.cost], [one.loss], yerr=[1.96 * one.error], **_look(one, one in best, colors)
            )
        _names(axis, drawn, best, scale, colors)
        axis.set(xlabel=xlabel, ylabel=ylabel)
        axis.margins(x=0.16, y=0.12)
        lost = [one.name for one in points if one not in drawn]
        axis.set_title(title + (f" (not finite: {', '.join(lost)})" if lost else ""), loc="left")
    return figure


def _look(one: Point, best: bool, theme: Theme) -> dict[str, Any]:
    color = theme.ink if one.reference else theme.series[0] if best else theme.muted
    return {
        "fmt": "s" if one.reference else "o",
        "color": color,
        "markersize": 6,
        "elinewidth": 1,
        "capsize": 2,
    }


#: Heights at which names stand beside points, in points of type; the next where one would cover another.
PLACES = (5, -12, 15, -22, 25, -32)


def _names(axis: Axes, points: Sequence[Point], best: Sequence[Point], scale: float, theme: Theme) -> None:
    """Each name beside its point, at another height where a neighbour's name stands."""
    low, high = min(one.loss for one in points), max(one.loss for one in points)
    first, last = min(one.cost for one in points), max(one.cost for one in points)
    taken: list[tuple[float, float]] = []
    for one in sorted(points, key=lambda point: (point.cost, point.loss)):
        x, y = (one.cost - first) / ((last - first) or 1), (one.loss - low) / ((high - low) or 1)
        # A name is as wide as a third of the figure, and a line of type a twenty-fifth of its height.
        free = (
            at for at in PLACES if all(abs(x - a) > 0.3 or abs(y + at / 230 - b) > 0.04 for a, b in taken)
        )
        height = next(free, PLACES[0])
        taken.append((x, y + height / 230))
        color = theme.ink if one in best or one.reference else theme.muted
        axis.annotate(
            one.name,
            (scale * one.cost, one.loss),
            (7, height),
            textcoords="offset points",
            fontsize=7.5,
            color=color,
        )


__all__ = ["Point", "tradeoff"]
