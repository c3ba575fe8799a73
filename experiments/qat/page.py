"""The page of experiment `qat`: losses of PTQ and of QAT, and the recovered part."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.harness.rows import Row
from experiments.models.quantized_model import PLAIN, activations_of
from experiments.qat.real_page import real_findings, real_sections
from experiments.qat.run import (
    BASELINE,
    DEVIATIONS,
    EXPERIMENT,
    NO_PERCENTAGE,
    PTQ,
    QAT,
    RECOVERED,
    RECOVERY,
    RUNS,
    targets_of,
)
from experiments.report import accuracies
from experiments.report.content import Comparison, Drawing, Headline, Section, Table
from experiments.report.phones import dots_twice
from experiments.report.results import Results, Where, best_run, by_run, number
from experiments.report.targets import RunTargets, Target, limits

TITLE = "Loss recovered by QAT on a small proxy model"
QUESTION = "How much of the loss of post-training quantization does training with fake quantization recover?"
ABOUT = (
    "Anyone's model is measured by `ao-lab reproduce qat --model DIR`: fine-tuned as it is and for quantization, beside "
    "torchao's QAT and beside ways without training at their best.",
    (
        "A proxy model: a small byte-level Llama, trained here on the source of sympy. From one trained model, some go "
        "on training in full precision and are quantized afterwards (PTQ), others train with fake quantization and are "
        "converted (QAT): equally long, on the same text, over paired seeds."
    ),
    "Recovered is the part of the PTQ loss that QAT removes: 100 (PTQ - QAT) / (PTQ - float32), mean over seeds.",
)
#: Figures that the top of the page shows: the first that there is.
FEATURED = ("qat-recovery-full-gpu", "qat-recovery-full-cpu", "qat-recovery-quick-cpu")

TEXT = (
    (
        "A proxy model: a small byte-level model of the Llama family, trained here on the source of sympy. All models "
        "start from one trained model, those of a seed on the same text, for as many steps, with the same optimizer. "
        "One trains in full precision; its loss is the zero of all others, and quantized it is the line PTQ. The others"
        ' train after QATConfig\'s step "prepare" for the method of their line, and are measured after step "convert": '
        "QAT. Every linear layer is quantized, lm_head too."
    ),
    "Losses are increases in bits per byte on held-out text over float32 trained equally long, means over seeds of differences "
    "taken seed by seed; after the sign ± half of the 95% interval of a paired t over seeds. Recovered is the mean over seeds "
    "of 100 (PTQ - QAT) / (PTQ - float32).",
    "Seeds differ in the text of the further training alone: intervals and deviations say nothing about another model to "
    "begin with. On a GPU the rate (3e-4, not 1e-4) was chosen by one run on other text and other questions (see the log).",
    f"Where the loss to recover is under {DEVIATIONS} of its own standard deviations over seeds there is no percentage, which "
    "would be a ratio of noise. How many deviations it is stands in its column.",
    (
        "PTQ takes its scales from the amax of a block, as quantize_ does. Float32 scales are learned in QAT and start "
        'where rounding has the least squared error. "PTQ, clipped" is the model trained in full precision with scales '
        "of that kind, and shows what training recovers beyond clipping."
    ),
)


def findings(rows: Sequence[Row]) -> list[str]:
    """What QAT recovers of each method's PTQ loss, of real models and of the stand-in, and targets that are missed."""
    found, real = best_run(by_run(rows, RECOVERY)), real_findings(rows)
    if found is None:
        return real
    where, results = found
    seeds = len({row.seed for row in by_run(rows, RUNS)[where].rows}) if where in by_run(rows, RUNS) else 0
    words = []
    for method in methods_of(results):
        recovered = with_interval(results, method, "recovered", 1)
        if recovered:
            words.append(f"{label(*method)} {recovered}%")
    sentence = [f"QAT recovers of the PTQ loss ({where.run}, {seeds} seeds): {'; '.join(words)}."]
    return [*real, *(sentence if words else []), verdict(results).strip("*")]


def headlines(rows: Sequence[Row]) -> list[Headline]:
    """What is recovered, by the bits of the weights that have a target."""
    found = best_run(by_run(rows, RECOVERY))
    if found is None or found[0].scale == "quick":
        return []
    words, used = [], list[Row]()
    for prefix in (one.key.removesuffix("*") for one in limits(EXPERIMENT)):
        mine = [row for row in found[1].rows if row.metric == RECOVERED and row.method.startswith(prefix)]
        if mine:
            values = [row.value for row in mine]
            names = ", ".join(dict.fromkeys(row.method for row in mine))
            words.append(
                f"{min(values):.1f} to {max(values):.1f}% with {prefix.removesuffix('_')} weights ({names})"
            )
            used += mine
    text = f"Of the loss that quantization costs a small language model, QAT recovers {', '.join(words)}"
    others = [row for row in found[1].rows if row.metric == RECOVERED and row not in used]
    if others:
        least, most = (chosen(others, key=lambda row: row.value) for chosen in (min, max))
        text += f"; without a target {least.value:.1f}% ({least.method}) to {most.value:.1f}% ({most.method})"
    # The rows of what has a target alone: a history is kept of headlines that quote few.
    return [Headline(text, used)] if words else []


def main_finding(rows: Sequence[Row]) -> str:
    """Of which schemes the least and the most is recovered."""
    found = best_run(by_run(rows, RECOVERY))
    recovered = [row for row in found[1].rows if row.metric == RECOVERED] if found else []
    if not recovered:
        return ""
    low, high = (chosen(recovered, key=lambda row: row.value) for chosen in (min, max))
    return (
        f"recovered of a small proxy model's loss: from {low.value:.1f}% ({label(low.setting, low.method)}) to "
        f"{high.value:.1f}% ({label(high.setting, high.method)})"
    )


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of the largest run."""
    found = best_run(by_run(rows, RECOVERY))
    return (
        []
        if found is None
        else [RunTargets(found[0], targets_of(found[1]), "percent of the PTQ loss recovered")]
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """One per run, real models first."""
    seeds = by_run(rows, RUNS)
    runs = by_run(rows, RECOVERY)
    beside = ", fine-tuned on the text that was published"
    found = [*real_sections(rows), *accuracies.sections(EXPERIMENT, rows, beside)]
    return found + [section(where, results, seeds[where]) for where, results in runs.items()]


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Published accuracies of fine-tuned models beside ours of the same model and text."""
    return accuracies.comparisons(EXPERIMENT, rows)


def section(where: Where, results: Results, runs: Results) -> Section:
    """What was lost and recovered, targets that are missed, and every seed."""
    title = f"Recovery on the proxy model ({where})"
    text = [*where.corpus_notes, verdict(results), baseline_text(results, runs), *TEXT]
    return Section(
        title,
        text,
        [loss_plot(where, results)],
        [recovery_table(results), seed_table(runs, methods_of(results))],
    )


def methods_of(results: Results) -> list[tuple[str, str]]:
    """(setting, method) of everything that is trained for, in the order of the list of methods."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows)
    return [one for one in found if one[0] != BASELINE]


def verdict(results: Results) -> str:
    """Which methods with a target reach it, miss it, or have no percentage."""
    by_outcome: dict[str, list[str]] = {"reached": [], "missed": [], "without a percentage": []}
    for target in targets_of(results):
        value, limit = target.measured or "none", target.texts[1]
        by_outcome[outcome_of(target)].append(f"{target.name} ({value} of {limit}%)")
    parts = [f"{outcome}: {', '.join(names) or 'none'}" for outcome, names in by_outcome.items()]
    return f"**Targets of the mean recovered part; {'; '.join(parts)}.**"


def outcome_of(target: Target) -> str:
    """How a mean compares with its target."""
    return {True: "reached", False: "missed", None: "without a percentage"}[target.reached]


def target_of(results: Results, setting: str, method: str) -> Target | None:
    """The target of one method, or None where it has none."""
    mine = Results(row for row in results.rows if (row.setting, row.method) == (setting, method))
    return next(iter(targets_of(mine)), None)


def baseline_text(results: Results, runs: Results) -> str:
    """Bits per byte of the unquantized models, and how far seeds lie apart."""
    parts = [
        f"{name} {number(results.value(BASELINE, name, 'bits per byte'), 4)}"
        for name in PLAIN
        if results.value(BASELINE, name, "bits per byte") is not None
    ]
    spread = results.value(BASELINE, "float32", "bits per byte, standard deviation over seeds")
    seeds = len({row.seed for row in runs.rows})
    return (
        f"Trained equally long without quantization, {seeds} continuations of one model have on average {', '.join(parts)} "
        f"bits per byte on held-out text; float32's standard deviation over them is {number(spread, 4)}."
    )


def loss_plot(where: Where, results: Results) -> Drawing:
    """Both losses of every method with their intervals."""
    found = methods_of(results)
    series, errors = {}, {}
    for name in ("PTQ", "QAT"):
        series[name] = [results.value(*one, f"loss, {name}") for one in found]
        errors[name] = [results.value(*one, f"loss, {name}, 95% interval") for one in found]
    labels = [label(*one) for one in found]
    figures = dots_twice(labels, series, "increase in bits per byte over float32", errors=errors, symlog=0.01)
    caption = (
        "Loss of the model quantized after full-precision training (PTQ) and after quantization-aware training (QAT), "
        "means over seeds with 95% intervals; linear below 0.01, logarithmic above."
    )
    return Drawing(figure_name(where), caption, *figures)


def figure_name(where: Where) -> str:
    """The figure of a run."""
    parts = ["qat-recovery", where.scale, "cpu" if where.device == "cpu" else "gpu", where.other_corpus]
    return "-".join(part for part in parts if part)


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
        "target (%)",
        "target is",
    ]
    lines = []
    for one in methods_of(results):
        target = target_of(results, *one)
        lines.append(
            [
                label(*one),
                *(with_interval(results, one, f"loss, {name}", 4) for name in ("PTQ", "PTQ clipped", "QAT")),
                number(results.value(*one, "loss to recover, in seed deviations"), 1),
                with_interval(results, one, "recovered", 1)
                or ("none: too small a loss" if results.value(*one, NO_PERCENTAGE) is not None else ""),
                number(target.limit, 0) if target else "",
                outcome_of(target) if target else "",
            ]
        )
    return Table("Losses (bits per byte) and what was recovered", columns, lines, results.rows)


def with_interval(results: Results, one: tuple[str, str], metric: str, digits: int) -> str:
    """A mean and half of its interval; nothing where there is none."""
    mean, half = (results.value(*one, name) for name in (metric, f"{metric}, 95% interval"))
    return "" if mean is None else f"{number(mean, digits)} ± {number(half, digits)}"


def seed_table(runs: Results, found: Sequence[tuple[str, str]]) -> Table:
    """Bits per byte of every model: a line per method, PTQ and QAT of each seed."""
    seeds = sorted({row.seed for row in runs.rows})
    values = {(row.setting, row.method, row.metric, row.seed): row.value for row in runs.rows}
    lines = [
        [name, *(number(values.get((BASELINE, name, "bits per byte", seed)), 4) for seed in seeds)]
        for name in PLAIN
    ]
    for one in found:
        for metric, name in ((PTQ, "PTQ"), (QAT, "QAT")):
            cells = [number(values.get((*one, metric, seed)), 4) for seed in seeds]
            lines.append([f"{label(*one)}, {name}", *cells])
    columns = ["model", *(f"seed {seed}" for seed in seeds)]
    return Table("Bits per byte of every seed", columns, lines, runs.rows)
