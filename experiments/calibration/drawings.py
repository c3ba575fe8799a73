"""The two pictures of experiment `calibration`: loss against bytes, with the front of each kind of method and of the automatic
choice; recovered loss against minutes, with the line of the most that is recovered within so many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.calibration import choice
from experiments.calibration.cases import ARMS, ROUNDING
from experiments.calibration.peers.records import PEERS
from experiments.models.causal_lm import FILE
from experiments.models.quantized_model import WEIGHTS
from experiments.report.content import Drawing, member
from experiments.report.fronts import NARROW, Panel, front, front_panels
from experiments.report.plots import Point
from experiments.report.real_runs import KL, RECOVERED, RealRun
from experiments.report.results import Results

#: Colours of families of methods, in the legend's order.
COLORS = {
    "rounding": "#000000",
    "search": "#0072b2",
    "HQQ": "#e69f00",
    "scaled channels": "#d55e00",
    "GPTQ": "#009e73",
    "AutoRound": "#cc79a7",
    "rotation": "#56b4e9",
    "low rank": "#882255",
    "automatic choice": "#9a7d0a",
    "rule by hand": "#888888",
}
#: Of the records that a method is made of the first that is here decides.
FAMILIES = {
    "Rotate": "rotation", "AutoRound": "AutoRound", "GPTQ": "GPTQ", "HQQ": "HQQ", "AWQ": "scaled channels",
    "Smooth": "scaled channels", "Clip": "search", "LowRank": "low rank",
}  # fmt: skip
AUTOMATIC, BY_RULE = "automatic choice", "rule by hand"
#: From how much of a scheme's size on a method's own is told.
LARGER = 1.01
#: How settings name the inputs' scheme.
INPUTS = ", inputs "


def is_choice(setting: str) -> bool:
    """Whether a setting has a scheme for each layer, by the automatic choice or by a rule by hand, and not one for all."""
    return setting.startswith((choice.NAME, *choice.RULES))


def family_of(method: str, setting: str = "") -> str:
    """The family of a method, for colours; of a choice, and of a rule by hand, whatever quantizes it."""
    if is_choice(setting):
        return AUTOMATIC if setting.startswith(choice.NAME) else BY_RULE
    records = {name for name, _ in ARMS.get(method, ())}
    return next((family for name, family in FAMILIES.items() if name in records), ROUNDING)


def cases(run: RealRun) -> list[str]:
    """The schemes of a run in the order in which they were measured."""
    return [one for one in run.whole.settings if one not in (FILE, WEIGHTS)]


def methods(results: Results, setting: str) -> list[str]:
    """Our methods of a scheme, in the order of the experiment; other projects' have a table of their own."""
    order = {name: place for place, name in enumerate(ARMS)}
    there = (row.method for row in results.rows if row.setting == setting)
    found = dict.fromkeys(name for name in there if name not in PEERS)
    return sorted(found, key=lambda name: order.get(name, len(order)))


def seconds_of(run: RealRun, setting: str, method: str) -> float | None:
    """Seconds to quantize the model, and to choose schemes (of all budgets) where they were chosen; None if not measured."""
    quantizing = run.whole.value(setting, method, "time to quantize")
    return (
        None
        if quantizing is None
        else quantizing + (run.whole.value(setting, method, "time to choose, all budgets") or 0.0)
    )


# Loss against bytes.


def bytes_drawing(run: RealRun) -> Drawing | None:
    """KL against bytes: a panel for each text, of weights alone and with inputs."""

    def panel(results: Results, inputs: bool) -> Panel | None:
        points = list(sizes_and_losses(run, results, inputs))
        tops = places_of([(name, point) for name, point in points if not is_choice(name)])
        return Panel([one for _, one in points], fronts_of(points), tops) if points else None

    panels = run.panels(panel)
    if not panels:
        return None
    labels = "size of the model (MB, decimal)", "KL from the dense model (nats)"
    wide = front_panels(panels, *labels, COLORS, ylog=True)
    narrow = front_panels(panels, *labels, COLORS, ylog=True, columns=1, width=NARROW)
    caption = (
        f"{run.model}: KL from the dense model against bytes, every method in every scheme. A line joins points that lose less "
        "than all smaller ones: of rounding, of methods with data in one scheme, of the automatic choice of a scheme for each "
        f"layer, of rules by hand.{members(run)} Tables have the values of each."
    )
    return Drawing(f"calibration-bytes-{run.ending}", caption, wide, narrow)


def places_of(points: Sequence[tuple[str, Point]]) -> dict[str, float]:
    """Words over sizes: each scheme over that of rounding, and a method that stores more beside it, by its own name."""
    least: dict[str, float] = {}
    for name, point in points:
        least[name] = min(point.x, least.get(name, point.x))
    tops = {name.split(INPUTS)[0]: x for name, x in least.items()}
    for name, point in points:
        if point.x > LARGER * least[name] and point.x not in tops.values():
            tops[point.name.removesuffix(f", {name}")] = point.x
    return tops


def members(run: RealRun) -> str:
    """A sentence on the methods of each family of which there are several; "" where there is no such one."""
    found: dict[str, dict[str, None]] = {}
    for results in run.texts.values():
        for setting in (one for one in cases(run) if not is_choice(one)):
            for name in methods(results, setting):
                found.setdefault(family_of(name, setting), {})[name] = None
    told = [f"{family}: {', '.join(map(member, names))}" for family, names in found.items() if len(names) > 1]
    return f" Methods of one colour and shape, {'; '.join(told)}." if told else ""


def sizes_and_losses(run: RealRun, results: Results, inputs: bool) -> Iterator[tuple[str, Point]]:
    """Settings with the points of their methods; a KL of 0 or none has no place on a logarithmic axis."""
    for setting in cases(run):
        for name in methods(results, setting) if (INPUTS in setting) == inputs else ():
            size, kl = run.whole.value(setting, name, "size"), results.value(setting, name, KL)
            if size is not None and kl is not None and math.isfinite(kl) and kl > 0:
                yield setting, Point(size / 1e6, kl, family_of(name, setting), "", f"{name}, {setting}")


def fronts_of(points: list[tuple[str, Point]]) -> dict[str, tuple[str, list[Point]]]:
    """The front of each kind, with its colour; a line that ends with what its last scheme needs."""
    kinds: dict[str, list[Point]] = {}
    for _, point in points:
        kind = point.family if point.family in (ROUNDING, AUTOMATIC, BY_RULE) else "methods with data"
        kinds.setdefault(kind, []).append(point)
    return {kind: (COLORS.get(kind, "#666666"), front(found)) for kind, found in kinds.items()}


# Minutes against recovered loss.


def minutes_drawing(run: RealRun) -> Drawing | None:
    """Recovered KL against minutes, a panel for each scheme and one for choices, on the first text."""
    text, results = next(iter(run.texts.items()))
    panels = {}
    for setting in (one for one in cases(run) if not is_choice(one)):
        points = list(minutes_and_shares(run, results, setting))
        if points:
            panels[told(results, setting, len(points))] = Panel(
                points, {"": ("#666666", steps(front(points, most=True)))}, {}
            )
    if chosen := choices(run, results):
        panels[AUTOMATIC] = Panel(chosen, {}, {})
    several = {title: panel for title, panel in panels.items() if len(panel.points) > 1}
    panels = several or panels
    if not panels:
        return None
    labels = "minutes to choose and quantize", "rounding's KL divergence removed (%)"
    beside = {"columns": 3, "width": 4.25} if len(panels) > 4 else {}
    wide = front_panels(panels, *labels, COLORS, xlog=True, **beside)
    narrow = front_panels(panels, *labels, COLORS, xlog=True, columns=1, width=NARROW)
    caption = (
        f"{run.model}: minutes against recovered loss, on {text} ({run.where.device}). The line is the most that is "
        "recovered within so many minutes; minutes of the automatic choice hold the choosing. Methods without a time, and "
        "schemes with one that has a time, are in tables alone."
    )
    return Drawing(f"calibration-minutes-{run.ending}", caption, wide, narrow)


def told(results: Results, setting: str, timed: int) -> str:
    """A scheme, and how many of its methods have a time where not all have one, or that there is one method alone."""
    measured = sum(results.value(setting, name, RECOVERED) is not None for name in methods(results, setting))
    if measured == 1:
        return f"{setting} (one method)"
    return setting if timed == measured else f"{setting} ({timed} of {measured} methods)"


def minutes_and_shares(run: RealRun, results: Results, setting: str) -> Iterator[Point]:
    """The points of a scheme's methods."""
    for name in methods(results, setting):
        seconds, value = seconds_of(run, setting, name), results.value(setting, name, RECOVERED)
        if seconds is not None and seconds > 0 and value is not None and math.isfinite(value):
            yield Point(seconds / 60, value, family_of(name, setting), name, name)


def choices(run: RealRun, results: Results) -> list[Point]:
    """The points of the automatic choice, with the method and the budget."""
    return [
        replace(
            point,
            label=f"{point.label}, {setting.removeprefix(f'{choice.NAME}, ')}",
            name=f"{point.name}, {setting}",
        )
        for setting in cases(run)
        if setting.startswith(choice.NAME)
        for point in minutes_and_shares(run, results, setting)
    ]


def steps(points: list[Point]) -> list[Point]:
    """The corners of a line that rises where a point is reached."""
    found: list[Point] = []
    for point in points:
        if found:
            found.append(Point(point.x, found[-1].y, point.family))
        found.append(point)
    return found
