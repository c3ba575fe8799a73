"""Sections about trainings: paired seeds with their gaps, curves, sweeps, the larger model, faults; and all targets.

Targets of speed and memory are relative to bfloat16 and torchao in the same table. Those of the recipes themselves are for
precise sums in both gradients; "fast sums" have their own. Times and memory of a CPU say nothing, so they have no target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from experiments.fp8_training import blocks, convergence, linear
from experiments.fp8_training.convergence import CURVES, GAPS, TRAINED, UNDECIDED, UNITS, Gap, gap
from experiments.fp8_training.methods import (
    BASE_NAMES,
    FLOAT8,
    LONG,
    MARGIN,
    MXFP8,
    OURS,
    PAIRED,
    PLAIN,
    RECIPES,
    SUMMED_FAST,
    SWEEP,
    Method,
)
from experiments.harness.revision import TORCHAO
from experiments.harness.rows import Row
from experiments.models.llama import LLAMA_3_8B_TWO_LAYERS
from experiments.pretraining.page import COMMON_TEXT
from experiments.pretraining.run import BITS, of_common
from experiments.report.content import Drawing, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.plots import curves
from experiments.report.results import Columns, Results, Where, best_run, by_run, number
from experiments.report.targets import (
    RunTargets,
    Target,
    by_device,
    counts,
    known,
    limit_of,
    limits,
    missed,
    rest,
)

PAIRS = (
    f"Every recipe trains the same model from the same initial weights on the same text in the same order as bfloat16 does "
    f"(float32 on a CPU), seed by seed. The gap is the loss over that of bfloat16, in percent, positive where the recipe is "
    f"worse; the interval is Student's of 95% over the paired seeds. **The margin, named before anything was trained: "
    f"{MARGIN}% of the loss.** A recipe is within it where its whole interval lies below, beyond it where all lies above, and "
    f"undecided else. All linear layers are converted, the output layer too.",
    COMMON_TEXT,
)
EMULATED = (
    "**On a CPU recipes are emulated**: operands are those of the recipe, bit for bit, and are multiplied in "
    "float32. The model is tiny."
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
    "Each error is injected into one operand of one layer in all steps, and removed before the resulting weights "
    "are evaluated. Places are those of `reference.training.recipe`: output (x, w), input_grad (g, w.T), "
    "weight_grad (g.T, x.T). Counters are means over steps, beside those of the training without an injected error."
    " The distance between the training in which nothing is quantized and the one without injected errors shows how"
    " far apart two correct trainings lie."
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
    return found + [
        faults_section(where, results) for where, results in by_run(rows, convergence.KIND).items()
    ]


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
    metrics = [one for one in totals(gaps) if "/" not in one and one not in of_common([one])]
    lines = list(dict.fromkeys((row.setting, row.method) for row in gaps.rows))
    found = {metric: [gap_of(gaps, *line, metric) for line in lines] for metric in metrics}
    figures = dots_twice(
        [f"{method}, {setting}" for setting, method in lines],
        {metric: [one and one.mean for one in values] for metric, values in found.items()},
        f"gap to bfloat16 (%); thin line: 0, thick line: the margin of {MARGIN}%",
        errors={metric: [one and one.half for one in values] for metric, values in found.items()},
        base=MARGIN,
        height=0.1 + 0.09 * len(metrics),
    )
    return Drawing(f"fp8-gaps-{where.ending}", "Gaps to bfloat16 with 95% intervals.", *figures)


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
    figure = curves(series, "steps (%)", "training loss over bfloat16's (%)", base=0.0, percent=True)
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
    metrics += of_common(results.metrics)
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
    names = [name for name in map(convergence.fault_name_of, convergence.CASES) if name in found]
    parts = [metric for metric in results.metrics if " part " in metric]
    series = {name: [results.value(setting, name, part) for part in parts] for name in names}
    figure = curves(series, "steps (%)", "training loss (bits per byte)", percent=True)
    text = [*([EMULATED] if where.device == "cpu" else []), FAULTY, f"Layer {convergence.LAYER}, {setting}."]
    drawing = Drawing(f"fp8-faults-{where.ending}", "Training loss with injected errors.", figure)
    return Section(
        f"Injected errors ({where})", text, [drawing], [loss_table(results, setting, names), counter_table(results, setting)]
    )  # fmt: skip


def loss_table(results: Results, setting: str, names: Sequence[str]) -> Table:
    """Losses, and their change by the fault."""
    metrics = [one for one in results.metrics if one == TRAINED or (one.startswith(BITS) and "/" not in one)]
    cells = []
    for name in names:
        line = [name]
        for metric in metrics:
            value, healthy = (results.value(setting, one, metric) for one in (name, convergence.HEALTHY))
            known = value is not None and healthy
            line += [number(value, 4), f"{100 * (value / healthy - 1):+.2f}" if known else ""]
        cells.append(line)
    columns = [part for metric in metrics for part in (metric, "over no error (%)")]
    return Table("Losses (bits per byte)", ["fault", *columns], cells, results.rows)


def counter_table(results: Results, setting: str) -> Table:
    """Counters at the place of each fault, with it and without."""
    cells = []
    for fault in convergence.FAULTS:
        line = [fault.name, fault.place]
        for name in UNITS:
            pair = [
                results.value(setting, one, f"{fault.place}: {name}")
                for one in (fault.name, convergence.HEALTHY)
            ]
            line.append(" / ".join(number(value, 2) or "-" for value in pair))
        cells.append(line)
    columns = ["fault", "operand", *(f"{name} ({unit})" for name, unit in UNITS.items())]
    return Table("Counters of the operand, with the injected error / without", columns, cells, results.rows)


EXPERIMENT = "fp8_training"
TIME, TIME_RATIO, SPEED_RATIO = "time", "time over bfloat16", "speed over bfloat16"
#: What the target of a step's speed is called.
FASTEST = f"{SPEED_RATIO}, both compiled or each at its best"
MEMORY_RATIO = "peak memory over bfloat16"


def ours(recipe: str, *, fast_sums: bool = False) -> str:
    """The name of a recipe of ours in rows."""
    return Method(library=OURS, recipe=recipe, fast_sums=fast_sums).name


#: Metrics of targets that no row has.
OVER_TORCHAO, EAGER_OVER_COMPILED = "time over torchao's best", "time of eager over compiled"
#: Ours over the same gathered as bfloat16 on two GPUs, and the bytes that are gathered.
OF_WIDE, GATHERED = "speed over bfloat16 all-gather", "all-gather"
#: How text shows the values of targets.
SHOWN = {"value_format": ".3f"}


def of_linear(where: Where, results: Results) -> list[Target]:
    """Targets of one shape."""
    if where.device == "cpu":
        return []
    mine = [one for one in limits(EXPERIMENT) if one.parts[0] == where.data]
    found = [
        one.target(
            f"{method}, {setting}: {TIME_RATIO}",
            results.value(setting, method, TIME_RATIO),
            day=results.day(setting, method),
            **SHOWN,
        )
        for one in mine
        for method in one.parts[1:]
        for setting in (linear.EAGER, linear.GRAPH)
    ]
    return found + [
        one.target(
            f"{ours(recipe)}, {linear.EAGER}: {OVER_TORCHAO}",
            over_torchao(results, recipe),
            day=results.day(linear.EAGER, ours(recipe)),
            **SHOWN,
        )
        for one in mine
        if one.metric == OVER_TORCHAO
        for recipe in FLOAT8
    ]


def over_torchao(results: Results, recipe: str) -> float | None:
    """Ours over the shortest eager time of torchao's rows of that recipe, compiled or not; None where either is missing."""
    times = [results.value(linear.EAGER, one, TIME) for one in theirs(recipe)]
    return ratio(results.value(linear.EAGER, ours(recipe), TIME), shortest(times))


def theirs(recipe: str) -> list[str]:
    """torchao's rows of a recipe, compiled or not."""
    methods = [Method(library=TORCHAO, recipe=recipe, compiled=compiled) for compiled in (False, True)]
    return [linear.label(one) for one in methods]


def of_blocks(where: Where, results: Results) -> list[Target]:
    """Targets of two blocks of Llama-3-8B; other models have none."""
    if where.device == "cpu" or where.data != LLAMA_3_8B_TWO_LAYERS.name:
        return []
    fast = [one for one in SUMMED_FAST for _ in (False, True)]
    names = [ours(one, fast_sums=bool(number % 2)) for number, one in enumerate(fast)]
    found = [
        target for name, one in zip(names, fast, strict=True) for target in of_method(results, name, one)
    ]
    others = [ours(one) for one in (*FLOAT8, MXFP8) if one not in SUMMED_FAST]
    return found + [target for name in others for target in of_memory(results, name)]


def of_method(results: Results, name: str, recipe: str) -> Iterator[Target]:
    """Speed over bfloat16, eager over compiled, and memory both ways."""
    eager, compiled = (blocks.blocks(2, compiled=one).setting for one in (False, True))
    speeds = [results.value(compiled, name, SPEED_RATIO), best_over_best(results, name, (eager, compiled))]
    fastest = max((one for one in speeds if one is not None), default=None)
    times = [results.value(setting, name, TIME) for setting in (eager, compiled)]
    speed = limit_of(EXPERIMENT, recipe, SPEED_RATIO)
    shown = {"day": results.day(compiled, name), **SHOWN}
    yield speed.target(f"{name}: {FASTEST}", fastest, **shown)
    over_compiled = limit_of(EXPERIMENT, blocks.KIND, EAGER_OVER_COMPILED)
    yield over_compiled.target(f"{name}: {EAGER_OVER_COMPILED}", ratio(*times), **shown)
    yield from of_memory(results, name)


def of_memory(results: Results, name: str) -> Iterator[Target]:
    """The largest peak of memory over bfloat16's, eager and compiled."""
    memory = limit_of(EXPERIMENT, blocks.KIND, MEMORY_RATIO)
    for setting in (blocks.blocks(2, compiled=one).setting for one in (False, True)):
        value, day = results.value(setting, name, MEMORY_RATIO), results.day(setting, name)
        yield memory.target(f"{name}, {setting}: {MEMORY_RATIO}", value, day=day, **SHOWN)


def of_fsdp(where: Where, results: Results) -> list[Target]:
    """Float8 against bfloat16 all-gather of each recipe on two GPUs, and the bytes that are gathered."""
    if where.device == "cpu":
        return []
    setting, found = blocks.TWO_GPUS.setting, list[Target]()
    base = results.value(setting, blocks.SIDES[0].name, GATHERED)
    for side in blocks.SIDES:
        if side.codes:
            shown = {"day": results.day(setting, side.name), **SHOWN}
            speed, sent = (results.value(setting, side.name, metric) for metric in (OF_WIDE, GATHERED))
            faster, fewer = (limit_of(EXPERIMENT, blocks.FSDP_KIND, metric) for metric in (OF_WIDE, GATHERED))
            found.append(faster.target(f"{side.name}: {OF_WIDE}", speed, **shown))
            found.append(fewer.target(f"{side.name}: {GATHERED} over bfloat16's", ratio(sent, base), **shown))
    return found


def best_over_best(results: Results, name: str, settings: Sequence[str]) -> float | None:
    """bfloat16's shortest time among some settings over a method's; None where one is missing."""
    base, mine = ([results.value(one, method, TIME) for one in settings] for method in (PLAIN.name, name))
    return None if None in (*base, *mine) else ratio(shortest(base), shortest(mine))


def shortest(times: Sequence[float | None]) -> float | None:
    """The shortest of the times that were measured."""
    return min((one for one in times if one is not None), default=None)


def ratio(value: float | None, base: float | None) -> float | None:
    """value / base, where both were measured."""
    return None if value is None or base is None else value / base


#: What has targets, by kind of table, and how its tables are called.
TARGETS: dict[str, tuple[Callable[[Where, Results], list[Target]], tuple[str, ...]]] = {
    linear.KIND: (
        of_linear,
        tuple(
            dict.fromkeys(
                one.parts[0] for one in limits(EXPERIMENT) if one.metric in (TIME_RATIO, OVER_TORCHAO)
            )
        ),
    ),
    blocks.KIND: (of_blocks, (LLAMA_3_8B_TWO_LAYERS.name,)),
    blocks.FSDP_KIND: (of_fsdp, (LLAMA_3_8B_TWO_LAYERS.name,)),
}


def finding(rows: Sequence[Row]) -> list[str]:
    """How many targets are reached, of all and of speed and memory, and how many were not measured, by device; nothing of
    one on which none was."""
    parts = by_device(speed_targets(rows))
    return [
        f"Targets reached on {device}: {counts(targets)}; of speed and memory alone {counts(parts.get(device, []))}."
        for device, targets in by_device(targets_by_run(rows)).items()
        if any(target.value is not None for target in targets)
    ]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Those of speed and memory, then gaps of paired trainings to bfloat16."""
    return [*speed_targets(rows), *gap_targets(rows)]


def speed_targets(rows: Sequence[Row]) -> list[RunTargets]:
    """Of single layers, of blocks and of two GPUs, on every device that measured one of these; those of a table that is
    missing have no value."""
    tables = {kind: by_run(rows, kind) for kind in TARGETS}
    devices = dict.fromkeys(
        one.device for runs in tables.values() for one in runs if (one.scale, one.device) != ("quick", "cpu")
    )
    return [
        RunTargets(where, of_one(where, tables[kind].get(where, Results([]))), kind)
        for device in devices
        for kind, (of_one, names) in TARGETS.items()
        for where in (Where("full", device, name) for name in names)
    ]


def gap_targets(rows: Sequence[Row]) -> list[RunTargets]:
    """The mean gap of each recipe to bfloat16 on each text, of the largest run: at most the margin. A gap whose interval
    holds the margin is decided neither way and has no target."""
    run = best_run(by_run(rows, GAPS))
    if run is None or run[0].scale != "full":
        return []
    where, gaps = run
    metrics = [one for one in totals(gaps) if one.startswith(BITS) and "/" not in one]
    lines = dict.fromkeys((row.setting, row.method) for row in gaps.rows)
    found = [gap_target(gaps, *line, metric) for line in lines for metric in metrics]
    return [RunTargets(where, [one for one in found if one is not None], "loss over bfloat16's")]


def gap_target(gaps: Results, setting: str, method: str, metric: str) -> Target | None:
    """The mean gap of a recipe on a text, with its interval in the name; None where it was not measured or is undecided."""
    gap = gap_of(gaps, setting, method, metric)
    if gap is None or gap.verdict(MARGIN) == UNDECIDED:
        return None
    name = f"{method}, {metric} (95% interval ± {gap.half:.2f})"
    return Target(name, gap.mean, MARGIN, False, "%", ".2f", day=gaps.day(setting, method))


def verdict(targets: Sequence[Target]) -> list[str]:
    """How many targets are missed, and which, of those that were measured; how many were not."""
    measured = known(targets)
    late, ending = missed(measured), rest(targets)
    if late:
        words = f"**Missed targets: {len(late)} of {len(measured)}{ending}.** "
        return [words + "; ".join(map(str, late)) + "."]
    if not measured:
        return [f"None of the {len(targets)} targets was measured."] if targets else []
    return [f"All {len(measured)} values that have a target meet it{ending}."]


def target_table(targets: Sequence[Target], rows: Sequence[Row] = ()) -> list[Table]:
    """All targets of a section, also of what was not measured; none where it has none."""
    lines = [
        [one.name, one.measured, f"{'≥' if one.at_least else '≤'} {one.texts[1]}", one.verdict]
        for one in targets
    ]
    return [Table("Targets", ["target", "measured", "limit", "reached"], lines, rows)] if lines else []
