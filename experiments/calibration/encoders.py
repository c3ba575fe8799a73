"""The part of experiment `calibration` on sentence encoders: what methods with data win over rounding in distance of vectors.

Methods see stretches of the training books, LENGTH tokens between the tokens that begin and end a text. "Recovered" is the
share of rounding's mean cosine distance from the dense model's vectors that a method takes away, paired by text with its
standard error (linearized ratio), on data that no method saw (`experiments.models.sentence_encoder`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import nn

from experiments.calibration.cases import (
    DRAWS_PART,
    EXPERIMENT,
    ROUNDING,
    Case,
    arms_of,
    cases_of,
    methods_of,
    not_there,
)
from experiments.calibration.peers.records import PEERS
from experiments.calibration.run import Run, add_dense, quantized, share, unfinished
from experiments.calibration.unfinished import KeptRounding
from experiments.harness.measuring import Deadline, Values, status
from experiments.harness.rows import Journal, Row
from experiments.models.causal_lm import RealModel
from experiments.models.pretrained import ENCODER
from experiments.models.sentence_encoder import BASE, EncoderBench, Judged, values_of
from experiments.ptq.task_page import TaskRun, counted, task_runs
from experiments.report.content import Section, Table
from experiments.report.real_runs import about_of, title_of
from experiments.report.results import Results, failures, number
from experiments.runs.benches import KINDS, encoder_bench
from experiments.runs.real_models import BATCH, Place, Tables, Watch, batches_of, by_data, facts
from experiments.runs.settings import Settings

#: Tokens of a sequence, and sequences that methods see, by scale.
LENGTH = 128
SEQUENCES = {"quick": 64, "full": 1024}
RECOVERED, RECOVERED_ERROR = "distance, recovered", "distance, standard error of the recovered"


@dataclass
class EncoderRun(Run):
    """A run whose bench is an encoder's, with what rounding does in each scheme, by data."""

    judged: dict[str, dict[str, Judged]] = field(default_factory=dict)

    @property
    def encoder(self) -> EncoderBench:
        """The bench."""
        bench: object = self.bench
        if not isinstance(bench, EncoderBench):
            raise TypeError(f"an encoder's bench is an EncoderBench, got {type(bench).__name__}")
        return bench


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one encoder; returns rows of what failed."""
    if DRAWS_PART in settings.only:
        raise ValueError(
            f"{DRAWS_PART} are measured on language models, and {model.name} is an encoder; leave one out"
        )
    tables = Tables(EXPERIMENT, settings, KINDS[ENCODER] + model.name, journal, deadline)

    def load() -> tuple[Values, Callable[[tuple[Case, str]], dict[str, Values]]]:
        here = prepared(settings, model, tables.watch)
        add_dense(tables, here.bench, list(here.encoder.dense))
        return facts(here.bench), lambda task: measure(here, *task)

    tasks = {
        Place(case.setting, arm, settings.seed): (case, arm)
        for case in cases_of(settings)
        if case.budget is None
        for arm in arms_of(settings, case)
    }
    failed = tables.measure(model.name, tasks, load, lambda task: not_there(settings, task[1]))
    for case in dict.fromkeys(case for case, _ in tasks.values()):
        KeptRounding.of(settings, model, case).measured(failed)
    return failed


def prepared(settings: Settings, model: RealModel, watch: Watch | None = None) -> EncoderRun:
    """A loaded encoder, its data, and the sequences that methods see."""
    bench, watch = encoder_bench(settings, model), watch or Watch(Deadline(None))
    watch.at("sequences")
    end = bench.tokenizer.sep_token_id or bench.tokenizer.eos_token_id

    @cache
    def draw(seed: int) -> list[torch.Tensor]:
        count, batch = SEQUENCES[settings.scale], 8 * BATCH[settings.device]
        batches = batches_of(settings, model, LENGTH, count, seed, batch)
        for ids in batches if end is not None else ():
            ids[:, -1] = end
        return batches

    def draw_for_choices() -> list[torch.Tensor]:
        return draw(settings.seed)

    return EncoderRun(settings, bench, draw, draw(settings.seed), draw_for_choices, watch=watch)  # type: ignore[arg-type]


def measure(here: EncoderRun, case: Case, arm: str) -> dict[str, Values]:
    """Values of one method in one scheme by the data of their tables."""
    kept = None if arm in PEERS else unfinished(here.settings, here.bench.model, case, methods_of(arm))

    def work(found: dict[str, Values]) -> Values:
        if arm == ROUNDING:
            with here.watch.until_kept():
                values, model = quantized(here, case, ())
                ours = judged_rounding(here, case, model)
        else:
            base = rounding(here, case)
            values, model = quantized(here, case, methods_of(arm))
            ours = here.encoder.judged(model)
        for data, mine in ours.items():
            shares = {} if arm == ROUNDING else recovered(mine, base[data])
            found[data] = {**values_of(mine, here.encoder.dense[data]), **shares, **status("ok")}
        return values

    found = by_data(work)
    if kept is not None:
        kept.measured(f"{arm}, {case.setting}", found, here.settings.seconds)
    return found


def rounding(here: EncoderRun, case: Case) -> dict[str, Judged]:
    """What rounding does in a scheme by data: of this run, kept of one that was stopped, or measured now."""
    if not (found := known_rounding(here, case)):
        with here.watch.first(ROUNDING), here.watch.until_kept():
            found = judged_rounding(here, case, quantized(here, case, ())[1])
    return found


def known_rounding(here: EncoderRun, case: Case) -> dict[str, Judged]:
    """What is known, or kept, of that; nothing where it is not of all data."""
    if case.setting not in here.judged:
        kept = KeptRounding.of(here.settings, here.bench.model, case).remembered(Judged)
        if {*kept} == {*here.encoder.dense}:
            here.judged[case.setting] = {
                data: replace(one, documents=tuple(one.documents)) for data, one in kept.items()
            }
    return here.judged.get(case.setting, {})


def judged_rounding(here: EncoderRun, case: Case, model: nn.Module) -> dict[str, Judged]:
    """What a rounded copy does, judged once, and kept for a run that goes on with this one."""
    if not known_rounding(here, case):
        here.judged[case.setting] = here.encoder.judged(model)
        KeptRounding.of(here.settings, here.bench.model, case).remember(here.judged[case.setting])
        here.watch.keeps()
    return here.judged[case.setting]


def recovered(ours: Judged, rounding: Judged) -> Values:
    """The share of rounding's distance that is taken away, in percent, with its standard error."""
    part, error = share(ours.distance, rounding.distance, ours.documents)
    return {RECOVERED: (100 * part, "%"), RECOVERED_ERROR: (100 * error, "%")}


# The part of the page.

TEXT = (
    "Weights of all linear layers are quantized; where a setting names inputs, these are quantized too, with dynamic scales. "
    "Distance: 1 - cosine of a text's vector with the dense model's, the mean in thousandths; recovered is the share of "
    "rounding's distance that a method takes away, paired by text. After ± stands half of the 95% interval over texts or books."
)


DISTANCE = "cosine distance", "cosine distance, standard error"


def encoder_sections(rows: Sequence[Row]) -> list[Section]:
    """A section for each encoder."""
    return [section(one) for one in task_runs(rows) if one.task == ENCODER]


def section(one: TaskRun) -> Section:
    """What methods win on one encoder."""
    run = one.run
    about = about_of(run, partial(counted, base=one.base))
    tables = [table(run.model, name, results) for name, results in run.texts.items()]
    return Section(title_of(run, f", {one.task}"), [*about, TEXT, *failures(run.whole)], [], tables)


def table(model: str, name: str, results: Results) -> Table:
    """A line for each scheme and method."""
    lines = []
    for setting, method in dict.fromkeys((row.setting, row.method) for row in results.rows):
        distance = results.with_half(setting, method, *DISTANCE, factor=1e3)
        if distance and method != BASE:
            kept = number(results.value(setting, method, "neighbours kept"), 1)
            share_text = results.with_half(setting, method, RECOVERED, RECOVERED_ERROR)
            lines.append([setting, method, distance, share_text, kept])
    columns = ["scheme", "method", "distance (1/1000)", "recovered (%)", "neighbours (%)"]
    return Table(f"{model}, {name}: methods with data", columns, lines, results.rows)
