"""Sections about trainings: paired seeds with their gaps, curves, sweeps, the larger model, faults."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from experiments.fp8_training.report.lines import Columns
from experiments.fp8_training.training import planted
from experiments.fp8_training.training.convergence import CURVES, GAPS, TRAINED
from experiments.fp8_training.training.counters import UNITS
from experiments.fp8_training.training.gaps import Gap, gap
from experiments.fp8_training.training.plans import BASE_NAMES, LONG, MARGIN, PAIRED, RECIPES, SWEEP
from experiments.harness.rows import Row
from experiments.pretraining.run import BITS
from experiments.report.content import Drawing, Section, Table
from experiments.report.curves import curves
from experiments.report.plots import dots
from experiments.report.results import Results, Where, by_run, number

PAIRS = (
    f"Every recipe trains the same model from the same initial weights on the same text in the same order as bfloat16 does "
    f"(float32 on a CPU), seed by seed. The gap is the loss over that of bfloat16, in percent, positive where the recipe is "
    f"worse; the interval is Student's of 95% over the paired seeds. **The margin, named before anything was trained: "
    f"{MARGIN}% of the loss.** A recipe is within it where its whole interval lies below, beyond it where all lies above, and "
    f"undecided else. All linear layers are converted, the output layer too.",
)
EMULATED = (
    "**On a CPU recipes are emulated**: operands are those of the recipe, bit for bit, their products are of float32. The "
    "model is tiny."
)
#: What stands before the learning rate in a sweep's methods.
RATE = ", rate "
SPEED: Columns = {
    "steps": ("steps", 0, 1.0),
    "trained bytes": ("trained (MB)", 2, 1e-6),
    "time of steps": ("time (s)", 1, 1.0),
    "tokens a second": ("tokens a second (10^3)", 1, 1e-3),
    "share of the bfloat16 peak": ("of the bfloat16 peak (%)", 1, 1.0),
    TRAINED: ("training, last steps", 4, 1.0),
}
FAULTY = (
    "Each fault is planted into one operand of one layer in all steps, and taken out before the weights that it left are "
    "evaluated. Places are those of `reference.training.recipe`: output (x, w), input_grad (g, w.T), weight_grad (g.T, x.T). "
    "Counters are means over steps; those of the training without a fault stand beside them. How far the training in which "
    "nothing is quantized lies from the one without a fault says how far two trainings lie apart that are both right."
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of all runs."""
    gaps, lines = by_run(rows, GAPS), by_run(rows, CURVES)
    found = [
        paired_section(where, results, gaps.get(where), lines.get(where))
        for where, results in by_run(rows, PAIRED).items()
    ]
    for kind, title in ((SWEEP, "Learning rates"), (LONG, "The larger model")):
        found += [
            Section(f"{title} ({where})", [], [], [bits_table(results), speed_table(results)])
            for where, results in by_run(rows, kind).items()
        ]
    return found + [faults_section(where, results) for where, results in by_run(rows, planted.KIND).items()]


def gap_of(gaps: Results, setting: str, method: str, metric: str) -> Gap | None:
    """The gap of a metric; None where there are no rows of it."""
    mean, half, seeds = (
        gaps.value(setting, method, f"gap, {metric}{end}") for end in ("", ", 95% interval", ", seeds")
    )
    return None if mean is None or half is None or seeds is None else Gap(mean, half, int(seeds))


def baseline_gap(rows: Sequence[Row], where: Where, metric: str) -> tuple[str, Gap] | None:
    """Another device's bfloat16 against that of a run, on the same seeds and text: how far two right trainings are apart.

    Returns the other device with the gap; None where no other device trained the base with the same seeds.
    """
    runs = by_run(rows, PAIRED)
    own = base_losses(runs[where], metric) if where in runs else {}
    for other, results in runs.items():
        theirs = base_losses(results, metric)
        shared = sorted(own.keys() & theirs.keys())
        if (
            other.device != where.device
            and (other.scale, other.data) == (where.scale, where.data)
            and len(shared) > 1
        ):
            return other.device, gap([own[one] for one in shared], [theirs[one] for one in shared])
    return None


def base_losses(results: Results, metric: str) -> dict[tuple[str, int], float]:
    """The base's loss by training and seed."""
    names = set(BASE_NAMES.values())
    return {
        (row.setting, row.seed): row.value
        for row in results.rows
        if row.metric == metric and row.method in names
    }


def paired_section(where: Where, results: Results, gaps: Results | None, lines: Results | None) -> Section:
    """Gaps with their intervals, curves, bits of every text, speed."""
    text = [*([EMULATED] if where.device == "cpu" else []), *PAIRS]
    tables, drawings = [], []
    if gaps is not None:
        tables.append(gap_table(gaps))
        drawings.append(gap_drawing(where, gaps))
    if lines is not None:
        drawings.append(curve_drawing(where, lines))
    return Section(
        f"Recipes over paired seeds ({where})", text, drawings, [*tables, bits_table(results), speed_table(results)]
    )  # fmt: skip


def totals(gaps: Results) -> list[str]:
    """Metrics that have gaps: totals of splits first, then single texts."""
    found = [one for one in gaps.metrics if one.startswith("gap, ") and one.count(",") <= 2]
    names = [one.removeprefix("gap, ") for one in found if not one.endswith(("interval", "seeds"))]
    return sorted(names, key=lambda name: "/" in name)


def gap_table(gaps: Results) -> Table:
    """A line for each recipe, a column for each text."""
    metrics, cells = totals(gaps), []
    for setting in gaps.settings:
        for method in dict.fromkeys(row.method for row in gaps.with_setting(setting).rows):
            found = [gap_of(gaps, setting, method, metric) for metric in metrics]
            shown = [
                "" if one is None else f"{one.mean:.3f} ± {one.half:.3f} ({one.verdict(MARGIN)})"
                for one in found
            ]
            seeds = next((str(one.seeds) for one in found if one is not None), "")
            cells.append([method, setting, seeds, *shown])
    names = [metric.removeprefix(f"{BITS}, ") for metric in metrics]
    return Table(
        "Gap to bfloat16 (%), with its 95% interval over seeds", ["recipe", "training", "seeds", *names], cells,
        gaps.rows,
    )  # fmt: skip


def gap_drawing(where: Where, gaps: Results) -> Drawing:
    """Gaps with intervals, of whole splits."""
    metrics = [metric for metric in totals(gaps) if "/" not in metric]
    lines = list(dict.fromkeys((row.setting, row.method) for row in gaps.rows))
    found = {metric: [gap_of(gaps, *line, metric) for line in lines] for metric in metrics}
    figure = dots(
        [f"{method}, {setting}" for setting, method in lines],
        {metric: [one and one.mean for one in values] for metric, values in found.items()},
        f"gap to bfloat16 (%); the line marks the margin of {MARGIN}%",
        errors={metric: [one and one.half for one in values] for metric, values in found.items()},
        base=MARGIN,
    )
    return Drawing(f"fp8-gaps-{where.ending}", "Gaps to bfloat16 with 95% intervals.", figure)


def curve_drawing(where: Where, lines: Results) -> Drawing:
    """How far each recipe's training loss lies above bfloat16's, along the steps: means over seeds that both have."""
    parts = [metric for metric in lines.metrics if " part " in metric]
    paired = [row for row in lines.rows if row.setting.startswith(f"{PAIRED}: ")]
    values = {(row.method, row.seed, row.metric): row.value for row in paired}
    methods = dict.fromkeys(row.method for row in paired)
    seeds = sorted({row.seed for row in paired})
    base = next((name for name in BASE_NAMES.values() if name in methods), "")
    series = {
        method: [relative(values, method, base, seeds, part) for part in parts]
        for method in methods
        if method != base
    }
    figure = curves(series, "part of the steps", "training loss over bfloat16's (%)", base=0.0)
    return Drawing(
        f"fp8-curves-{where.ending}", "Training loss over that of bfloat16, mean over seeds.", figure
    )


def relative(
    values: dict[tuple[str, int, str], float], method: str, base: str, seeds: Sequence[int], part: str
) -> float | None:
    """Percent over the base at one part of the steps; None where no seed has both."""
    pairs = [
        (values[method, seed, part], values[base, seed, part])
        for seed in seeds
        if (method, seed, part) in values and (base, seed, part) in values
    ]
    return fmean(100 * (mine / theirs - 1) for mine, theirs in pairs) if pairs else None


def bits_table(results: Results) -> Table:
    """Bits per byte of every text, a line for each training."""
    metrics = sorted(
        (one for one in results.metrics if one.startswith(f"{BITS}, ")), key=lambda one: "/" in one
    )
    known = {(row.setting, row.method, row.seed, row.metric): row.value for row in results.rows}
    order = {name: place for place, name in enumerate((*BASE_NAMES.values(), *RECIPES))}
    sizes = {setting: place for place, setting in enumerate(results.settings)}
    lines = sorted(
        dict.fromkeys((row.setting, row.method, row.seed) for row in results.rows),
        key=lambda line: (sizes[line[0]], order.get(line[1], len(order)), rate_of(line[1]), line[2]),
    )
    cells = [
        [
            f"{method}, seed {seed}",
            setting,
            *(number(known.get((setting, method, seed, one)), 4) for one in metrics),
        ]
        for setting, method, seed in lines
    ]
    names = [metric.removeprefix(f"{BITS}, ") for metric in metrics]
    return Table(
        "Bits per byte of text that was not trained on", ["training", "of", *names], cells, results.rows
    )


def rate_of(method: str) -> float:
    """The learning rate at the end of a sweep's method; 0 for methods of others."""
    rate = method.rpartition(RATE)[2] if RATE in method else "0"
    return float(rate)


def speed_table(results: Results) -> Table:
    """Means over seeds of steps, time, speed and share of the peak."""
    cells = []
    order = {setting: place for place, setting in enumerate(results.settings)}
    lines = dict.fromkeys((row.setting, row.method) for row in results.rows)
    for setting, method in sorted(lines, key=lambda line: (order[line[0]], rate_of(line[1]))):
        mine = [row for row in results.rows if (row.setting, row.method) == (setting, method)]
        shown = []
        for metric, (_, digits, factor) in SPEED.items():
            values = [row.value for row in mine if row.metric == metric]
            shown.append(number(fmean(values) * factor if values else None, digits))
        cells.append([method, setting, *shown])
    return Table(
        "Speed, means over seeds; trainings beside others have no times",
        ["training", "of", *(name for name, _, _ in SPEED.values())],
        cells,
        results.rows,
    )


def faults_section(where: Where, results: Results) -> Section:
    """Loss of each fault, and the counters of its operand beside those without a fault."""
    setting = results.settings[-1]
    found = {row.method for row in results.rows}
    names = [name for name in map(planted.name_of, planted.CASES) if name in found]
    parts = [metric for metric in results.metrics if " part " in metric]
    series = {name: [results.value(setting, name, part) for part in parts] for name in names}
    figure = curves(series, "part of the steps", "training loss (bits per byte)")
    text = [*([EMULATED] if where.device == "cpu" else []), FAULTY, f"Layer {planted.LAYER}, {setting}."]
    drawing = Drawing(f"fp8-faults-{where.ending}", "Training loss with planted faults.", figure)
    return Section(
        f"Planted faults ({where})", text, [drawing], [loss_table(results, setting, names), counter_table(results, setting)]
    )  # fmt: skip


def loss_table(results: Results, setting: str, names: Sequence[str]) -> Table:
    """Losses, and their change by the fault."""
    metrics = [one for one in results.metrics if one == TRAINED or (one.startswith(BITS) and "/" not in one)]
    cells = []
    for name in names:
        line = [name]
        for metric in metrics:
            value, healthy = (results.value(setting, one, metric) for one in (name, planted.HEALTHY))
            known = value is not None and healthy
            line += [number(value, 4), f"{100 * (value / healthy - 1):+.2f}" if known else ""]
        cells.append(line)
    columns = [part for metric in metrics for part in (metric, "over no fault (%)")]
    return Table("Losses (bits per byte)", ["fault", *columns], cells, results.rows)


def counter_table(results: Results, setting: str) -> Table:
    """Counters at the place of each fault, with it and without."""
    cells = []
    for fault in planted.FAULTS:
        line = [fault.name, fault.place]
        for name in UNITS:
            pair = [
                results.value(setting, one, f"{fault.place}: {name}") for one in (fault.name, planted.HEALTHY)
            ]
            line.append(" / ".join(number(value, 2) or "-" for value in pair))
        cells.append(line)
    columns = ["fault", "operand", *(f"{name} ({unit})" for name, unit in UNITS.items())]
    return Table("Counters of the operand, with the fault / without", columns, cells, results.rows)


__all__ = ["gap_of", "rate_of", "sections", "totals"]
