"""The page of experiment `qat`: losses without and with training for quantization, and what was recovered."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.models.activation_schemes import activations_of
from experiments.models.quantized_model import PLAIN
from experiments.qat.run import BASELINE, NO_PERCENTAGE, PTQ, QAT, RECOVERY, RUNS, TITLE
from experiments.qat.summary import DEVIATIONS
from experiments.report.pages import Drawing, Section, Table
from experiments.report.plots import dots
from experiments.report.results import Results, Where, by_run, number

__all__ = ["TITLE", "sections"]

TEXT = (
    "A stand-in: a small byte-level model of the Llama family, trained here on the source of sympy. All models go on from "
    "one trained model, those of a seed on the same text, for as many steps, with the same optimizer. One trains as it is; "
    "its loss is the zero of all others, and quantized it is the line PTQ. The others train in QATConfig's step prepare for "
    "the method of their line, and are measured converted: QAT. Every linear layer is quantized, lm_head too.",
    "Losses are bits per held-out byte more than float32 trained equally long, means over seeds of differences taken seed by "
    "seed, behind the sign ± half of the 95% interval of a paired t over seeds. Recovered is the mean over seeds of "
    "100 (PTQ - QAT) / (PTQ - float32).",
    "Seeds differ in the text of the further training alone: intervals and deviations say nothing about another model to "
    "begin with. On a GPU the rate (3e-4, not 1e-4) was chosen by one run on other text and another exam (see the log).",
    f"Where the loss to recover is under {DEVIATIONS} of its own standard deviations over seeds there is no percentage, which "
    "would be a ratio of noise. How many deviations it is stands in its column.",
    "PTQ takes its scales from the largest magnitude of a block, as quantize_ does. Float32 scales are learned in QAT and "
    "start where rounding has the least squared error. PTQ, clipped is the plain model under scales of that kind, and tells "
    "what training gives back beyond clipping.",
)


def sections(rows: Sequence[Row]) -> list[Section]:
    """One per run."""
    seeds = by_run(rows, RUNS)
    return [section(where, results, seeds[where]) for where, results in by_run(rows, RECOVERY).items()]


def section(where: Where, results: Results, runs: Results) -> Section:
    """What was lost and recovered, bars that are missed, and every seed."""
    title = f"Recovery on the stand-in ({where})"
    text = [verdict(results), baseline_text(results, runs), *TEXT]
    return Section(
        title, text, [loss_plot(where, results)], [recovery_table(results), seed_table(runs, places(results))]
    )


def places(results: Results) -> list[tuple[str, str]]:
    """(setting, method) of everything that is trained for, in the order of the list of methods."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows)
    return [place for place in found if place[0] != BASELINE]


def verdict(results: Results) -> str:
    """Which methods with a bar reach it, miss it, or have no percentage."""
    told: dict[str, list[str]] = {"reached": [], "missed": [], "without a percentage": []}
    for setting, method in places(results):
        bar, recovered = (results.value(setting, method, metric) for metric in ("bar", "recovered"))
        if bar is not None:
            outcome = outcome_of(recovered, bar)
            told[outcome].append(
                f"{method} ({'none' if recovered is None else number(recovered, 1)} of {bar:.0f}%)"
            )
    parts = [f"{outcome}: {', '.join(names) or 'none'}" for outcome, names in told.items()]
    return f"**Bars on the mean recovered part; {'; '.join(parts)}.**"


def outcome_of(recovered: float | None, bar: float) -> str:
    """How a mean stands against its bar."""
    if recovered is None:
        return "without a percentage"
    return "reached" if recovered >= bar else "missed"


def baseline_text(results: Results, runs: Results) -> str:
    """What the unquantized models need, and how far seeds lie apart."""
    parts = [
        f"{name} {number(results.value(BASELINE, name, 'bits per byte'), 4)}"
        for name in PLAIN
        if results.value(BASELINE, name, "bits per byte") is not None
    ]
    spread = results.value(BASELINE, "float32", "bits per byte, standard deviation over seeds")
    seeds = len({row.seed for row in runs.rows})
    return (
        f"Trained equally long without quantization, {seeds} continuations of one model need on average {', '.join(parts)} "
        f"bits per held-out byte; float32's standard deviation over them is {number(spread, 4)}."
    )


def loss_plot(where: Where, results: Results) -> Drawing:
    """Both losses of every method with their intervals."""
    found = places(results)
    series, errors = {}, {}
    for name in ("PTQ", "QAT"):
        series[name] = [results.value(*place, f"loss, {name}") for place in found]
        errors[name] = [results.value(*place, f"loss, {name}, 95% interval") for place in found]
    labels = [label(*place) for place in found]
    figure = dots(labels, series, "bits per byte more than float32", errors=errors, symlog=0.01)
    caption = (
        "Loss of the model quantized after plain training (PTQ) and trained for quantization (QAT), means over seeds with 95% "
        "intervals; linear below 0.01, logarithmic above."
    )
    return Drawing(f"qat-recovery-{where.scale}-{'cpu' if where.device == 'cpu' else 'gpu'}", caption, figure)


def label(setting: str, method: str) -> str:
    """A method's name with that of the inputs' scheme."""
    activations = activations_of(setting)
    return method if activations is None else f"{method}, inputs {activations}"


def recovery_table(results: Results) -> Table:
    """A line per method."""
    columns = [
        "method",
        "PTQ loss",
        "PTQ, clipped, loss",
        "QAT loss",
        "deviations to recover",
        "recovered (%)",
        "bar (%)",
        "bar is",
    ]
    lines = []
    for place in places(results):
        recovered, bar = (results.value(*place, metric) for metric in ("recovered", "bar"))
        lines.append(
            [
                label(*place),
                *(
                    with_interval(results, place, f"loss, {name}", 4)
                    for name in ("PTQ", "PTQ clipped", "QAT")
                ),
                number(results.value(*place, "loss to recover, in seed deviations"), 1),
                with_interval(results, place, "recovered", 1)
                or ("none: too small a loss" if results.value(*place, NO_PERCENTAGE) is not None else ""),
                number(bar, 0),
                "" if bar is None else outcome_of(recovered, bar),
            ]
        )
    stale = frozenset(label(*place) for place in places(results) if place[1] in results.stale_methods)
    return Table("Losses (bits per byte) and what was recovered", columns, lines, stale)


def with_interval(results: Results, place: tuple[str, str], metric: str, digits: int) -> str:
    """A mean and half of its interval; nothing where there is none."""
    mean, half = (results.value(*place, name) for name in (metric, f"{metric}, 95% interval"))
    return "" if mean is None else f"{number(mean, digits)} ± {number(half, digits)}"


def seed_table(runs: Results, found: Sequence[tuple[str, str]]) -> Table:
    """Bits per byte of every model: a line per method, PTQ and QAT of each seed."""
    seeds = sorted({row.seed for row in runs.rows})
    values = {(row.setting, row.method, row.metric, row.seed): row.value for row in runs.rows}
    lines = [
        [name, *(number(values.get((BASELINE, name, "bits per byte", seed)), 4) for seed in seeds)]
        for name in PLAIN
    ]
    for place in found:
        for metric, name in ((PTQ, "PTQ"), (QAT, "QAT")):
            cells = [number(values.get((*place, metric, seed)), 4) for seed in seeds]
            lines.append([f"{label(*place)}, {name}", *cells])
    return Table("Bits per byte of every seed", ["model", *(f"seed {seed}" for seed in seeds)], lines)
