"""Sections about accuracy: gaps to the dense model over paired seeds, and every seed's value; of real models what two zeros in
every four weights cost, by score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from experiments.fp8_training.convergence import Gap
from experiments.harness.rows import Row
from experiments.models.pretraining import SMALL
from experiments.models.quantized_model import WEIGHTS
from experiments.pretraining.run import BITS
from experiments.report.content import Drawing, Headline, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.plots import dots
from experiments.report.real_runs import (
    CHANGE,
    CHANGE_ERROR,
    RealRun,
    about_of,
    findings_of,
    quality_cells,
    real_runs,
    title_of,
)
from experiments.report.results import (
    Results,
    Where,
    best_run,
    by_run,
    failures,
    interval_cell,
    number,
    seeds_in,
)
from experiments.report.targets import limit_of
from experiments.sparsity import pairs
from experiments.sparsity import subjects as vision
from experiments.sparsity.pairs import METHODS, STORAGES, stored_as

PAIRS = (
    "Of every seed one model is trained from random weights, then trained on in three ways on the same data in the same order: "
    "dense, with fixed 2:4 masks (found by SparseGPT, which prunes the model first), and with masks that are found anew in "
    "every step (SR-STE). One-shot pruning is of the dense one, so all methods have seen as much. Pruned and quantized are the "
    "linear layers inside the blocks. The gap is how much worse a method is than the dense model of its seed with float "
    "weights; the interval is Student's of 95% over the seeds. A method is within the margin where its whole interval lies "
    "below, beyond it where all lies above, and undecided else.",
    (
        "int4: symmetric, group size 32, weights alone; fp8: e4m3 with per-row scales, inputs too. Symmetric "
        "quantization keeps zeros, so results of int4 with 2:4 were computed with dense weights that hold the zeros; "
        "their bits per weight are those of compressed storage: half the elements, two bits of index for each, and all "
        "scales."
    ),
)
TASKS = {
    vision.KIND: (
        "Vision transformer",
        "The task: read four handwritten digits, each anywhere in its quarter of a 20 x 20 image, faint by up to one half and "
        "under noise; real digits (UCI, 8 x 8 pixels), those of evaluation never seen in training.",
        limit_of(pairs.EXPERIMENT, vision.KIND, "gap").bound,
        "points",
        "percent of digits read",
    ),
    vision.LANGUAGE_KIND: (
        "Language model",
        "A byte-level Llama on a corpus, evaluated on text that was held out.",
        limit_of(pairs.EXPERIMENT, vision.LANGUAGE_KIND, "gap").bound,
        "%",
        "bits per byte, held out",
    ),
}

#: Methods of the first page, and their names there.
QUOTED = {
    "one-shot, magnitude": "pruned by magnitude",
    "one-shot, sparsegpt": "pruned by SparseGPT",
    "fine-tuned, fixed masks": "fine-tuned",
}


def findings(rows: Sequence[Row]) -> list[str]:
    """What the largest run of each subject says of one-shot pruning and of fine-tuning."""
    found = []
    for kind, (title, _, margin, unit, _) in TASKS.items():
        run = best_run(by_run(rows, pairs.gaps_kind(kind)))
        if run is not None:
            where, gaps = run
            words = [
                f"{method} {one.mean:+.2f} ± {one.half:.2f}{spaced(unit)} ({one.verdict(margin)})"
                for method in METHODS[1:]
                if (one := gap_of(gaps, method)) is not None
            ]
            found.append(
                f"{title}, gap to dense, margin {margin:g}{spaced(unit)}, {where}: {'; '.join(words)}."
            )
    return found


def spaced(unit: str) -> str:
    """A unit behind its number."""
    return unit if unit == "%" else f" {unit}"


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """Gaps of pruning at once and of training on, of both subjects."""
    found, used = [], list[Row]()
    for kind, (title, _, _, unit, _) in TASKS.items():
        run = best_run(by_run(rows, pairs.gaps_kind(kind)))
        if run is not None and run[0].scale == "full":
            gaps = {words: gap_of(run[1], method) for method, words in QUOTED.items()}
            said = [
                f"{name} {one.mean:.2f} ± {one.half:.2f}" for name, one in gaps.items() if one is not None
            ]
            counts = seeds_in(one.seeds for one in gaps.values() if one is not None)
            found.append(f"{title.lower()} (in {unit}, {counts}) {', '.join(said)}")
            used += [row for row in run[1].rows if row.method in QUOTED and row.metric == "gap"]
    return [Headline(f"2:4 models lie behind dense ones: {'; '.join(found)}", used)] if found else []


def sections(rows: Sequence[Row]) -> list[Section]:
    """Of all runs of both subjects."""
    found = []
    for kind in TASKS:
        gaps = by_run(rows, pairs.gaps_kind(kind))
        found += [section(kind, where, one, gaps.get(where)) for where, one in by_run(rows, kind).items()]
    return found


def section(kind: str, where: Where, results: Results, gaps: Results | None) -> Section:
    """Gaps with intervals, values of seeds, bits of storage."""
    title, task, margin, unit, _ = TASKS[kind]
    notes = [f"**The margin, named before any sparse training: {margin:g} {unit}.**"]
    if where.scale == "quick":
        size = f", not the {SMALL.name} of full runs" if kind == vision.LANGUAGE_KIND else ""
        notes.append(f"**A proxy model trained for seconds**{size}: its gaps are those of a tiny model.")
    text = [task, *notes, *PAIRS, f"Models: {'; '.join(results.settings)}."]
    tables = [values_table(kind, results)]
    drawings = [values_drawing(kind, where, results)]
    if gaps is not None:
        tables.insert(0, gap_table(kind, gaps))
        drawings.insert(0, gap_drawing(kind, where, gaps))
    return Section(f"{title} ({where})", text, drawings, tables)


def gap_of(gaps: Results, method: str) -> Gap | None:
    """The gap of a method; None where there is none."""
    for setting in gaps.settings:
        mean, half, seeds = (
            gaps.value(setting, method, f"gap{end}") for end in ("", ", 95% interval", ", seeds")
        )
        if mean is not None and half is not None and seeds is not None:
            return Gap(mean, half, int(seeds))
    return None


def gap_table(kind: str, gaps: Results) -> Table:
    """A line for each method, a column for each storage."""
    _, _, margin, unit, _ = TASKS[kind]
    cells = []
    for method in METHODS:
        found = [gap_of(gaps, stored_as(method, storage)) for storage in STORAGES]
        shown = [
            "" if one is None else f"{one.mean:.2f} ± {one.half:.2f} ({one.verdict(margin)})" for one in found
        ]
        seeds = next((str(one.seeds) for one in found if one is not None), "")
        cells.append([method, seeds, *shown])
    names = [storage or "float weights" for storage in STORAGES]
    return Table(
        f"Gap to the dense model ({unit}), with its 95% interval over seeds",
        ["method", "seeds", *names],
        cells,
        gaps.rows,
    )


def gap_drawing(kind: str, where: Where, gaps: Results) -> Drawing:
    """The same as a figure."""
    title, _, margin, unit, _ = TASKS[kind]
    series = {
        storage or "float weights": [gap_of(gaps, stored_as(method, storage)) for method in METHODS]
        for storage in STORAGES
    }
    figures = dots_twice(
        METHODS,
        {name: [one and one.mean for one in found] for name, found in series.items()},
        f"gap to dense ({unit}); the line marks the margin of {margin:g}",
        errors={name: [one and one.half for one in found] for name, found in series.items()},
        base=margin,
    )
    return Drawing(
        f"sparsity-{kind}-gaps-{where.ending}", f"{title}: gaps to dense with 95% intervals.", *figures
    )


def metric_of(kind: str, results: Results) -> str:
    """The metric of a subject that gaps are of."""
    if kind == vision.KIND:
        return vision.ACCURACY
    return next(one for one in results.metrics if one.startswith(f"{BITS}, ") and "/" not in one)


def by_seed(results: Results, method: str, metric: str) -> dict[int, float]:
    """Values of a method by seed."""
    return {row.seed: row.value for row in results.rows if (row.method, row.metric) == (method, metric)}


def values_drawing(kind: str, where: Where, results: Results) -> Drawing:
    """Every seed's value of every method with float weights."""
    title, _, _, _, label = TASKS[kind]
    metric = metric_of(kind, results)
    found = {method: by_seed(results, method, metric) for method in METHODS}
    seeds = sorted({seed for values in found.values() for seed in values})
    series = {f"seed {seed}": [values.get(seed) for values in found.values()] for seed in seeds}
    figure = dots(METHODS, series, label)
    return Drawing(f"sparsity-{kind}-seeds-{where.ending}", f"{title}: every seed, float weights.", figure)


def values_table(kind: str, results: Results) -> Table:
    """Every seed's value, other metrics as means, bits of storage."""
    metric = metric_of(kind, results)
    digits = 2 if kind == vision.KIND else 4
    seeds = sorted({row.seed for row in results.rows})
    methods = [pairs.START, *(stored_as(method, storage) for method in METHODS for storage in STORAGES)]
    others = [vision.WHOLE] if kind == vision.KIND else []
    cells = []
    for method in methods:
        mine = by_seed(results, method, metric)
        means = [by_seed(results, method, name) for name in others]
        bits = by_seed(results, method, pairs.BITS_STORED)
        cells.append(
            [
                method,
                number(mean(mine), digits),
                *(number(mine.get(seed), digits) for seed in seeds),
                *(number(mean(one), digits) for one in means),
                number(mean(bits), 2),
            ]
        )
    columns = ["method", "mean", *(f"seed {seed}" for seed in seeds), *others, pairs.BITS_STORED]
    return Table(metric, columns, cells, results.rows)


def mean(values: dict[int, float]) -> float | None:
    """Of all seeds; None without any."""
    return fmean(values.values()) if values else None


TEXT = (
    "Two of every four weights along a layer's inputs are zero, in all linear layers but a head that is tied to the embedding; "
    "they are pruned at once, in the model's order, and not trained afterwards. int4: the weights that stay are rounded to "
    "int4_g64. Changes are paired by window with the dense model's; after ± stands half of the 95% interval, over windows of "
    "a text of one document and over documents where there are several.",
)


def real_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run."""
    return [
        Section(title_of(run), [*about_of(run), *TEXT, *failures(run.whole)], [],
                [table(run, name, results) for name, results in run.texts.items()])
        for run in real_runs(rows)
    ]  # fmt: skip


def table(run: RealRun, text: str, results: Results) -> Table:
    """A line for each arm."""
    columns = ["weights", "perplexity", "loss, change", "KL", "minutes"]
    lines = []
    for method in dict.fromkeys(row.method for row in results.rows):
        seconds = run.whole.value(WEIGHTS, method, "time to prune")
        lines.append([method, *quality_cells(results, WEIGHTS, method), number(seconds, 2, 1 / 60)])
    return Table(f"{run.model}, {text}", columns, lines, [*results.rows, *run.whole.rows])


def real_findings(rows: Sequence[Row]) -> list[str]:
    """What each score costs each model on its first text."""
    return findings_of(rows, finding)


def finding(run: RealRun) -> str:
    """The costs of one model."""
    text, results = next(iter(run.texts.items()))
    words = []
    for method in dict.fromkeys(row.method for row in results.rows):
        change, half = results.value(WEIGHTS, method, CHANGE), results.half(WEIGHTS, method, CHANGE_ERROR)
        if method.startswith("2:4") and change is not None and half is not None and math.isfinite(change):
            nats = interval_cell(change, half, noise=False, sign=True)
            words.append(f"{method.removeprefix('2:4, ')} {100 * math.expm1(change):+.0f}% ({nats} nats)")
    return (
        f"2:4 without training, {run.model}, perplexity over the dense model's on {text}: {', '.join(words)}."
        if words
        else ""
    )
