"""The page of experiment `kernels`: fractions of the copy rate, a table per shape, the baselines, and missed targets.

Figures of the kernels: every kernel by operation, and the roofline.

The roofline has on the left one line per kernel: the fraction of the copy rate at either large shape, its target as a tick, and
the fastest baseline, at the fraction of its time. On the right is the rate reached over the bytes moved, under the ceiling of
copies of the same run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from experiments.harness.rows import Row
from experiments.kernels.baselines import BASELINES
from experiments.kernels.cases import CASES
from experiments.kernels.operations import HUGE, LARGE, SHAPES, SHOWN, SMALL
from experiments.kernels.run import BASELINE_TABLE, CAST, KERNELS, KIND, MOST, PROGRAM, TORCH, WAYS
from experiments.kernels.run import KIND as JAX
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.plots import MARKERS, SERIES, STYLE, set_titles
from experiments.report.results import Results, Where, by_run, number
from experiments.report.targets import BASELINE_TOLERANCE, RunTargets, Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


TITLE = "Speed of the kernels on a GPU"
QUESTION = "How near does each kernel come to the rate at which the GPU copies?"
ABOUT = (
    "Each kernel of `fast` on a GPU, as a fraction of the rate at which the same GPU copies as many bytes as the kernel must "
    "read, timed in turn with it. A result is compared with the reference bit for bit before it is timed.",
    "Baselines (torch, torch.compile, torchao) run in turn on the same inputs.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("kernels-operations",)
#: The fraction of the copy rate that counts as high.
HIGH = 0.9

TEXT = (
    "The floor of a kernel is every input read once and every output written once (inputs twice where a scale of the whole "
    "tensor has to come first). Its fraction is its rate on these bytes over the rate of a copy of as many bytes as it reads, "
    "timed in turn with it in the same run. Before it is timed, its result is compared with the reference bit for bit at both "
    "ends of the tensor, a product of stored weights with the exact one within the bound of its sums; a wrong one gets no "
    "time.",
    "Times are medians by CUDA graph replay, over inputs that rotate so that the L2 holds none of them; launched one by one "
    "stands beside them. Repeat is how far a second timing of the same kernel in the same rounds lies from the first. Targets "
    "are stated for the cases that have one, and what misses one says so.",
)
BASELINE_TEXT = (
    "A ratio is the baseline's time over ours, timed in turn on the same inputs: above 1 ours is faster, and below "
    f"{1 - BASELINE_TOLERANCE:g}, which no repeat explains, slower. Cases with targets come first, and a run has so much time "
    "for baselines: what it did not reach is of an earlier run, between both as they were then. "
    + "; ".join(f"{baseline.name}: {baseline.what}" for baseline in BASELINES)
    + "."
)
CAPTION = (
    "Fraction of the copy rate per kernel, with its target and its fastest baseline, and the rates reached under the ceiling "
    "of copies of the same run. Red: below a target."
)
OPERATIONS = (
    "Fraction of the copy rate of every kernel on large tensors, by operation. Red: below its target."
)


def findings(rows: Sequence[Row]) -> list[str]:
    """Fractions of the copy rate by operation, products of stored weights, missed targets."""
    sentences = []
    for where, lines in results_of(rows).items():
        sentences.append(f"{where.device}: {summary(lines)}")
        sentences.append(fraction_sentence(lines))
        sentences.append(linear_sentence(lines))
        missed = missed_words(lines)
        sentences.append(f"Targets missed: {', '.join(missed)}." if missed else "")
    return [sentence for sentence in sentences if sentence]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """The median of all fractions of the copy rate on large tensors, and how many are high."""
    runs = [lines for where, lines in results_of(rows).items() if where.device != "cpu"]
    values = [value for found in fractions(runs[-1]).values() for value in found] if runs else []
    if not values:
        return []
    text = (
        f"Kernels on tensors of {' and '.join(LARGE)} run at {median(values):.2f} of the rate of a copy (median of "
        f"{len(values)}), {sum(value >= HIGH for value in values)} of them at {HIGH:g} or above"
    )
    return [Headline(text, [row for row in rows_of(runs[-1]) if row.metric == "fraction"])]


def main_finding(rows: Sequence[Row]) -> str:
    """How many cases are slower than a baseline."""
    runs = list(results_of(rows).values())
    if not runs:
        return ""
    compared = [line for line in runs[-1] if line.best_baseline is not None]
    slower = [line for line in compared if line.faster_baselines]
    return f"{len(slower)} of {len(compared)} cases that have a baseline (torch, torch.compile, torchao) are slower than it"


def fractions(lines: Sequence[CaseResult]) -> dict[str, list[float]]:
    """Fractions of the copy rate on large tensors, by operation."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line.shape in LARGE and "fraction" in line.values:
            found.setdefault(operation(line), []).append(line.values["fraction"])
    return found


def fraction_sentence(lines: Sequence[CaseResult]) -> str:
    """The median fraction of the copy rate of each operation on large tensors, with the lowest and the highest."""
    found = fractions(lines)
    words = [f"{name} {median(v):.2f} ({min(v):.2f} to {max(v):.2f})" for name, v in found.items()]
    return f"Fraction of the copy rate, median and range: {', '.join(words)}." if words else ""


def linear_sentence(lines: Sequence[CaseResult]) -> str:
    """The time of one row of inputs times a stored weight, and dense bfloat16's over it."""
    words = [
        f"{line.case.removeprefix('linear.')} {line.values['time']:.1f} us "
        f"({1 / line.values['time over dense']:.2f} times as fast)"
        for line in lines
        if line.case.startswith("linear.")
        and line.shape == "14336x4096"
        and line.values.get("time over dense")
    ]
    return (
        f"One row times a stored 14336x4096 weight, over dense bfloat16: {', '.join(words)}." if words else ""
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """Sections of each run: against the floors, against the baselines, calls from JAX."""
    found = []
    runs = results_of(rows)
    for where, lines in runs.items():
        ending = "" if len(runs) == 1 else f"-{slug(where)}"
        drawings = [
            Drawing(f"kernels-operations{ending}", OPERATIONS, by_operation(lines)),
            Drawing(f"kernels-roofline{ending}", CAPTION, roofline(lines)),
        ]
        paragraphs = [summary(lines), *missed_paragraphs(lines), *TEXT]
        products = [line for line in lines if line.case.startswith("linear.")]
        large = [line for line in lines if line.shape != SMALL and line not in products]
        small = [line for line in lines if line.shape == SMALL]
        tables = [floor_table(large), *([small_table(small)] if small else [])]
        tables += [product_table(products)] if products else []
        found.append(Section(f"Against the floors ({where})", paragraphs, drawings, tables))
        if any(line.baselines for line in lines):
            found.append(
                Section(f"Against baselines ({where})", [BASELINE_TEXT], [], [baseline_table(lines)])
            )
    return [*found, *jax_sections(rows)]


def slug(where: Where) -> str:
    """A run as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", f"{where.device} {where.scale}".lower()).strip("-")


def missed_paragraphs(lines: Sequence[CaseResult]) -> list[str]:
    """What misses a target, and what is slower than a baseline."""
    missed = missed_words(lines)
    slower = [
        f"{line.case} at {line.shape} ({faster_baselines(line)})" for line in lines if line.faster_baselines
    ]
    paragraphs = [f"**Missed targets: {len(missed)}.** " + ", ".join(missed) + "."] if missed else []
    return paragraphs + (
        [f"**Slower than a baseline: {len(slower)}.** " + ", ".join(slower) + "."] if slower else []
    )


def floor_table(lines: Sequence[CaseResult]) -> Table:
    """A line per case and shape."""
    columns = [
        "kernel",
        "shape",
        "time (us)",
        "20%",
        "80%",
        "eager (us)",
        "repeat",
        "moved (MB)",
        "TB/s",
        "copy TB/s",
    ]
    columns += ["fraction", "eager", "over unfused", "target met"]
    metrics = (("time", 1), ("time, 20%", 1), ("time, 80%", 1), ("time, eager", 1), ("repeat", 3))
    table_lines = []
    for line in lines:
        moved = line.values.get("bytes moved")
        table_lines.append(
            [
                line.case,
                line.shape,
                *(number(line.values.get(metric), digits) for metric, digits in metrics),
                number(None if moved is None else moved / 1e6, 0),
                *(number(line.values.get(metric), 2) for metric in ("rate", "copy rate")),
                *(number(line.values.get(metric), 3) for metric in ("fraction", "fraction, eager")),
                number(line.values.get("speedup over unfused"), 2),
                line.verdict,
            ]
        )
    return Table("Time against the floor", columns, table_lines, rows_of(lines))


def small_table(lines: Sequence[CaseResult]) -> Table:
    """Small tensors: launches, not bytes."""
    columns = [
        "kernel",
        "shape",
        "time, graph (us)",
        "over an elementwise kernel",
        "time, eager (us)",
        "host (us)",
    ]
    metrics = (("time", 2), ("time over elementwise", 2), ("time, eager", 1), ("host time", 1))
    table_lines = [
        [
            line.case,
            line.shape,
            *(number(line.values.get(name), digits) for name, digits in metrics),
            line.verdict,
        ]
        for line in lines
    ]
    return Table("Small tensors", [*columns, "target met"], table_lines, rows_of(lines))


def product_table(lines: Sequence[CaseResult]) -> Table:
    """Inputs times a stored weight: reading the weight is the floor."""
    columns = [
        "kernel",
        "weight",
        "time (us)",
        "eager (us)",
        "host (us)",
        "host time it adds (us)",
        "moved (MB)",
        "TB/s",
        "fraction",
    ]
    columns += ["times as fast as dense bfloat16", "as dequantizing first"]
    table_lines = []
    for line in lines:
        values = line.values
        moved, dense = values.get("bytes moved"), values.get("time over dense")
        table_lines.append(
            [
                line.case,
                line.shape,
                *(
                    number(values.get(metric), 1)
                    for metric in ("time", "time, eager", "host time", "host time, added")
                ),
                number(None if moved is None else moved / 1e6, 0),
                *(number(values.get(metric), 2) for metric in ("rate", "fraction")),
                number(None if dense is None else 1 / dense, 2),
                number(values.get("speedup over unfused"), 2),
                line.verdict,
            ]
        )
    return Table("Products of stored weights", [*columns, "target met"], table_lines, rows_of(lines))


def baseline_table(lines: Sequence[CaseResult]) -> Table:
    """A line per case and shape, a column per baseline: the ratio, or why there is none."""
    names = [baseline.name for baseline in BASELINES]
    table_lines = []
    for line in lines:
        if line.baselines:
            found = {one.baseline: compared(line, one) for one in line.baselines}
            best = line.best_baseline
            verdict = "" if best is None else f"SLOWER than {best.baseline}" if line.slower_than else "yes"
            cells = [found.get(name, "") for name in names]
            table_lines.append([line.case, line.shape, *cells, best.baseline if best else "", verdict])
    columns = ["kernel", "shape", *names, "fastest baseline", "as fast as every baseline"]
    rows = [row for line in lines for one in line.baselines for row in one.rows]
    return Table("Time of the baseline over ours", columns, table_lines, rows)


def compared(line: CaseResult, one: BaselineResult) -> str:
    """A baseline's cell: the ratio, or why there is none."""
    return one.status if one.ratio is None else number(one.ratio, 2)


def missed_words(lines: Sequence[CaseResult]) -> list[str]:
    """What misses a target, with the values."""
    return [f"{line.case} at {line.shape} ({'; '.join(line.missed)})" for line in lines if line.missed]


def faster_baselines(line: CaseResult) -> str:
    """The baselines that are faster, with their ratios."""
    return ", ".join(f"{one.baseline} {compared(line, one)}" for one in line.faster_baselines)


def rows_of(lines: Sequence[CaseResult]) -> list[Row]:
    """The rows behind some lines."""
    return [row for line in lines for row in line.rows]


# Rows read back: one line per case and shape, with its targets, whether they are met, and the fastest baseline.

STATUS, TARGET = "status: ", "target: "
#: Metrics for which less is better.
LESS = ("time over elementwise", "host time", "host time, added", *(f"{way} over {TORCH}" for way in WAYS))


@dataclass(frozen=True)
class BaselineResult:
    """A baseline beside a case: its time over ours, or why there is none."""

    baseline: str
    ratio: float | None
    status: str
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class CaseResult:
    """What is known of one case at one shape: its values, targets and baselines."""

    case: str
    shape: str
    status: str
    values: dict[str, float]
    targets: tuple[Target, ...]
    baselines: tuple[BaselineResult, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it was measured."""
        return self.status == "ok"

    @property
    def best_baseline(self) -> BaselineResult | None:
        """The fastest baseline that ran."""
        ran = [one for one in self.baselines if one.ratio is not None]
        return min(ran, key=lambda one: one.ratio or 0.0, default=None)

    @property
    def missed(self) -> list[str]:
        """Targets that were not met, in words; with a target, a case that was not measured misses."""
        if not self.ok:
            return [self.status] if self.targets else []
        return [str(target) for target in self.targets if not target.reached]

    @property
    def faster_baselines(self) -> list[BaselineResult]:
        """Baselines that are faster than ours."""
        return [one for one in self.baselines if one.ratio is not None and one.ratio < 1 - BASELINE_TOLERANCE]

    @property
    def slower_than(self) -> list[str]:
        """The same in words."""
        return [f"{one.baseline} {one.ratio:.2f}x" for one in self.faster_baselines]

    @property
    def verdict(self) -> str:
        """Of the targets: yes, no with the reason, or nothing where there is none."""
        if self.missed:
            return "MISSED: " + "; ".join(self.missed)
        if not self.targets:
            return "" if self.ok else self.status
        return "yes"


def results_of(rows: Iterable[Row]) -> dict[Where, list[CaseResult]]:
    """Lines of every run, in the order of the registry and of the shapes."""
    rows = list(rows)
    baselines = by_run(rows, BASELINE_TABLE)
    return {
        where: ordered([line(key, found, baselines.get(where)) for key in found.keys])
        for where, found in ((where, Found(results)) for where, results in by_run(rows, KERNELS).items())
    }


class Found:
    """The rows of a run by (shape, case)."""

    def __init__(self, results: Results) -> None:
        self.rows: dict[tuple[str, str], list[Row]] = {}
        for row in results.rows:
            self.rows.setdefault((row.setting, row.method), []).append(row)

    @property
    def keys(self) -> list[tuple[str, str]]:
        """(shape, case) in the order of the rows."""
        return list(self.rows)


def line(key: tuple[str, str], found: Found, baselines: Results | None) -> CaseResult:
    """One line from its rows and its baselines'."""
    shape, case = key
    rows = found.rows[key]
    values = {row.metric: row.value for row in rows if not row.metric.startswith((STATUS, TARGET))}
    targets = tuple(target_of(row, values) for row in rows if row.metric.startswith(TARGET))
    beside = baseline_results(baselines, f"{case}, {shape}") if baselines else ()
    return CaseResult(case, shape, status_of(rows), values, targets, beside, tuple(rows))


def target_of(row: Row, values: Mapping[str, float]) -> Target:
    """The target that a row states, with the value that was measured."""
    metric = row.metric.removeprefix(TARGET)
    value, day = values.get(metric), row.date[:10]
    return Target(metric, value, row.value, metric not in LESS, day=day, **SHOWN)


def status_of(rows: Sequence[Row]) -> str:
    """What the status row says."""
    said = [row.metric.removeprefix(STATUS) for row in rows if row.metric.startswith(STATUS)]
    return said[0] if said else "unknown"


def baseline_results(baselines: Results, setting: str) -> tuple[BaselineResult, ...]:
    """Baselines of one case at one shape, in the order of BASELINES."""
    rows: dict[str, list[Row]] = {}
    for row in baselines.rows:
        if row.setting == setting:
            rows.setdefault(row.method, []).append(row)
    order = [baseline.name for baseline in BASELINES]
    names = sorted(rows, key=lambda name: order.index(name) if name in order else len(order))
    return tuple(
        BaselineResult(
            name, baselines.value(setting, name, "ratio"), status_of(rows[name]), tuple(rows[name])
        )
        for name in names
    )


def ordered(lines: Sequence[CaseResult]) -> list[CaseResult]:
    """By shape, then as in the registry; the small and the huge shape come after the others."""
    cases, shapes = list(CASES), [*(name for name in SHAPES if name not in (HUGE, SMALL)), HUGE, SMALL]

    def key(one: CaseResult) -> tuple[int, int]:
        shape = shapes.index(one.shape) if one.shape in shapes else len(shapes)
        return shape, cases.index(one.case) if one.case in cases else len(cases)

    return sorted(lines, key=key)


def targets_by_run(rows: Iterable[Row]) -> list[RunTargets]:
    """Of all cases and of calls from JAX."""
    return [
        RunTargets(where, targets_in(results.rows), kind)
        for kind in (KERNELS, JAX)
        for where, results in by_run(rows, kind).items()
    ]


def targets_in(rows: Iterable[Row]) -> list[Target]:
    """The targets that rows state, named by case, shape and metric, with the values that were measured."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.method, row.setting), []).append(row)
    found = []
    for (case, shape), mine in lines.items():
        values = {row.metric: row.value for row in mine}
        stated = [target_of(row, values) for row in mine if row.metric.startswith(TARGET)]
        found += [replace(one, name=f"{case} at {shape}: {one.name}") for one in stated]
    return found


def summary(lines: Sequence[CaseResult]) -> str:
    """One sentence about a run."""
    targeted = [one for one in lines if one.targets]
    missed = sum(bool(one.missed) for one in targeted)
    slower = sum(bool(one.slower_than) for one in lines)
    unmeasured = sum(not one.ok for one in lines)
    return (
        f"{len(targeted) - missed} of {len(targeted)} rows with a target meet it; {slower} rows are slower than a baseline; "
        f"{unmeasured} of {len(lines)} rows were not measured."
    )


MISSED = "#cc0000"
BASELINE = "#888888"
LINE_HEIGHT = 0.19
ROOF_HEIGHT = 5.0


def operation(line: CaseResult) -> str:
    """The operation of a case: the first part of its name."""
    return line.case.split(".")[0]


def by_operation(lines: Sequence[CaseResult]) -> Figure:
    """One line per operation, one marker per kernel at either large shape: the fraction of the copy rate."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line.shape in LARGE and "fraction" in line.values]
    names = list(dict.fromkeys(operation(line) for line in shown))
    with mpl.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(8.6, 1.2 + 0.3 * max(len(names), 4)))
        for position, shape in enumerate(LARGE):
            for missed in (False, True):
                mine = [line for line in shown if line.shape == shape and bool(line.missed) == missed]
                heights = {line.case: 0.12 - 0.24 * position - names.index(operation(line)) for line in mine}
                color = MISSED if missed else SERIES[position]
                label = None if missed else shape
                scatter(axis, mine, heights, color, MARKERS[position], label)
        axis.axvline(1, color="#444444", linewidth=0.9)
        axis.set_yticks([-height for height in range(len(names))], names)
        axis.set_xlim(left=0)
        axis.set_xlabel("fraction of the copy rate")
        if names:
            axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
        figure.tight_layout()
    pyplot.close(figure)
    return figure


def roofline(lines: Sequence[CaseResult]) -> Figure:
    """Both panels, from the lines of one run. What was not measured has its name and no dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in lines if line.shape != SMALL]
    names = list(dict.fromkeys(line.case for line in shown))
    height = 1.6 + LINE_HEIGHT * max(len(names), 30)
    with mpl.rc_context(STYLE):
        figure = pyplot.figure(figsize=(13, height))
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
    bad = next((line.shape for line in lines if line.missed and "fraction" in line.values), None)
    for position, shape in enumerate(shapes_of(lines)):
        mine = [line for line in lines if line.shape == shape]
        heights = {line.case: -names.index(line.case) - 0.16 * position for line in mine}
        for missed in (False, True):
            dots = [line for line in mine if "fraction" in line.values and bool(line.missed) == missed]
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
    axis.set_xlabel("fraction of the copy rate on the fewest bytes")
    axis.set_title("Kernels against their floors", loc="left", pad=34)
    if names:
        axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=6, fontsize=7)


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
            mine = [line for line in measured if line.shape == shape and bool(line.missed) == missed]
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
        axis.legend(loc="lower right", fontsize=7)


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


# The part of the page on calls from JAX, from rows of the table ``jax``; see `jax_calls`.

JAX_TEXT = (
    "Quantizing a bfloat16 tensor from torch and from JAX, by the same kernel, in one process: microseconds a call, of many "
    f"that are queued, which is the larger of what the host and the GPU take. `program` is one compiled function of {PROGRAM} "
    "quantizations, an eighth of its time; XLA's cast, the same under jit, says what JAX takes for one operation of its own."
)


def jax_sections(rows: Iterable[Row]) -> list[Section]:
    """A section per run, none where no JAX was measured."""
    return [
        Section(f"Calls from JAX ({where})", [JAX_TEXT, *missed(found)], [], [jax_table(found)])
        for where, found in by_run(rows, KIND).items()
    ]


def missed(found: Results) -> list[str]:
    """Which ways to call take longer than the target allows."""
    over = [
        f"{name} of {size} ({way} {ratio:.2f})"
        for size in found.settings
        for name in found.with_setting(size).methods
        for way in WAYS
        if (ratio := found.value(size, name, f"{way} over {TORCH}")) is not None and ratio > MOST
    ]
    return (
        [f"**More than {MOST:g} times torch's time: {len(over)}.** " + ", ".join(over) + "."] if over else []
    )


def jax_table(found: Results) -> Table:
    """A line per scheme and size."""
    columns = [
        "scheme",
        "x",
        *(f"{name} (us)" for name in (TORCH, *WAYS, CAST)),
        *(f"{way} over {TORCH}" for way in WAYS),
        "state",
    ]
    lines = []
    for size in found.settings:
        for name in found.with_setting(size).methods:
            times = (number(found.value(size, name, one), 1) for one in (TORCH, *WAYS, CAST))
            ratios = (number(found.value(size, name, f"{way} over {TORCH}"), 2) for way in WAYS)
            lines.append([name, size, *times, *ratios, state(found, size, name)])
    return Table("Calls from JAX beside torch's", columns, lines, found.rows)


def state(found: Results, size: str, name: str) -> str:
    """What the status row says, nothing where all went well."""
    rows = [row.metric for row in found.rows if (row.setting, row.method) == (size, name)]
    said = next((metric for metric in rows if metric.startswith("status: ")), "status: unknown")
    return said.removeprefix("status: ").removeprefix("ok")
