"""The part of the page of `qat` on real models: what is lost by quantizing, and which part of it each way brings back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from experiments.harness.rows import Interval, Row, interval
from experiments.models.causal_lm import BASE
from experiments.models.quantized_model import WEIGHTS, activations_of
from experiments.qat.arms import CLIPPED, PTQ, PTQ_BASE, QAT, TRAINED, WITH_AUTOROUND, WITH_GPTQ
from experiments.qat.real import TUNED
from experiments.qat.run import DEVIATIONS, recovery
from experiments.report.content import Section, Table
from experiments.report.real_runs import (
    RealRun,
    by_seed,
    findings_of,
    grid_of,
    real_runs,
    title_of,
    training_of,
)
from experiments.report.results import Results, failures, number

#: Ways without training, of which the best is what QAT has to beat.
BASELINES = (PTQ, CLIPPED, WITH_GPTQ, WITH_AUTOROUND)
#: Values of one way by seed.
Seeds = Mapping[int, float]
TEXT = (
    "For each seed the model is fine-tuned as it is, and trained for quantization, on the same sequences in the same order "
    "with the same optimizer; seeds draw other sequences. Increases of the loss are over the fine-tuned model of the seed, in "
    "nats per token, means over seeds with half of the 95% interval of a paired t.",
    "Recovered is what the paper of TorchAO calls it: of what PTQ of the fine-tuned model costs, the percentage that a way "
    "does not cost, 100 (PTQ - way) / (PTQ - fine-tuned), by the loss and by the perplexity. Beyond the best: the same with "
    "the best way without training (rounding, searched scales, GPTQ) in the place of PTQ, so that what clipping alone recovers "
    f"is not counted for training. Where the loss to recover is under {DEVIATIONS} of its deviations over seeds there is no "
    "percentage.",
    (
        "PTQ of the base model: the original model, quantized, over the original model. Learned scales start where "
        "Clip() puts them. ParetoQ has the levels, starts and optimizer of its authors, in the groups of the scheme beside "
        "it and on the sequences of the others, where the authors train much longer, with a scale for each row. "
        "torchao's QAT is prepared, trained and converted by torchao, beside the same PTQ."
    ),
)


def real_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run."""
    return [section(run) for run in real_runs(rows)]


def section(run: RealRun) -> Section:
    """What one model loses and gets back."""
    about = [grid_of(run), training_of(run)]
    tables = [table(run, name, results) for name, results in run.texts.items()]
    tables += [one for one in (tasks(run), training(run)) if one.lines]
    return Section(title_of(run), [*about, *TEXT, *failures(run.whole)], [], tables)


def schemes(run: RealRun) -> list[tuple[str, str]]:
    """Settings and schemes, in the order in which they were measured."""
    found = [(row.setting, row.method.partition(": ")[0]) for row in run.whole.rows if ": " in row.method]
    return list(dict.fromkeys(found))


def label(setting: str, scheme: str) -> str:
    """A scheme, and that of its inputs."""
    inputs = activations_of(setting)
    return scheme if inputs is None else f"{scheme}, inputs {inputs}"


def table(run: RealRun, text: str, results: Results) -> Table:
    """A line per scheme and way: what it costs on a text, and what of PTQ's costs it recovers."""
    columns = [
        "scheme", "way", "perplexity", "increase of the loss", "recovered, loss (%)", "recovered, perplexity (%)",
        "beyond the best without training (%)", "seeds",
    ]  # fmt: skip
    lines = []
    for name, way in ((BASE, ""), (TUNED, "")):
        values = by_seed(results, WEIGHTS, name, "perplexity")
        if values:
            lines.append([name, way, number(fmean(values.values()), 2), "", "", "", "", str(len(values))])
    for setting, scheme in schemes(run):
        lines += [
            line
            for arm in (PTQ_BASE, *BASELINES, *TRAINED)
            if (line := line_of(run, text, setting, scheme, arm))
        ]
    conditions = f"{number(results.value(WEIGHTS, BASE, 'windows'), 0)} windows of "
    conditions += f"{number(results.value(WEIGHTS, BASE, 'tokens of a window'), 0)} tokens"
    return Table(f"{run.model}, {text} ({conditions})", columns, lines, results.rows)


def line_of(run: RealRun, text: str, setting: str, scheme: str, arm: str) -> list[str]:
    """Cells of a way; none where it was not measured."""
    results = run.texts[text]
    losses, perplexities = (
        by_seed(results, setting, f"{scheme}: {arm}", metric) for metric in ("loss", "perplexity")
    )
    if not losses:
        return []
    over = by_seed(results, WEIGHTS, BASE if arm == PTQ_BASE else TUNED, "loss")
    increase = with_interval(differences(losses, over))
    shares = ["", "", ""]
    if arm not in (PTQ_BASE, PTQ):
        shares = [recovered_cell(results, setting, scheme, arm, metric) for metric in ("loss", "perplexity")]
        shares.append(beyond(run, text, setting, scheme, arm) if arm in TRAINED else "")
    mean = number(fmean(perplexities.values()), 2)
    return [label(setting, scheme), arm, mean, increase, *shares, str(len(losses))]


def differences(ours: Seeds, base: Seeds) -> list[float]:
    """Of seeds that both have."""
    return [ours[seed] - base[seed] for seed in sorted(ours) if seed in base]


def with_interval(values: Sequence[float]) -> str:
    """A mean, with half of its interval where there are several."""
    if len(values) < 2:
        return number(values[0], 4) if values else ""
    found = interval(values)
    return f"{number(found.mean, 4)} ± {number(found.half, 4)}"


def share(results: Results, setting: str, scheme: str, start: str, arm: str, metric: str) -> Interval | None:
    """What a way recovers of what another costs, over seeds that have both; None without two seeds, or of too small a loss."""
    series = [
        by_seed(results, WEIGHTS, TUNED, metric),
        *(by_seed(results, setting, f"{scheme}: {one}", metric) for one in (start, arm)),
    ]
    seeds = sorted(set.intersection(*(set(one) for one in series)))
    if len(seeds) < 2:
        return None
    base, ptq, ours = ([one[seed] for seed in seeds] for one in series)
    return recovery(base, ptq, ours).recovered


def recovered_cell(results: Results, setting: str, scheme: str, arm: str, metric: str) -> str:
    """A percentage with half of its interval."""
    found = share(results, setting, scheme, PTQ, arm, metric)
    return "" if found is None else f"{number(found.mean, 1)} ± {number(found.half, 1)}"


def best_baseline(run: RealRun, text: str, setting: str, scheme: str) -> str:
    """The way without training that costs least on the other texts, so that no text chooses what it judges."""

    def mean(results: Results, arm: str) -> float | None:
        losses = by_seed(results, setting, f"{scheme}: {arm}", "loss")
        return fmean(losses.values()) if losses else None

    return run.chosen_by(text, BASELINES, mean) or PTQ


def beyond(run: RealRun, text: str, setting: str, scheme: str, arm: str) -> str:
    """What a trained way recovers of the best one without training, which is named."""
    results, best = run.texts[text], best_baseline(run, text, setting, scheme)
    found = share(results, setting, scheme, best, arm, "loss")
    return "" if found is None else f"{number(found.mean, 1)} ± {number(found.half, 1)} ({best})"


def task_metrics(run: RealRun) -> list[str]:
    """Numbers of tasks of lm-evaluation-harness that are accuracies or perplexities, errors aside."""
    names = dict.fromkeys(row.metric for row in run.whole.rows if ": " in row.metric)
    words = ("acc", "acc_norm", "word_perplexity", "exact_match")
    return [name for name in names if name.rpartition(": ")[2] in words]


def tasks(run: RealRun) -> Table:
    """Numbers of tasks, means over seeds, and what of PTQ's costs is recovered."""
    lines = []
    for metric in task_metrics(run):
        for name in (BASE, TUNED):
            values = by_seed(run.whole, WEIGHTS, name, metric)
            if values:
                lines.append([metric, name, "", number(fmean(values.values()), 4), ""])
        for setting, scheme in schemes(run):
            for arm in (PTQ_BASE, *BASELINES, *TRAINED):
                values = by_seed(run.whole, setting, f"{scheme}: {arm}", metric)
                if values:
                    cell = (
                        ""
                        if arm in (PTQ_BASE, PTQ)
                        else recovered_cell(run.whole, setting, scheme, arm, metric)
                    )
                    lines.append(
                        [metric, label(setting, scheme), arm, number(fmean(values.values()), 4), cell]
                    )
    columns = ["task", "model", "way", "value", "recovered (%)"]
    return Table(f"{run.model}: tasks of lm-evaluation-harness", columns, lines, run.whole.rows)


def training(run: RealRun) -> Table:
    """Seconds of a step and memory of training, over those of fine-tuning without quantization."""
    columns = ["training", "way", "ms a step", "over fine-tuning", "memory beyond the model (MB)"]
    plain = by_seed(run.whole, WEIGHTS, TUNED, "time of a step")
    base, lines = fmean(plain.values()) if plain else None, []
    if base:
        memory = by_seed(run.whole, WEIGHTS, TUNED, "memory of training")
        lines.append([TUNED, "", number(base * 1e3, 1), number(1.0, 2), megabytes(memory)])
    for setting, scheme in schemes(run):
        for arm in TRAINED:
            times = by_seed(run.whole, setting, f"{scheme}: {arm}", "time of a step")
            if times and base:
                mean = fmean(times.values())
                memory = by_seed(run.whole, setting, f"{scheme}: {arm}", "memory of training")
                lines.append(
                    [
                        label(setting, scheme),
                        arm,
                        number(mean * 1e3, 1),
                        number(mean / base, 2),
                        megabytes(memory),
                    ]
                )
    return Table(f"{run.model}: training", columns, lines, run.whole.rows)


def megabytes(values: Seeds) -> str:
    """The most of all seeds, decimal."""
    return number(max(values.values()) / 1e6, 1) if values else ""


def real_findings(rows: Sequence[Row]) -> list[str]:
    """What QAT recovers of each scheme, on each model's first text."""
    return findings_of(rows, finding)


def finding(run: RealRun) -> str:
    """What trained ways recover, and the best way without training."""
    text, results = next(iter(run.texts.items()))
    words = []
    for setting, scheme in schemes(run):
        parts = [
            f"{arm} {number(found.mean, 1)}%"
            for arm in (*BASELINES[1:], QAT, *TRAINED[1:])
            if (found := share(results, setting, scheme, PTQ, arm, "loss")) is not None
        ]
        if parts:
            words.append(f"{label(setting, scheme)}: {', '.join(parts)}")
    if not words:
        return ""
    return (
        f"{run.model}, of the loss that PTQ costs the fine-tuned model on {text}, recovered ({run.where.scale} scale, "
        f"{run.where.device}): {'; '.join(words)}."
    )
