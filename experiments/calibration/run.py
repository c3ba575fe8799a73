"""Experiment `calibration`: what methods that quantize with data win over rounding, in each scheme, on real language models.

A method sees sequences of books that no evaluation text holds (`drawn_sequences`; the source of sympy where there is no
prose). Each quantizes a copy of the model by `ao_lab.quantize_(model, config, calibration=, methods=)`, and the copy predicts
two texts. "Recovered" is the share of rounding's KL divergence from the dense model (or of its loss) that a method takes away,
1 - method / rounding, paired by window with its standard error (linearized ratio). KL is the measure: at 4 bits changes of the
loss drown in noise, and errors of single layers mislead.

Seconds and memory at the shapes of large models are parts of their own (`experiments.calibration.shapes`). So is what a draw
moves: `--only draws` measures DRAWS paired seeds of what is drawn, the sequences that methods see and AutoRound's order of
batches, each seed the same sequences for all methods. Rotations draw nothing: their signs are those of the record.

Rounding is measured first in each scheme, since all others are compared with it window by window; a run that was stopped keeps
what they need of it. What a method does not take (its mathematics has no meaning in a scheme) is a row that says why.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.result import CALIBRATION
from ao_lab.choose.result import Choice
from ao_lab.cli.terminal import blocks_of
from ao_lab.config.base import SchemeConfig
from ao_lab.eval import Sums
from ao_lab.measure.memory import Peak, synchronize
from ao_lab.quantization.api import quantize_
from ao_lab.quantization.groups import told_elsewhere
from experiments.calibration import choice, shapes
from experiments.calibration.cases import (
    EXPERIMENT,
    ROUNDING,
    Case,
    Task,
    methods_of,
    not_there,
    pythons_of,
    tasks_of_run,
)
from experiments.calibration.cases import check_parts as check_parts
from experiments.calibration.peers.exchange import quantized_by_peer
from experiments.calibration.peers.records import PEERS, peer_scheme
from experiments.calibration.unfinished import KeptChoices, KeptRounding, Unfinished
from experiments.data.texts import TextWindows, ratio_and_error
from experiments.harness.measuring import Deadline, Values, status
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.causal_lm import (
    MODEL,
    REAL,
    Bench,
    RealModel,
    changes_of,
    check_whole,
    evaluated,
    linears,
    sizes,
    values_of,
)
from experiments.models.pretrained import ENCODER, LANGUAGE
from experiments.models.quantized_model import WEIGHTS
from experiments.runs.benches import AnyBench
from experiments.runs.real_models import (
    BATCH,
    Place,
    Tables,
    Watch,
    batches_of,
    bench_of,
    by_data,
    facts,
    harness_values,
    real_subject,
    run_models,
)
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings

#: Sequences that methods see, and tokens of each, by scale.
SEQUENCES = {"quick": 16, "full": 128}
TOKENS = {"quick": 512, "full": 1024}

#: The module that measures models of a task, by name: those of other tasks measure by what is in this one.
MEASURED = {LANGUAGE: __name__, ENCODER: f"{__package__}.encoders"}


@dataclass
class Run:
    """One model with its texts, the sequences that methods see, and what rounding does in each scheme, window by window."""

    settings: Settings
    bench: Bench
    draw: Callable[[int], list[torch.Tensor]]
    batches: list[torch.Tensor]
    #: The sequences that choices are scored and measured by.
    draw_for_choices: Callable[[], list[torch.Tensor]]
    rounded: dict[tuple[str, str], Sums] = field(default_factory=dict)
    choices: dict[float, Choice] = field(default_factory=dict)
    #: What choices do, by the setting of the choice, method and text.
    chosen: dict[tuple[str, str, str], Sums] = field(default_factory=dict)
    facts: Values = field(default_factory=dict)
    #: Told how far a measurement is, which it ends after the run's seconds, between layers and texts.
    watch: Watch = field(default_factory=lambda: Watch(Deadline(None)))

    def with_seed(self, seed: int) -> Run:
        """The same with the sequences of another seed; what rounding does stays."""
        if seed == self.settings.seed:
            return self
        return replace(self, settings=replace(self.settings, seed=seed), batches=self.draw(seed))


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the real models."""
    return real_subject(settings)


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all models, or of the parts at large shapes that `settings.only` names; rows in the journal are not measured
    again."""
    journal = journal if journal is not None else Journal()
    if any(name in shapes.PARTS for name in settings.only):
        return all_rows(settings, journal, shapes.run(settings, journal))

    def of_task(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
        module = importlib.import_module(MEASURED[model.task])
        found: list[Row] = module.measure_model(settings, model, journal, deadline)
        return found

    return all_rows(settings, journal, run_models(EXPERIMENT, settings, journal, of_task))


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""
    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)

    def load() -> tuple[Values, Callable[[Task], dict[str, Values]]]:
        here = prepared(settings, model, tables.watch)
        add_dense(tables, here.bench, [windows.text.name for windows in here.bench.windows])
        return facts(here.bench), lambda task: measure(here.with_seed(task[2]), task[0], task[1])

    tasks = {Place(case.setting, arm, seed): (case, arm, seed) for case, arm, seed in tasks_of_run(settings)}
    for task in tasks.values():
        tell_kept(settings, model, task)
    failed = tables.measure(model.name, tasks, load, lambda task: not_there(settings, task[1]))
    if any(case.budget is not None for case, _, _ in tasks.values()):
        kept_choices(settings, model).measured(failed)
    for case in dict.fromkeys(case for case, _, _ in tasks.values()):
        KeptRounding.of(settings, model, case).measured(failed)
    return failed


@torch.no_grad()
def add_dense(tables: Tables, bench: AnyBench, data_of_tables: Sequence[str]) -> None:
    """Rows of the model as it is: its size, and what it does, by the data; nothing where the journal has them."""
    place = Place(WEIGHTS, bench.baseline, tables.settings.seed)
    names = [table_name(tables.kind, tables.settings.scale, data) for data in (MODEL, *data_of_tables)]
    if all(tables.journal.finished(name, *place) for name in names):
        return
    tables.watch.at(bench.baseline)
    for data, values in {MODEL: sizes(bench.base), **bench.results(bench.base)}.items():
        tables.journal.add(tables.rows(data, place, {**values, **status("ok")}))
    tables.watch.keeps()


def prepared(settings: Settings, model: RealModel, watch: Watch | None = None) -> Run:
    """A loaded model, the windows of its texts, and the sequences that methods see."""
    length, count, batch = TOKENS[settings.scale], SEQUENCES[settings.scale], BATCH[settings.device]
    watch = watch or Watch(Deadline(None))

    @cache
    def draw(seed: int) -> list[torch.Tensor]:
        return batches_of(settings, model, length, count, seed, batch)

    def draw_for_choices() -> list[torch.Tensor]:
        tokens, sequences = choice.TOKENS[settings.scale], choice.SEQUENCES[settings.scale]
        return batches_of(settings, model, tokens, sequences, settings.seed, choice.BATCH)

    bench = bench_of(settings, model)
    watch.at("sequences")
    return Run(settings, bench, draw, draw(settings.seed), draw_for_choices, watch=watch)


def measure(here: Run, case: Case, arm: str) -> dict[str, Values]:
    """Values of one method in one scheme by the data of their tables: each text, and the model."""
    chosen = () if arm in PEERS else methods_of(arm, here.settings.seed)
    kept = unfinished(here.settings, here.bench.model, case, chosen)

    def work(found: dict[str, Values]) -> Values:
        if case.budget is not None:
            choose(here)
        if arm == ROUNDING:
            with here.watch.until_kept():
                return judged(found)
        measure_rounding(here, case)
        return judged(found)

    def judged(found: dict[str, Values]) -> Values:
        values, model = by_peer(here, case, arm) if arm in PEERS else quantized(here, case, chosen)
        for windows in here.bench.windows:
            here.watch.at(windows.text.name)
            found[windows.text.name] = on_text(here, case, arm, windows, model)
        return {**values, **harness_values(here.settings, here.bench.model, model)}

    found = by_data(work)
    if kept is not None:
        kept.measured(f"{arm}, {case.setting}", found, here.settings.seconds)
    return found


@torch.no_grad()
def on_text(here: Run, case: Case, arm: str, windows: TextWindows, model: nn.Module) -> Values:
    """Values of a method's model on a text, beside what rounding does there."""
    if arm == ROUNDING:
        sums, shares = rounding_on(here, case, windows, model), Values()
    else:
        sums = evaluated(here.bench, windows, model)
        shares = recovered(sums, here.rounded[case.setting, windows.text.name], windows.documents)
    if case.budget is not None:
        shares |= over_choice(here, case, arm, windows, sums)
    return {**values_of(sums, windows), **shares, **status("ok")}


def unfinished(
    settings: Settings, model: RealModel, case: Case, chosen: tuple[Any, ...]
) -> Unfinished | None:
    """Where a method that reads data keeps the blocks that it has finished; None where it keeps none."""
    if case.budget is not None or not any(one.calibrates for one in chosen):
        return None
    return Unfinished.of(settings, model, case, chosen)


def tell_kept(settings: Settings, model: RealModel, task: Task) -> None:
    """Say of a method that was stopped, before the model is loaded, how many of its blocks are kept."""
    case, arm, seed = task
    if arm in PEERS or not_there(settings, arm) is not None:
        return
    kept = unfinished(replace(settings, seed=seed), model, case, methods_of(arm, seed))
    if kept is not None:
        kept.tell(f"{arm}, {case.setting}", blocks_of(model.folder))


def by_peer(here: Run, case: Case, arm: str) -> tuple[Values, nn.Module]:
    """A copy with the weights that another project made on the same sequences, and what it took."""
    scheme = peer_scheme(case.weights)
    if scheme is None:
        raise ValueError(f"{arm} has no scheme {case.weights}")
    bench, model = here.bench, here.bench.copy()
    pythons, seed = pythons_of(here.settings), here.settings.seed
    return quantized_by_peer(arm, scheme, model, bench.model.folder, here.batches, seed, pythons), model


def measure_rounding(here: Run, case: Case) -> None:
    """What rounding does in a scheme, on the texts of which neither this run nor one that was stopped has measured it."""
    if not (missing := not_rounded(here, case)):
        return
    with here.watch.first("rounding"), here.watch.until_kept():
        _, model = quantized(here, case, ())
        for windows in missing:
            here.watch.at(windows.text.name)
            rounding_on(here, case, windows, model)


def not_rounded(here: Run, case: Case) -> list[TextWindows]:
    """Windows of texts of which it is not known, nor kept, what rounding does in a scheme."""
    places = {(case.setting, one.text.name): one for one in here.bench.windows}
    if not {*places} <= {*here.rounded}:
        kept = KeptRounding.of(here.settings, here.bench.model, case).remembered(Sums)
        here.rounded |= {(case.setting, name): sums for name, sums in kept.items()}
    return [one for place, one in places.items() if place not in here.rounded]


@torch.no_grad()
def rounding_on(here: Run, case: Case, windows: TextWindows, model: nn.Module) -> Sums:
    """What rounding does in a scheme on a text, measured once, and kept for a run that goes on with this one."""
    if windows in not_rounded(here, case):
        here.rounded[case.setting, windows.text.name] = evaluated(here.bench, windows, model)
        found = {name: sums for (setting, name), sums in here.rounded.items() if setting == case.setting}
        KeptRounding.of(here.settings, here.bench.model, case).remember(found)
        here.watch.keeps()
    return here.rounded[case.setting, windows.text.name]


def quantized(here: Run, case: Case, chosen: tuple[Any, ...]) -> tuple[Values, nn.Module]:
    """A quantized copy, its size, and the seconds and memory that quantizing took, but of one that went on with the blocks of
    an earlier run; Undivided where a layer stays dense."""
    model, device = here.bench.copy(), torch.device(here.settings.device)
    layers = linears(model)
    config, filter_fn, told = config_of(here, case, layers)
    data: dict[str, Any] = {"calibration": here.batches} if any(one.calibrates for one in chosen) else {}
    peak = Peak(device)
    peak.begin()
    started = time.perf_counter()
    more = {"methods": chosen, **data} if chosen else {}
    if (kept := unfinished(here.settings, here.bench.model, case, chosen)) is not None:
        kept.folder.parent.mkdir(parents=True, exist_ok=True)
        more["resume"] = kept.folder
    with told_elsewhere():  # by `check_whole`
        quantize_(model, config, filter_fn=filter_fn, progress=here.watch.progress, **more)
    synchronize(device)
    values = sizes(model)
    if kept is None or not kept.before:
        values["time to quantize"] = (time.perf_counter() - started, "s")
        # What is resident on a CPU is the whole process's.
        if device.type == "cuda" and (over := peak.over()) is not None:
            values["memory over the model"] = (over, "byte")
    check_whole(case.weights, layers)
    tokens = sum(batch.numel() for batch in here.batches) if data else 0
    return {**values, "tokens seen": (tokens, ""), **layer_values(model), **told}, model


def over_choice(here: Run, case: Case, arm: str, windows: TextWindows, sums: Sums) -> Values:
    """Of a rule the KL of the choice under its budget over the rule's, by the same method; a choice is remembered for that, and
    measured again where this process has not."""
    setting = choice.setting(case.budget or 0.0)
    key = setting, arm, windows.text.name
    if not case.rule:
        here.chosen[key] = replace(sums)
        return {}
    if key not in here.chosen:
        _, model = quantized(here, Case(setting, None, case.budget), methods_of(arm, here.settings.seed))
        for text in here.bench.windows:
            with torch.no_grad():
                here.chosen[setting, arm, text.text.name] = evaluated(here.bench, text, model)
    ratio, error = ratio_and_error(here.chosen[key].kls, sums.kls, windows.documents)
    return {choice.OVER: (ratio, ""), choice.OVER_ERROR: (error, "")}


def config_of(here: Run, case: Case, layers: Mapping[str, nn.Linear]) -> tuple[Any, Any, Values]:
    """The configuration of a case, the filter beside it, and what there is to say of how it was found."""
    if case.budget is None:
        ours = {id(layer) for layer in layers.values()}
        config = SchemeConfig(scheme=case.weights, activation_scheme=case.inputs)
        return config, lambda module, name: id(module) in ours, {}
    choose(here)
    found = here.choices[case.budget]
    if case.rule:
        plan, trial = choice.rule_plan(found, case.rule, layers)
        return plan, None, {f"rule: {trial}": (1.0, "")}
    return found.plan, None, {**choice.values(found), **here.facts}


def choose(here: Run) -> None:
    """Make the choices of all budgets, once, or take those that a run which was stopped has kept."""
    if here.choices:
        return
    kept = kept_choices(here.settings, here.bench.model)
    choices, here.facts = kept.remembered()
    if not choices:
        started, scale = time.perf_counter(), here.settings.scale
        sequences = here.draw_for_choices()
        choices = choice.chosen(here.bench.base, sequences, choice.ALONE[scale], here.watch.progress)
        tokens = sum(one.numel() for one in sequences)
        here.facts = {
            "time to choose, all budgets": (time.perf_counter() - started, "s"),
            "choice: tokens of scores and measurements": (tokens, ""),
        }
        kept.remember(choices, here.facts)
    here.choices.update(choices)


def kept_choices(settings: Settings, model: RealModel) -> KeptChoices:
    """Where a run keeps the choices of a model."""
    scale = settings.scale
    counts = choice.SEQUENCES[scale], choice.TOKENS[scale], choice.BATCH, choice.ALONE[scale]
    return KeptChoices.of(
        settings, model, choice.NAME, choice.OPTIONS, choice.METHODS, choice.BUDGETS, counts
    )


def layer_values(model: nn.Module) -> Values:
    """Of the layers' output errors over rounding's on held-out tokens the geometric mean; and where rounding stayed."""
    found = list(getattr(model, CALIBRATION, {}).values())
    ratios = [one.ratio for one in found if one.tokens and one.ratio > 0]
    if not ratios:
        return {}
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    kept = sum(one.method == ROUNDING for one in found)
    return {"output error over rounding's": (mean, ""), "layers that stay rounded": (kept, "")}


def recovered(sums: Sums, rounding: Sums, documents: Sequence[int]) -> Values:
    """Shares of rounding's KL and of its loss that a method takes away, with standard errors."""
    kl, kl_error = share(sums.kls, rounding.kls, documents)
    loss, loss_error = share(changes_of(sums), changes_of(rounding), documents)
    return {
        "KL, recovered": (100 * kl, "%"),
        "KL, standard error of the recovered": (100 * kl_error, "%"),
        "loss, recovered": (100 * loss, "%"),
        "loss, standard error of the recovered": (100 * loss_error, "%"),
    }


def share(ours: Sequence[float], base: Sequence[float], documents: Sequence[int]) -> tuple[float, float]:
    """1 - mean of ours / mean of the base, and its standard error; NaN where the base is 0."""
    ratio, error = ratio_and_error(ours, base, documents)
    return 1 - ratio, error
