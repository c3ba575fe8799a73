"""The page of experiment `speed`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from experiments.harness.rows import Row
from experiments.report.content import Drawing, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.plots import dots
from experiments.report.results import Results, Where, best_run, by_run, lines_of, number
from experiments.report.targets import RunTargets, Target, counts
from experiments.speed.run import MISSING, TARGET_METRIC, target_of

TITLE = "Speed of the reference on the CPU"
QUESTION = "How fast are the functions of the reference on a CPU beside ml_dtypes, XLA and torchao?"
ABOUT = (
    "The functions of `reference` on a CPU beside ml_dtypes, XLA and torchao, called in turn on the same inputs after a check "
    "of the results; and the time of imports.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = (
    "speed-layers-quick-cpu",
    "speed-layers-full-cpu",
    "speed-ratios-quick-cpu",
    "speed-ratios-full-cpu",
)

TEXT = (
    "Ours and a baseline are called in turn in one process on the same random normal float32 values, after a check that the "
    "results are right. The ratio is the baseline's median time over ours, above 1 where ours is faster; after it the 20 and "
    "80 percent quantiles of neighbouring calls.",
    "Threads are left as each runtime sets them, the same for both sides of a pair: NumPy computes on one, torch on its own "
    "number of threads, XLA on a pool over all cores. A line gives how many threads both sides may use, and how many cores "
    "each kept busy (processor time over time passed).",
)


def findings(rows: Sequence[Row]) -> list[str]:
    """How many targets are met, and the smallest and largest ratio."""
    found = best_run(by_run(rows, "speed"))
    if found is None:
        return []
    where, results = found
    held = [one for run in targets_by_run(rows) if run.where == where for one in run.targets]
    sentences = [f"{counts(held, ' targets are met, those of imports too')} ({where.run}){below_one(held)}."]
    return [*sentences, *(f"{words[:1].upper()}{words[1:]}." for words in ratio_words(results))]


def below_one(held: Sequence[Target]) -> str:
    """How many targets of a ratio lie below the baseline's speed, so that meeting them is not being as fast; "" for none."""
    ratios = [one for one in held if one.at_least]
    low = [one for one in ratios if one.limit < 1]
    fast = sum(one.value is not None and one.value >= 1 for one in ratios)
    if not low:
        return ""
    return (
        f"; {len(low)} of the {len(ratios)} targets of a ratio allow less than the baseline's speed, down to "
        f"{min(one.limit for one in low):.2f} of it, and {fast} ratios reach it"
    )


def ratio_words(results: Results) -> list[str]:
    """The median of the speeds over those of each baseline, and the least and the largest with what they are of."""
    found: dict[str, dict[str, float]] = {}
    for setting, method in lines_of(results):
        value = None if method.startswith("import ") else results.value(setting, method, "ratio")
        if value is not None and math.isfinite(value):
            found.setdefault(setting, {})[method] = value
    parts = [f"{name} {spread(ratios)}" for name, ratios in found.items()]
    return [f"speed over that of a baseline, median and extremes: {'; '.join(parts)}"] if parts else []


def spread(ratios: Mapping[str, float]) -> str:
    """The median of ratios, and their extremes with names where there are several."""
    if len(ratios) < 2:
        return " ".join(f"{value:.2f}x ({name})" for name, value in ratios.items())
    low, high = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    return f"{median(ratios.values()):.2f}x of {len(ratios)} ({ratios[low]:.2f}x, {low}, to {ratios[high]:.2f}x, {high})"


def main_finding(rows: Sequence[Row]) -> str:
    """How fast they are beside each baseline."""
    found = best_run(by_run(rows, "speed"))
    return "; ".join(ratio_words(found[1])) if found else ""


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of all comparisons and imports that have one."""
    return [
        RunTargets(where, [replace(one, name=f"{one.name} against {setting}")], unit="times its speed")
        for where, results in by_run(rows, "speed").items()
        for setting, method in lines_of(results)
        if (one := target_of(results, setting, method)) is not None
    ]


def plot(where: Where, results: Results) -> Drawing:
    """Ratios to the baselines, and their targets."""
    pairs = [one for one in lines_of(results) if not one[1].startswith("import ")]
    labels = [f"{method} / {setting}" for setting, method in pairs]
    series = {
        name: [results.value(*one, metric) for one in pairs]
        for name, metric in (("ratio", "ratio"), ("target", TARGET_METRIC))
    }
    figure = dots(labels, series, "time of the baseline over ours", base=1.0)
    caption = "Time of the baseline over ours: right of the line ours is faster."
    return Drawing(f"speed-ratios-{where.scale}-{where.device.replace(' ', '-')}", caption, figure)


#: A case of a layer: its number of rows, its scheme or configuration, and its dtype; and what it is compared with.
LAYER = re.compile(r"(one|\d+) rows?, (.+?), ((?:float32|bfloat16)(?:, compiled)?)")
DENSE = "the dense layer"


def layer_plot(where: Where, results: Results) -> list[Drawing]:
    """Speed of quantized layers over the dense one by rows of the input and dtype: least, median and most of all schemes, other
    baselines behind them; nothing without any layer."""
    found: dict[str, list[float]] = {}
    for setting, method in lines_of(results):
        value, case = results.value(setting, method, "ratio"), LAYER.fullmatch(method)
        if value is None or method.startswith("import "):
            continue
        label = f"{method} / {setting}"
        if case and setting == DENSE:
            label = f"layers, {case[1].replace('one', '1')} row{'s' * (case[1] != 'one')}, {case[3]}"
        found.setdefault(label, []).append(value)
    if not any(label.startswith("layers, ") for label in found):
        return []
    ends = {"least": min, "median": median, "most": max}
    series = {name: [end(values) for values in found.values()] for name, end in ends.items()}
    figures = dots_twice(list(found), series, "speed over the baseline", base=1.0, height=0.24)
    caption = (
        "Speed over the baseline: right of the line ours is faster. Of quantized linear layers, over the dense one, the least, "
        "the median and the most of all schemes that were measured."
    )
    return [Drawing(f"speed-layers-{where.scale}-{where.device.replace(' ', '-')}", caption, *figures)]


def sections(rows: Sequence[Row]) -> list[Section]:
    """A table of ratios and one of import times per run."""
    found = []
    for where, results in by_run(rows, "speed").items():
        tables = [ratio_table(results), import_table(results)]
        found.append(
            Section(f"Ratios ({where})", TEXT, [*layer_plot(where, results), plot(where, results)], tables)
        )
    return found


def ratio_table(results: Results) -> Table:
    """A line per comparison."""
    lines = []
    for setting, method in lines_of(results):
        if not method.startswith("import "):
            cells = [
                results.value(setting, method, name)
                for name in ("ratio", "ratio, 20%", "ratio, 80%", TARGET_METRIC)
            ]
            times = [number(results.value(setting, method, name), 1) for name in ("ours", "theirs")]
            threads = [
                number(results.value(setting, method, "threads"), 0),
                *(
                    number(results.value(setting, method, f"{side}, cores busy"), 1)
                    for side in ("ours", "theirs")
                ),
            ]
            missing = [name for name in results.of_method(method).metrics if name.startswith(MISSING)]
            lines.append(
                [
                    method,
                    setting,
                    *(number(cell, 2) for cell in cells),
                    *times,
                    *threads,
                    verdict(target_of(results, setting, method), missing),
                ]
            )
    columns = [
        "ours",
        "baseline",
        "ratio",
        "ratio, 20%",
        "ratio, 80%",
        "target",
        "ours (ms)",
        "baseline (ms)",
    ]
    columns += ["threads", "ours: cores busy", "baseline: cores busy", "target met"]
    return Table("Ratios to baselines", columns, lines, results.rows)


def verdict(target: Target | None, missing: Sequence[str]) -> str:
    """Yes, no, or why it is not known."""
    if target is None or target.reached is None:
        return missing[0] if missing else ""
    return target.verdict


def import_table(results: Results) -> Table:
    """A line per package."""
    lines = []
    for setting, method in lines_of(results):
        if method.startswith("import "):
            time, low, high, target = (
                results.value(setting, method, name)
                for name in ("time", "time, 20%", "time, 80%", TARGET_METRIC)
            )
            reached = verdict(target_of(results, setting, method), ())
            lines.append([method, setting, *(number(cell, 0) for cell in (time, low, high, target)), reached])
    columns = ["package", "beyond", "median (ms)", "20% (ms)", "80% (ms)", "target", "target met"]
    return Table("Import times", columns, lines, results.rows)
