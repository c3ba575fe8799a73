"""The part of the page of `ptq` on sentence encoders and speech models: a section for each run of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from experiments.harness.rows import Row, table_parts
from experiments.models.causal_lm import BASE, MODEL
from experiments.models.pretrained import ENCODER, SPEECH
from experiments.models.programs import NAME
from experiments.models.quantized_model import WEIGHTS, activations_of
from experiments.models.sentence_encoder import PASSAGES, REVIEWS
from experiments.models.speech import DATA
from experiments.ptq.real_page import points
from experiments.report.content import Drawing, Section, Table
from experiments.report.plots import scatter_panels
from experiments.report.real_runs import RealRun, about_of, real_runs, title_of
from experiments.report.results import Results, Where, failures, interval_cell, number
from experiments.runs.benches import BASES, KINDS

#: Below these distances plots are linear.
LINEAR = {ENCODER: 1e-4, SPEECH: 1e-3}
TEXTS = {
    ENCODER: (
        "Weights of all linear layers are quantized, alone and with the layers' inputs (dynamic scales); embeddings, "
        "norms and biases stay float32 and count in the size. Sentence vectors are means over tokens, of length 1.",
        "Film reviews: the accuracy of a logistic regression on the sign of people's ratings, fitted on the dense "
        "model's vectors of other sentences and left as it is. Passages: of each paragraph of seven held-out books "
        "the first half is the query; recall at 1 is the share whose nearest second half, of all paragraphs', is "
        "their own. Distance: 1 - cosine of a text's vector with the dense model's, the mean in thousandths. "
        "Neighbours: of each text's ten nearest by the dense model's vectors the share that stay among the ten "
        "nearest.",
        "Changes are paired by text; after ± stands half of the 95% interval, over sentences and over books. A "
        "change within it stands in parentheses.",
    ),
    SPEECH: (
        "Weights of all linear layers of encoder and decoder are quantized but the head that is tied to the "
        "embedding, alone and with the layers' inputs (dynamic scales); convolutions, embeddings, norms and biases "
        "stay float32 and count in the size.",
        "Ten utterances (five sentences of an audio book, five of card names), each decoded alone, greedy. Word "
        "errors are over all words, both texts through Whisper's English normalizer; with so few words one error is "
        "about a point. Loss and KL, per token of the true text, resolve more. Changes are paired by utterance; after "
        "± stands half of the 95% interval over utterances. A change within it stands in parentheses.",
    ),
}
#: Of each data set its columns: name, metric, its standard error, factor, digits.
Column = tuple[str, str, str, float, int]
COLUMNS: dict[str, tuple[Column, ...]] = {
    REVIEWS: (
        ("accuracy (%)", "accuracy", "", 1.0, 1),
        ("change", "accuracy, change", "accuracy, standard error of the change", 1.0, 1),
        ("distance (1/1000)", "cosine distance", "cosine distance, standard error", 1e3, 2),
        ("neighbours (%)", "neighbours kept", "neighbours kept, standard error", 1.0, 1),
    ),
    PASSAGES: (
        ("recall at 1 (%)", "recall at 1", "", 1.0, 1),
        ("change", "recall at 1, change", "recall at 1, standard error of the change", 1.0, 1),
        ("distance (1/1000)", "cosine distance", "cosine distance, standard error", 1e3, 2),
        ("neighbours (%)", "neighbours kept", "neighbours kept, standard error", 1.0, 1),
    ),
    DATA: (
        ("word errors (%)", "word error rate", "", 1.0, 1),
        ("change", "word error rate, change", "word error rate, standard error of the change", 1.0, 1),
        ("loss", "loss", "", 1.0, 3),
        ("loss, change", "loss, change", "loss, standard error of the change", 1.0, 3),
        ("KL", "KL", "KL, standard error", 1.0, 4),
    ),
}
#: Of programs.
PROGRAMS: tuple[Column, ...] = (
    ("pass@1 (%)", f"{NAME}: pass@1", "", 1.0, 1),
    ("change", f"{NAME}: pass@1, change", f"{NAME}: pass@1, standard error of the change", 1.0, 1),
)
#: The metric of pictures and findings, with its standard error, by task.
MEASURE = {
    ENCODER: ("cosine distance", "cosine distance, standard error", "cosine distance"),
    SPEECH: ("KL", "KL, standard error", "KL (nats)"),
}
#: What a finding says of a data set: metric, change, its standard error.
TOLD = {
    REVIEWS: ("accuracy", "accuracy, change", "accuracy, standard error of the change"),
    PASSAGES: ("recall at 1", "recall at 1, change", "recall at 1, standard error of the change"),
    DATA: ("word error rate", "word error rate, change", "word error rate, standard error of the change"),
}


@dataclass(frozen=True)
class TaskRun:
    """A run of one model of a task."""

    task: str
    run: RealRun

    @property
    def base(self) -> str:
        """The method of the dense model's rows."""
        return BASES[self.task]


def task_runs(rows: Iterable[Row]) -> list[TaskRun]:
    """The runs of encoders and speech models, each model's largest scale first."""
    found: dict[tuple[str, str, str, str], dict[str, list[Row]]] = {}
    for row in rows:
        kind, scale, data = table_parts(row.table)
        for task in (ENCODER, SPEECH):
            if kind.startswith(KINDS[task]):
                key = task, kind.removeprefix(KINDS[task]), scale, row.device
                found.setdefault(key, {}).setdefault(data, []).append(row)
    made = []
    for (task, model, scale, device), tables in found.items():
        texts = {name: Results(tables[name]) for name in COLUMNS if name in tables}
        where = Where(scale, device, model)
        made.append(TaskRun(task, RealRun(model, where, texts, Results(tables.get(MODEL, [])))))
    return sorted(made, key=lambda one: (one.task, one.run.model, one.run.where.scale != "full"))


def task_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each run, and one for programs that language models wrote."""
    return [*map(section, task_runs(rows)), *programs_section(rows)]


def programs_section(rows: Sequence[Row]) -> list[Section]:
    """pass@1 of language models; nothing where it was not measured."""
    tables = [table for run in real_runs(rows) if (table := programs_table(run)).lines]
    about = (
        "HumanEval: one program a problem, greedy; pass@1 is the share that passes its tests. Changes are paired by problem, "
        "after ± stands half of the 95% interval over problems; a change within it stands in parentheses."
    )
    return [Section("Programs that language models write", [about], [], tables)] if tables else []


def programs_table(run: RealRun) -> Table:
    """A line for each scheme whose programs were run."""
    lines = []
    for setting, method in run.measured():
        count = run.whole.value(setting, method, f"{NAME}: problems")
        values = [cell(run.whole, setting, method, column, method == BASE) for column in PROGRAMS]
        if count is not None:
            lines.append([method, activations_of(setting) or "", number(count, 0), *values])
    columns = ["scheme", "inputs in", "problems", *(column[0] for column in PROGRAMS)]
    return Table(title_of(run, ", HumanEval"), columns, lines, run.whole.rows)


def section(one: TaskRun) -> Section:
    """What schemes cost one model."""
    run = one.run
    about = about_of(run, partial(counted, base=one.base))
    tables = [table(one, name, results) for name, results in run.texts.items()]
    found = drawing(one)
    drawings = [found] if found else []
    return Section(title_of(run, f", {one.task}"),
                   [*about, *TEXTS[one.task], *failures(run.whole)], drawings, tables)  # fmt: skip


def counted(name: str, results: Results, base: str) -> str:
    """How much there is of a data set."""
    values = {
        metric: results.value(WEIGHTS, base, metric)
        for metric in ("texts", "utterances", "words", TOLD[name][0])
    }
    counts = ", ".join(
        f"{number(value, 0)} {metric}"
        for metric, value in values.items()
        if value is not None and metric != TOLD[name][0]
    )
    return f"Data {name}: {counts}; the dense model's {TOLD[name][0]} is {number(values[TOLD[name][0]], 1)}%."


def table(one: TaskRun, name: str, results: Results) -> Table:
    """A line for each scheme with its inputs or without."""
    columns = [
        "scheme",
        "inputs in",
        "size (MB)",
        "bits per weight",
        *(column[0] for column in COLUMNS[name]),
    ]
    lines = []
    for setting, method in one.run.measured():
        size, bits = (one.run.whole.value(setting, method, metric) for metric in ("size", "bits per weight"))
        line = [
            method,
            activations_of(setting) or "",
            number(size, 1, 1e-6),
            number(bits, 2),
        ]
        values = [cell(results, setting, method, column, method == one.base) for column in COLUMNS[name]]
        if any(values):
            lines.append([*line, *values])
    return Table(f"{one.run.model}, {name}", columns, lines, [*results.rows, *one.run.whole.rows])


def cell(results: Results, setting: str, method: str, column: Column, dense: bool) -> str:
    """A value with half of its 95% interval; a change inside it in parentheses, of the dense model nothing."""
    _, metric, error, factor, digits = column
    value = results.value(setting, method, metric)
    if value is None or (dense and error):
        return ""
    found = results.with_half(setting, method, metric, error, factor=factor) if error else ""
    return found or number(value, digits, factor)


def drawing(one: TaskRun) -> Drawing | None:
    """Distance from the dense model against bytes: a panel for each data set, weights and with inputs; None without schemes."""
    metric, _, label = MEASURE[one.task]
    panels = one.run.panels(partial(points, one.run, metric, one.base))
    if not panels:
        return None
    figure = scatter_panels(panels, "size of the model (MB, decimal)", label, symlog=LINEAR[one.task])
    caption = f"{one.run.model}: {label} from the dense model against bytes, rounding to the nearest."
    return Drawing(f"ptq-{one.task}-{one.run.ending}", caption, figure)


def task_findings(rows: Sequence[Row]) -> list[str]:
    """What schemes cost the first data set of each model, at its largest scale."""
    found: dict[str, str] = {}
    for one in task_runs(rows):
        for name, results in one.run.texts.items():
            found.setdefault(f"{one.run.model} {name}", finding(one, name, results))
    return [sentence for sentence in found.values() if sentence]


def finding(one: TaskRun, name: str, results: Results) -> str:
    """The change of a data set's metric, the nearest scheme to the dense model first."""
    metric, change, error = TOLD[name]
    known = []
    for setting, method in one.run.measured():
        distance = results.value(setting, method, MEASURE[one.task][0])
        moved, half = results.value(setting, method, change), results.half(setting, method, error)
        if method != one.base and distance is not None and moved is not None and half is not None:
            inputs = " with inputs" if setting != WEIGHTS else ""
            known.append((distance, f"{method}{inputs} {interval_cell(moved, half, noise=False, sign=True)}"))
    base = results.value(WEIGHTS, one.base, metric)
    if not known or base is None:
        return ""
    words = ", ".join(text for _, text in sorted(known))
    return f"{one.run.model}, {metric} on {name} ({one.run.where.run}; dense {base:.1f}%), change in points: {words}."
