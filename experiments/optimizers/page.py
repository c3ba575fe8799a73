"""The page of experiment `optimizers`: updates beside those with float32 states, and gaps of trainings."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.optimizers.speed import FLOOR, GRAPH, SPEED, TIME
from experiments.optimizers.training import BASE, GAP, GAPS, HELD_OUT, INTERVAL, PAIRED
from experiments.optimizers.updates import (
    BLOCK,
    KIND,
    LARGEST,
    METHODS,
    OURS,
    PROJECTION,
    RATIOS,
    RMS,
    SETTINGS,
    STOP,
    Setting,
)
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.plots import NARROW, curves
from experiments.report.results import Results, Where, best_run, by_run, number, seeds_in
from experiments.report.targets import RunTargets, Target, limit_of, limits

EXPERIMENT = "optimizers"
#: How the finding of trainings begins.
OVER = "Loss over float32 states"
#: Methods whose states are those of this package.
OWN = tuple(method for method in OURS if method.startswith("ours"))
TITLE = "Optimizer states in 8 and 4 bits"
QUESTION = "How far do stored optimizer states change updates, and do models train as well with them?"
ABOUT = (
    "AdamW whose moments are stored in 8 or 4 bits, of ours and of torchao, whose own functions run here. A second moment "
    "stored as 0 beside a first one that is not makes the next update up to 250,000 times too large; the default states "
    "of this package never store one.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("optimizers-largest-update-full", "optimizers-largest-update-quick")
TEXT = (
    (
        "In each block of 256 gradients one is larger than the others by the ratio. Numbers are over steps 11 to 60, "
        "from moments of 0; with float32 states every largest update is 1. Where small gradients become 0, they do so "
        "from step 40 on, as for rows of an embedding whose tokens a batch does not contain. A largest update near 1 does not "
        "say that small gradients move: an update that stays near 0 has it too. The projection tells, 1 as with float32 states."
    ),
    "torchao's functions are those of its release, uncompiled. bitsandbytes stores the same map in the same blocks.",
)
TRAININGS = (
    "Trainings of one seed have the same initial weights and text. The gap is the loss on held-out text over that with float32 "
    "states, in percent, positive where it is worse; the interval is Student's of 95% over the paired seeds.",
)

SPEEDS = (
    "All take turns in one process on the same parameters and gradients. A step that is launched one by one costs the host's "
    "time too. torchao's and FlashOptim's steps cannot be captured, and torch's fused one keeps its states in bfloat16.",
)


def findings(rows: Sequence[Row]) -> list[str]:
    """The largest updates, and gaps."""
    best = best_run(by_run(rows, KIND))
    words = []
    if best is not None:
        worst = {method: largest(best[1], method) for method in METHODS}
        parts = [f"{method} {times(value, 1)}" for method, value in worst.items() if value is not None]
        worst_case = where_largest(best[1], COMPARED[1])
        said = f" {COMPARED[1]} at its largest{worst_case}." if worst_case else ""
        words.append(
            f"{ordinary(best[1])}Largest update over that with float32 states, any ratio of gradients from 1 to 10^5: "
            f"{'; '.join(parts)}.{said}"
        )
    speed = best_run(by_run(rows, SPEED))
    if speed is not None and speed[0].scale != "quick":
        words.append(f"{speed_text(speed[1])} ({speed[0]}).")
    gaps = best_run(by_run(rows, GAPS))
    if gaps is not None and gaps[0].scale != "quick":
        told = f"{gaps[0]}, {seeds_of(rows, gaps[0])}"
        words.append(f"{OVER} ({told}): {'; '.join(gap_texts(gaps[1]))}.")
    return words


def main_finding(rows: Sequence[Row]) -> str:
    """The largest updates, times of a step, and gaps of trainings."""
    words = [one for one in findings(rows) if not one.startswith(OVER)]
    gaps = best_run(by_run(rows, GAPS))
    if gaps is not None:
        words.append(
            f"Loss of a model trained with them over float32 states ({gaps[0]}, {seeds_of(rows, gaps[0])}): "
            f"{'; '.join(gap_texts(gaps[1]))}."
        )
    return " ".join(words).rstrip(".")


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Differences of updates at ordinary gradients, and the largest updates, by the bits of states."""
    best = best_run(by_run(rows, KIND))
    if best is None:
        return []
    ours = {method.removeprefix("ours, "): largest(best[1], method) for method in OWN}
    theirs = {method: largest(best[1], method) for method in ("torchao, 8 bits", "torchao, 4 bits")}
    parts = [f"{value:.1f} times in {name}" for name, value in ours.items() if value is not None]
    beside = [
        f"{times(value, 1)} in {name.removeprefix('torchao, ')}{where_largest(best[1], name)}"
        for name, value in theirs.items()
        if value is not None
    ]
    if not beside or not parts:
        return []
    text = (
        f"{ordinary(best[1])}Over float32's, the largest update reaches {' and '.join(parts)}, at ratios of gradients from 1 "
        f"to 10^5; torchao's {' and '.join(beside)}"
    )
    return [Headline(text, [row for row in best[1].rows if row.metric in (LARGEST, RMS)])]


#: The methods that a sentence on ordinary gradients compares, and from which largest update on its setting is told.
COMPARED, EXTREME = ("ours, 8 bits", "torchao, 8 bits"), 10.0


def ordinary(results: Results) -> str:
    """The rms difference of updates of 8-bit states where all gradients of a block are alike and at the largest ratio, as the
    beginning of a text; "" where one was not measured."""
    told = []
    for ratio in (RATIOS[0], RATIOS[-1]):
        found = {one: results.value(Setting(ratio, False).name, one, RMS) for one in COMPARED}
        if any(value is None for value in found.values()):
            return ""
        told.append("{} (torchao {})".format(*(number(value, 2) for value in found.values())))
    return (
        f"AdamW's updates with 8-bit states differ from those with float32 states by an rms of {told[0]} with gradients alike "
        f"in a block, {told[1]} with one 10^5 times larger. "
    )


def where_largest(results: Results, method: str) -> str:
    """At which gradients a method's largest update is, where that is an extreme one, and the largest without gradients that
    stop."""
    value = largest(results, method)
    if value is None or value < EXTREME:
        return ""
    found = {one: results.value(one.name, method, LARGEST) for one in SETTINGS}
    where = next(one for one, other in found.items() if other == value)
    going = max((other for one, other in found.items() if not one.stops and other is not None), default=None)
    case = f"one gradient in {BLOCK} {where.ratio:,} times larger"
    stops = f", the others 0 from step {STOP} on; {times(going, 1)} where they go on" if where.stops else ""
    return f" ({case}{stops})"


def times(value: float | None, digits: int) -> str:
    """A ratio as text; of thousands no decimals, and groups of three digits."""
    large = value is not None and 1000 <= abs(value) < float("inf")
    return f"{value:,.0f}" if large else number(value, digits)


def largest(results: Results, method: str) -> float | None:
    """The largest of all settings."""
    values = [row.value for row in results.rows if (row.method, row.metric) == (method, LARGEST)]
    return max(values, default=None)


def seeds_of(rows: Sequence[Row], where: Where) -> str:
    """Over how many seeds the gaps of a run are."""
    trained = by_run(rows, PAIRED).get(where, Results([]))
    seeds: dict[str, set[int]] = {}
    for row in trained.rows:
        if row.metric == HELD_OUT:
            seeds.setdefault(row.method, set()).add(row.seed)
    base = seeds.pop(BASE, set())
    return seeds_in(len(base & mine) for mine in seeds.values())


def gap_texts(results: Results) -> list[str]:
    """Each method's gap with its interval."""
    return [
        f"{method} {number(results.value(setting, method, GAP), 2)} ± {number(results.value(setting, method, INTERVAL), 2)}%"
        for setting in results.settings
        for method in results.methods
    ]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Largest updates of ours, and gaps at full scale."""
    targets_of_runs = []
    for where, results in by_run(rows, KIND).items():
        limit = limit_of(EXPERIMENT, "ours", LARGEST)
        targets = [
            limit.target(
                f"{method}: {LARGEST}",
                largest(results, method),
                unit="",
                value_format=".2f",
                limit_format=".0f",
            )
            for method in OWN
        ]
        targets_of_runs.append(RunTargets(where, targets, LARGEST))
    for where, results in by_run(rows, SPEED).items():
        if where.scale != "quick":
            targets_of_runs.append(RunTargets(where, speed_targets(results), "time of a step"))
    for where, results in by_run(rows, GAPS).items():
        if where.scale != "quick":
            targets_of_runs.append(RunTargets(where, gap_targets(results), "percent of the loss"))
    return targets_of_runs


def gap_targets(results: Results) -> list[Target]:
    """The far end of the interval of each method that has a limit."""
    targets = []
    for setting in results.settings:
        for limit in [one for one in limits(EXPERIMENT) if one.metric == GAP]:
            mean, half = (results.value(setting, limit.key, metric) for metric in (GAP, INTERVAL))
            if mean is not None and half is not None:
                targets.append(
                    limit.target(
                        f"{limit.key}: end of the interval of the gap", abs(mean) + half, unit="%", value_format=".2f",
                        limit_format=".1f", day=results.day(setting, limit.key),
                    )
                )  # fmt: skip
    return targets


def sections(rows: Sequence[Row]) -> list[Section]:
    """Updates, then trainings, run by run."""
    gaps = by_run(rows, GAPS)
    return [
        *(updates_section(where, results) for where, results in by_run(rows, KIND).items()),
        *(speed_section(where, results) for where, results in by_run(rows, SPEED).items()),
        *(
            training_section(where, results, gaps.get(where))
            for where, results in by_run(rows, PAIRED).items()
        ),
    ]


def updates_section(where: Where, results: Results) -> Section:
    """A picture of the largest updates, and tables of all three numbers."""
    series = {
        f"{method}{', small gradients become 0' if stops else ''}": [
            results.value(Setting(ratio, stops).name, method, LARGEST) for ratio in RATIOS
        ]
        for method in ("torchao, 8 bits", "torchao, FP8", "ours, 8 bits")
        for stops in (False, True)
    }
    labels = "ratio of gradients in a block", "largest update over that with float32 states"
    ratios = [f"{ratio:,}" for ratio in RATIOS]
    figure, narrow = (curves(series, *labels, base=1.0, names=ratios, width=width) for width in (7.6, NARROW))
    for one in (figure, narrow):
        one.axes[0].set_yscale("log")
    drawing = Drawing(
        f"optimizers-largest-update-{where.scale}",
        "Largest update over that with float32 states, 1 is as large; where small gradients become 0 and where they go on.",
        figure,
        narrow,
    )
    tables = [numbers(results, metric) for metric in (LARGEST, RMS, PROJECTION)]
    return Section(f"Updates with stored states ({where})", TEXT, [drawing], tables)


def numbers(results: Results, metric: str) -> Table:
    """A metric of every setting and method."""
    lines = [
        [setting, *(times(results.value(setting, method, metric), 2) for method in METHODS)]
        for setting in results.settings
    ]
    rows = [row for row in results.rows if row.metric == metric]
    return Table(metric[0].upper() + metric[1:], ["gradients", *METHODS], lines, rows)


def training_section(where: Where, results: Results, gaps: Results | None) -> Section:
    """Losses of every seed, and gaps."""
    seeds = sorted({row.seed for row in results.rows})
    lines = []
    for setting in results.settings:
        for method in results.methods:
            values = {
                row.seed: row.value for row in results.rows if (row.method, row.metric) == (method, HELD_OUT)
            }
            gap = gaps.value(setting, method, GAP) if gaps is not None else None
            half = gaps.value(setting, method, INTERVAL) if gaps is not None else None
            shown = "" if method == BASE else f"{number(gap, 2)} ± {number(half, 2)}"
            lines.append([method, *(number(values.get(seed), 4) for seed in seeds), shown])
    columns = ["optimizer", *(f"seed {seed}" for seed in seeds), "gap (%)"]
    table = Table("Bits per byte of held-out text", columns, lines, results.rows)
    return Section(f"Trainings ({where})", TRAININGS, [], [table])


def speed_section(where: Where, results: Results) -> Section:
    """A step's time, replayed and launched, beside what a copy of its bytes takes."""
    tables = []
    for setting in results.settings:
        lines = [
            [
                method,
                *(number(results.value(setting, method, f"{TIME}{way}"), 3) for way in (GRAPH, "")),
                number(results.value(setting, method, FLOOR), 3),
            ]
            for method in results.methods
        ]
        columns = ["optimizer", "CUDA graph (ms)", "launched (ms)", "copy of its bytes (ms)"]
        tables.append(Table(f"A step of {setting}", columns, lines, results.rows))
    return Section(f"Time of a step ({where})", SPEEDS, [], tables)


def speed_targets(results: Results) -> list[Target]:
    """The replayed step of each method that has a limit."""
    return [
        limit.target(
            f"{limit.key}: step", results.value(setting, limit.key, f"{TIME}{GRAPH}"), unit="ms", value_format=".2f",
            limit_format=".2f", day=results.day(setting, limit.key),
        )
        for setting in results.settings
        for limit in limits(EXPERIMENT)
        if limit.metric == TIME
    ]  # fmt: skip


def speed_text(results: Results) -> str:
    """Times of ours and of the others, of the largest setting: in a CUDA graph, or that there is none."""
    setting = results.settings[-1]
    parts = []
    for method in results.methods:
        graph, launched = (results.value(setting, method, f"{TIME}{way}") for way in (GRAPH, ""))
        if graph is not None:
            parts.append(f"{method} {number(graph, 2)}")
        elif launched is not None:
            parts.append(f"{method} {number(launched, 2)} (no CUDA graph)")
    return f"A step of {setting} in a CUDA graph, ms: {'; '.join(parts)}"
