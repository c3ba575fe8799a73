"""Experiment `qat`: how much of what quantization costs a trained model is got back by training for it.

All models go on from one trained model, those of a seed on the same text, for as many steps, with the same optimizer: one
as it is (the baseline, which is then quantized: ptq), and one per method in `QATConfig`'s step "prepare", converted at its
end (qat).
Measured are bits per held-out byte of the models as they would be served: converted, in float32. Every linear layer is
quantized, lm_head too. Rows of table "runs" are one seed each; those of table "recovery" are over seeds
(`experiments.qat.summary`).
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

import numpy as np
from torch import nn

from ao_lab import quantize_
from experiments.data.multiple_choice import Exam, make_exam, score
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row, table_name
from experiments.harness.settings import Settings
from experiments.harness.workers import measure_all
from experiments.models.language_model import LanguageModel
from experiments.models.quantized_model import PLAIN, quantized_model
from experiments.models.train import cache_key, fit, trainable, trained_model
from experiments.qat.methods import PLANS, UNSEEN, Method, Plan
from experiments.qat.summary import DEVIATIONS, Recovery, interval, recovery

EXPERIMENT = "qat"
TITLE = "What training for quantization gives back: a small model trained here on the source of sympy"
RUNS, RECOVERY = "runs", "recovery"
BASELINE = "baseline"
PTQ, QAT = "bits per byte, PTQ", "bits per byte, QAT"
#: The plain model under the scales that QAT starts with, where those are not quantize_'s.
CLIPPED = "bits per byte, PTQ clipped"
NO_PERCENTAGE = f"recovered: no percentage, the loss is under {DEVIATIONS} seed deviations"


@dataclass(frozen=True)
class Task:
    """One method of one seed; without a method, the baseline."""

    seed: int
    method: Method | None

    @property
    def place(self) -> tuple[str, str]:
        """Setting and method, as rows call them."""
        return (BASELINE, "float32") if self.method is None else (self.method.setting, self.method.name)


@dataclass(frozen=True)
class Models:
    """What the tasks of a seed go on from: the model that was begun, and that trained on as it is, the baseline."""

    begun: LanguageModel
    base: LanguageModel


@dataclass(frozen=True)
class Subject:
    """What all tasks share."""

    settings: Settings
    plan: Plan
    exams: tuple[Exam, ...]
    models: Mapping[int, Models]


def subject(settings: Settings) -> str:
    """What the rows are about: the training of every seed."""
    plan = PLANS[settings.scale]
    keys = [
        cache_key(plan.plain(settings, seed), settings.corpus, settings.device) for seed in range(plan.seeds)
    ]
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:16]


def run(settings: Settings, journal: Journal | None = None, plan: Plan | None = None) -> list[Row]:
    """Rows of all seeds and methods, and over seeds; those that the journal has are not measured again."""
    journal, plan = journal if journal is not None else Journal(), plan or PLANS[settings.scale]
    if tasks := unfinished(settings, plan, journal):
        # Models that several tasks need are trained before these run side by side.
        models = {seed: models_of(settings, plan, seed) for seed in sorted({task.seed for task in tasks})}
        about = Subject(settings, plan, exams_of(settings, plan), models)
        others = changed_seeds(about, journal)
        journal.drop([one for one in runs_of(settings, journal.rows) if one.seed in others])
        tasks = unfinished(settings, plan, journal)
        with bar("QAT", len(tasks)) as step:
            for task, rows in measure_all(tasks, lambda task: measure(about, task), settings.device):
                journal.add(rows)
                step(f"{task.place[1]}, seed {task.seed}")
    journal.add(summary(settings, plan, journal.rows))
    return journal.rows


def all_tasks(plan: Plan) -> list[Task]:
    """Seed by seed, the baseline first."""
    return [Task(seed, method) for seed in range(plan.seeds) for method in (None, *plan.methods)]


def runs_of(settings: Settings, rows: Sequence[Row]) -> list[Row]:
    """Rows of single seeds at these settings."""
    table = table_name(RUNS, settings.scale, settings.corpus.name)
    return [one for one in rows if one.table == table]


def unfinished(settings: Settings, plan: Plan, journal: Journal) -> list[Task]:
    """Tasks whose rows the journal does not have."""
    table = table_name(RUNS, settings.scale, settings.corpus.name)
    return [task for task in all_tasks(plan) if not journal.finished(table, *task.place, task.seed)]


def changed_seeds(about: Subject, journal: Journal) -> set[int]:
    """Seeds that an interrupted run measured with other models than are here now.

    A GPU does not train the same model twice: rows of a seed whose models have left the cache are no pairs of new ones.
    """
    rows = runs_of(about.settings, journal.rows)
    base = {one.seed: one.value for one in rows if (one.setting, one.method) == (BASELINE, "float32")}
    return {
        seed
        for seed in {one.seed for one in rows} & set(about.models)
        if base.get(seed) != bits(about.models[seed].base, about.exams)
    }


def exams_of(settings: Settings, plan: Plan) -> tuple[Exam, ...]:
    """Held-out text, a window of every file or of as many as the plan says, several times over."""
    asked = [
        replace(settings.exam, questions=1, windows=plan.windows, seed=UNSEEN + number)
        for number in range(plan.exams)
    ]
    return tuple(make_exam(settings.corpus, exam) for exam in asked)


def models_of(settings: Settings, plan: Plan, seed: int) -> Models:
    """The models of a seed, from the cache or trained now."""
    plain = plan.plain(settings, seed)
    if plain.start is None:
        raise ValueError("training for quantization goes on from a trained model")
    begun, base = (
        trained_model(one, settings.corpus, settings.device, settings.cache).model
        for one in (plain.start, plain)
    )
    return Models(begun, base)


def measure(about: Subject, task: Task) -> list[Row]:
    """All rows of one method of one seed."""
    base = about.models[task.seed].base
    if task.method is None:
        rounded = quantized_model(base, "bfloat16", "bfloat16").model
        models = {("float32", "bits per byte"): base, ("bfloat16", "bits per byte"): rounded}
    else:
        name = task.method.name
        models = {
            (name, PTQ): quantized(copy.deepcopy(base), task.method.config),
            (name, QAT): trained_for(about, task.method, task.seed),
        }
        if task.method.learn_scales:
            started = quantized(trainable(base), task.method.step("prepare"))
            models[name, CLIPPED] = quantized(started.eval(), task.method.step("convert"))
    return [
        row(about.settings, RUNS, task.place[0], method, metric, bits(model, about.exams), "bit", task.seed)
        for (method, metric), model in models.items()
    ]


def trained_for(about: Subject, method: Method, seed: int) -> LanguageModel:
    """The model trained for a method from where the baseline started, converted."""
    model = quantized(trainable(about.models[seed].begun), method.step("prepare"))
    fit(model, about.plan.plain(about.settings, seed), about.settings.corpus)
    return quantized(model.eval(), method.step("convert"))


def quantized(model: LanguageModel, config: object) -> LanguageModel:
    """The model itself, `quantize_` applied to all its linear layers."""
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


def bits(model: LanguageModel, exams: Sequence[Exam]) -> float:
    """Mean bits per byte over the windows of all exams."""
    model.requires_grad_(False)
    mean = np.concatenate([score(model, exam).bits_per_byte for exam in exams]).mean()
    # As a journal keeps it: a resumed run then finds the same over seeds.
    return float(f"{mean:.9g}")


def row(
    settings: Settings, kind: str, setting: str, method: str, metric: str, value: float, unit: str, seed: int
) -> Row:
    """A row of one seed; those over seeds carry seed 0."""
    of_seed = replace(settings, seed=seed)
    return of_seed.row(EXPERIMENT, kind, settings.corpus.name, setting, method, metric, value, unit)


def summary(settings: Settings, plan: Plan, rows: list[Row]) -> list[Row]:
    """Rows over seeds: losses, their intervals, and the recovered part or why there is none."""
    runs = runs_of(settings, rows)
    found = {(one.setting, one.method, one.metric, one.seed): one.value for one in runs}

    def seeds(setting: str, method: str, metric: str) -> list[float]:
        return [found[setting, method, metric, seed] for seed in range(plan.seeds)]

    base = seeds(BASELINE, "float32", "bits per byte")
    made = [
        row(settings, RECOVERY, BASELINE, name, metric, value, unit, 0)
        for name in PLAIN
        for metric, (value, unit) in over_seeds(base, seeds(BASELINE, name, "bits per byte")).items()
    ]
    for method in plan.methods:
        place = (method.setting, method.name)
        values = of_method(recovery(base, seeds(*place, PTQ), seeds(*place, QAT)), method.bar)
        if method.learn_scales:
            values |= loss_rows("loss, PTQ clipped", base, seeds(*place, CLIPPED))
        made += [
            row(settings, RECOVERY, *place, metric, value, unit, 0)
            for metric, (value, unit) in values.items()
        ]
    return made


def over_seeds(base: Sequence[float], values: Sequence[float]) -> dict[str, tuple[float, str]]:
    """A baseline's bits per byte, how far seeds lie apart, and its paired change to float32."""
    return {
        "bits per byte": (fmean(values), "bit"),
        "bits per byte, standard deviation over seeds": (stdev(values), "bit"),
        **loss_rows("loss", base, values),
    }


def loss_rows(name: str, base: Sequence[float], values: Sequence[float]) -> dict[str, tuple[float, str]]:
    """A loss against float32 and half the width of its interval."""
    found = interval([after - before for after, before in zip(values, base, strict=True)])
    return {name: (found.mean, "bit"), f"{name}, 95% interval": (found.half, "bit")}


def of_method(found: Recovery, bar: float | None) -> dict[str, tuple[float, str]]:
    """A method's losses with half the widths of their intervals, and what was recovered."""
    made = {
        "loss, PTQ": (found.ptq.mean, "bit"),
        "loss, PTQ, 95% interval": (found.ptq.half, "bit"),
        "loss, QAT": (found.qat.mean, "bit"),
        "loss, QAT, 95% interval": (found.qat.half, "bit"),
        "loss to recover, in seed deviations": (found.deviations, "deviations"),
    }
    if found.recovered is None:
        made[NO_PERCENTAGE] = (found.deviations, "deviations")
    else:
        made["recovered"] = (found.recovered.mean, "%")
        made["recovered, 95% interval"] = (found.recovered.half, "points")
    if bar is not None:
        made["bar"] = (bar, "%")
    return made
