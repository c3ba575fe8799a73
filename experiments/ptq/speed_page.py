"""The part of the page of `ptq` that sets speed against loss: a configuration's loss on a real model, and the time of one
linear layer with it at a few numbers of tokens (experiment `linear`), joined by the schemes of its weights and inputs.

The axes are of different measurements: the loss is of a small model, on the device of its run; the time is of one layer of a
large model's shape, on a GPU, by the kernels that are chosen today. Captions name both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from experiments.harness.rows import Row
from experiments.linear.current import current, recipe_of
from experiments.linear.run import SPEED, TIME
from experiments.linear.tables import ACTIVATIONS, BASE, SHAPES, WEIGHTS, Method, data_of, setting_of
from experiments.models.causal_lm import BASE as DENSE
from experiments.models.quantized_model import setting_name
from experiments.report.content import Drawing, Section, Table, readable
from experiments.report.fronts import NARROW, Panel, front, front_panels
from experiments.report.plots import COLORS, Point
from experiments.report.real_runs import CHANGE, CHANGE_ERROR, RealRun, best_runs
from experiments.report.results import Results, Where, best_run, by_run, family, number

#: The experiment whose rows the times are, and the numbers of tokens that figures show.
LINEAR, TOKENS = "linear", (1, 16)
#: The layer, outputs x inputs: that of a large model's MLP, which has targets.
SHAPE = data_of(SHAPES[0])
#: Below this increase of the loss, in nats, the axis is linear.
SMALLEST = 0.01
TEXT = (
    "Loss: the model with all linear layers in a configuration's schemes, rounded to nearest without calibration. Time: one "
    f"linear layer of {readable(SHAPE)} with the same configuration, CUDA graphs, quantizing the inputs included. Both are "
    "joined by the schemes of weights and inputs; they are of different models and perhaps of different devices, so a figure "
    "compares configurations with each other and predicts no model's speed.",
    '"dynamic": the inputs are quantized too. Lines that were measured with another kernel than is chosen today are left out.',
)


@dataclass(frozen=True)
class Timed:
    """The times of layers on one GPU: of weights alone, and of those whose inputs are quantized too."""

    where: Where
    weights: Results
    activations: Results

    def of(self, method: Method) -> Results:
        """The table that a configuration is in."""
        return self.activations if method in ACTIVATIONS else self.weights


def joined(rows: Sequence[Row], others: Callable[[str], Sequence[Row]]) -> list[Section]:
    """A section for each real model whose schemes have times; none where no layer was timed. others: rows by experiment."""
    runs = best_runs(rows)
    timed = timed_of(others(LINEAR)) if runs else None
    return [] if timed is None else [one for run in runs if (one := section(run, timed))]


def timed_of(rows: Sequence[Row]) -> Timed | None:
    """The times of the last GPU at the shape, by today's kernels; None where there are none."""
    found = []
    for part in ("weights", "activations"):
        runs = {where: one for where, one in by_run(current(rows), part).items() if where.data == SHAPE}
        found.append({where: one for where, one in runs.items() if where.device != "cpu"})
    last = best_run(found[0])
    return None if last is None else Timed(last[0], last[1], found[1].get(last[0], Results([])))


def section(run: RealRun, timed: Timed) -> Section | None:
    """One model: the figure, and a line for each configuration that has both values."""
    text, results = next(iter(run.texts.items()))
    known = [method for method in (*WEIGHTS, *ACTIVATIONS) if loss(results, method) is not None]
    panels = {title(tokens): panel(results, timed, known, tokens) for tokens in TOKENS}
    if not any(one.points for one in panels.values()):
        return None
    return Section(
        f"Speed against loss: {run.model}, layer {readable(SHAPE)}",
        [*absent(timed, known), *TEXT],
        [drawing(run, text, timed, panels)],
        [table(run, text, results, timed, known)],
    )


def absent(timed: Timed, known: Sequence[Method]) -> list[str]:
    """Which configurations have no point, for want of a loss or of a time, and in which panels."""
    unknown = tuple(one.name for one in (*WEIGHTS, *ACTIVATIONS) if one not in known)
    without = {"their loss was not measured on this model": unknown}
    untimed: dict[tuple[str, ...], list[str]] = {}
    for tokens in TOKENS:
        names = [one.name for one in known if timed.of(one).value(setting_of(tokens), one.name, TIME) is None]
        untimed.setdefault(tuple(names), []).append(title(tokens))
    for missing, titles in untimed.items():
        where = " and ".join(titles)
        without[f"their layer was not timed at {where} with the kernel that is chosen today"] = missing
    return [
        f"**Without a point: {len(names)}, since {reason}.** {'; '.join(names)}."
        for reason, names in without.items()
        if names
    ]


def title(tokens: int) -> str:
    """The title of a panel."""
    return f"{tokens} token{'s' * (tokens > 1)}"


def place_of(method: Method) -> tuple[str, str]:
    """Setting and method of a configuration's rows of a real model."""
    return setting_name(inputs_of(method)), recipe_of(method.name).weight.name


def inputs_of(method: Method) -> str | None:
    """The scheme of the inputs; None where they stay as they are."""
    inputs = recipe_of(method.name).activation
    return None if inputs is None else inputs.name


def loss(results: Results, method: Method) -> float | None:
    """The increase of the loss in nats; None where it was not measured or is not finite."""
    value = results.value(*place_of(method), CHANGE)
    return value if value is not None and math.isfinite(value) else None


def panel(results: Results, timed: Timed, known: Sequence[Method], tokens: int) -> Panel:
    """Configurations by the time of a layer, with the line of the least loss within a time, and the dense layer's time."""
    points = list(points_of(results, timed, known, tokens))
    dense = timed.weights.value(setting_of(tokens), BASE.name, TIME)
    return Panel(points, {"": ("#666666", front(points))}, {} if dense is None else {BASE.name: dense})


def points_of(results: Results, timed: Timed, known: Sequence[Method], tokens: int) -> Iterator[Point]:
    """The points of configurations that have both values."""
    for method in known:
        time, value = timed.of(method).value(setting_of(tokens), method.name, TIME), loss(results, method)
        if time is not None and value is not None:
            setting, scheme = place_of(method)
            half = results.half(setting, scheme, CHANGE_ERROR) or 0.0
            yield Point(time, value, family(scheme), method.name, method.name, half)


def drawing(run: RealRun, text: str, timed: Timed, panels: Mapping[str, Panel]) -> Drawing:
    """A panel for each number of tokens."""
    labels = f"time of one layer, {timed.where.device} (us)", f"increase of the loss (nats),\n{run.model}"
    wide = front_panels(panels, *labels, COLORS, symlog=SMALLEST)
    narrow = front_panels(panels, *labels, COLORS, symlog=SMALLEST, columns=1, width=NARROW)
    caption = (
        f"Speed against loss by configuration. Down: the increase of the loss of {run.model} on {text} ({run.where.run}), with "
        f"95% intervals, linear below {SMALLEST} and logarithmic above. Left to right: the time of one layer of "
        f"{readable(SHAPE)} ({timed.where.run}). The vertical line is the layer in bfloat16; the other joins what loses least "
        "within its time."
    )
    return Drawing(f"ptq-speed-{run.ending}", caption, wide, narrow)


def table(run: RealRun, text: str, results: Results, timed: Timed, known: Sequence[Method]) -> Table:
    """A line for each configuration: its schemes, the loss, and times with speeds over bfloat16."""
    columns = ["configuration", "weights in", "inputs in", f"loss of {run.model}, change (nats)"]
    for tokens in TOKENS:
        columns += [f"{title(tokens)}: us", f"{title(tokens)}: speed over {DENSE}"]
    lines, rows = [], list[Row]()
    for method in known:
        setting, scheme = place_of(method)
        of_layer = timed.of(method)
        line = [
            method.name,
            scheme,
            inputs_of(method) or "",
            results.with_half(setting, scheme, CHANGE, CHANGE_ERROR),
        ]
        for tokens in TOKENS:
            line += [number(of_layer.value(setting_of(tokens), method.name, one), 2) for one in (TIME, SPEED)]
        lines.append(line)
        rows += [one for one in results.rows if (one.setting, one.method) == (setting, scheme)]
        rows += [
            one
            for tokens in TOKENS
            for one in of_layer.of_method(method.name).with_setting(setting_of(tokens)).rows
        ]
    caption = (
        f"Loss on {text} ({run.where.run}) and time of one layer of {readable(SHAPE)} ({timed.where.run})"
    )
    return Table(caption, columns, lines, rows)
