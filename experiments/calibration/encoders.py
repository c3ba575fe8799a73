"""The part of experiment `calibration` on sentence encoders: what methods with data win over rounding in distance of vectors.

Methods see stretches of the training books, LENGTH tokens between the tokens that begin and end a text. "Recovered" is the
share of rounding's mean cosine distance from the dense model's vectors that a method takes away, paired by text with its
standard error (linearized ratio), on data that no method saw (`experiments.models.sentence_encoder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ao_lab.cli.evaluate import encoder
from experiments.calibration.run import (
    BATCH,
    EXPERIMENT,
    ROUNDING,
    Case,
    Run,
    arms_of,
    cases_of,
    methods_of,
    quantized,
    share,
)
from experiments.data.texts import calibration_documents, drawn_sequences, prose_of
from experiments.harness.measuring import Deadline, Values, attempt, bar, free, keep, status
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.architectures import ENCODER
from experiments.models.causal_lm import FILE, MODEL, RealModel, not_tried, sizes
from experiments.models.quantized_model import WEIGHTS
from experiments.models.sentence_encoder import BASE, EncoderBench, Judged, values_of
from experiments.ptq.task_page import GRID, TaskRun, counted, task_runs
from experiments.report.content import Section, Table
from experiments.report.results import Results, failures, number
from experiments.runs.benches import KINDS, encoder_bench
from experiments.runs.real_models import facts
from experiments.runs.run import Settings

#: Tokens of a sequence, and sequences that methods see, by scale.
LENGTH = 128
SEQUENCES = {"quick": 64, "full": 1024}
RECOVERED, RECOVERED_ERROR = "distance, recovered", "distance, standard error of the recovered"


@dataclass
class EncoderRun(Run):
    """A run whose bench is an encoder's, with what rounding does in each scheme, by data."""

    judged: dict[str, dict[str, Judged]] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The kind of its tables."""
        return KINDS[ENCODER] + self.bench.model.name

    @property
    def encoder(self) -> EncoderBench:
        """The bench."""
        bench: object = self.bench
        if not isinstance(bench, EncoderBench):
            raise TypeError(f"an encoder's bench is an EncoderBench, got {type(bench).__name__}")
        return bench


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one encoder; rows of what failed."""
    kind, failed = KINDS[ENCODER] + model.name, list[Row]()
    table = table_name(kind, settings.scale, MODEL)
    tasks = [
        (case, arm) for case in cases_of(settings) if case.budget is None for arm in arms_of(settings, case)
    ]
    todo = [(case, arm) for case, arm in tasks if not journal.finished(table, case.setting, arm)]
    if not todo:
        return []
    here = prepared(settings, model)
    journal.add(dense_rows(here))
    with bar(model.name, len(todo)) as step:
        for case, arm in todo:
            for data, values in measure(here, case, arm, deadline).items():
                keep(journal, failed, put(here, data, case.setting, arm, values))
            free()
            step(f"{arm}, {case.setting}")
    return failed


def prepared(settings: Settings, model: RealModel) -> EncoderRun:
    """A loaded encoder, its data, and the sequences that methods see."""
    encode, _, beginning = encoder(model.folder)
    bench = encoder_bench(settings, model)
    documents = calibration_documents(prose_of(settings.text, settings.cache))
    end = bench.tokenizer.sep_token_id or bench.tokenizer.eos_token_id

    def draw(seed: int) -> list[torch.Tensor]:
        count = SEQUENCES[settings.scale]
        ids = drawn_sequences(documents, encode, LENGTH, count, seed, list(beginning.values()))
        if end is not None:
            ids[:, -1] = end
        return list(ids.to(settings.device).split(8 * BATCH[settings.device]))

    return EncoderRun(settings, bench, draw, draw(settings.seed))  # type: ignore[arg-type]


def dense_rows(here: EncoderRun) -> list[Row]:
    """Rows of the encoder as it is."""
    base = here.bench.base
    rows = put(here, MODEL, FILE, FILE, facts(here.bench))
    rows += put(here, MODEL, WEIGHTS, BASE, {**sizes(base), **status("ok")})
    for data, values in here.encoder.results(base).items():
        rows += put(here, data, WEIGHTS, BASE, {**values, **status("ok")})
    return rows


def put(here: EncoderRun, data: str, setting: str, method: str, values: Values) -> list[Row]:
    """Rows of an encoder."""
    return here.settings.rows(EXPERIMENT, here.kind, data, setting, method, values)


def measure(here: EncoderRun, case: Case, arm: str, deadline: Deadline) -> dict[str, Values]:
    """Values of one method in one scheme by the data of their tables."""
    if reason := deadline.reason():
        return {MODEL: status(reason)}
    try:
        chosen = methods_of(arm)
    except (KeyError, ValueError) as error:
        return {MODEL: status(f"missing: {error}")}
    found: dict[str, Values] = {}

    def work() -> Values:
        if case.setting not in here.judged and arm != ROUNDING:
            here.judged[case.setting] = here.encoder.judged(quantized(here, case, ())[1])
        values, model = quantized(here, case, chosen)
        ours = here.encoder.judged(model)
        if arm == ROUNDING:
            here.judged[case.setting] = ours
        for data, mine in ours.items():
            shares = {} if arm == ROUNDING else recovered(mine, here.judged[case.setting][data])
            found[data] = {**values_of(mine, here.encoder.dense[data]), **shares, **status("ok")}
        return values

    whole = not_tried(attempt(work))
    return {**found, MODEL: whole} if "status: ok" in whole else {MODEL: whole}


def recovered(ours: Judged, rounding: Judged) -> Values:
    """The share of rounding's distance that is taken away, in percent, with its standard error."""
    part, error = share(ours.distance, rounding.distance, ours.documents)
    return {RECOVERED: (100 * part, "%"), RECOVERED_ERROR: (100 * error, "%")}


# The part of the page.

TEXT = (
    "Weights of all linear layers are quantized; where a setting names inputs, these are quantized too, with dynamic scales. "
    "Distance: 1 - cosine of a text's vector with the dense model's, the mean in thousandths; recovered is the share of "
    "rounding's distance that a method takes away, paired by text. After ± stands the standard error over texts or books."
)


SHOWN = (
    "cosine distance",
    "cosine distance, standard error",
    RECOVERED,
    RECOVERED_ERROR,
    "neighbours kept",
)


def encoder_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each encoder."""
    return [section(one) for one in task_runs(rows) if one.task == ENCODER]


def section(one: TaskRun) -> Section:
    """What methods win on one encoder."""
    run = one.run
    about = [
        f"**Grid of the file's weights before:** {run.told(GRID)}. The baseline is the model as that file gives it."
    ]
    about += [counted(name, results, one.base) for name, results in run.texts.items()]
    tables = [table(run.model, name, results) for name, results in run.texts.items()]
    title = f"{run.model}, {one.task} ({run.where.scale} scale, {run.where.device})"
    return Section(title, [*about, TEXT, *failures(run.whole)], [], tables)


def table(model: str, name: str, results: Results) -> Table:
    """A line for each scheme and method."""
    lines = []
    for setting, method in dict.fromkeys((row.setting, row.method) for row in results.rows):
        values = [results.value(setting, method, metric) for metric in SHOWN]
        distance, error, part, part_error, kept = values
        if distance is None or error is None or method == BASE:
            continue
        share_text = "" if part is None else f"{number(part, 1)} ± {number(part_error, 1)}"
        cells = [f"{number(1e3 * distance, 2)} ± {number(1e3 * error, 2)}", share_text, number(kept, 1)]
        lines.append([setting, method, *cells])
    columns = ["scheme", "method", "distance (1/1000)", "recovered (%)", "neighbours (%)"]
    return Table(f"{model}, {name}: methods with data", columns, lines, results.rows)
