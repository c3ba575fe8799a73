"""Experiment `qat`: how much of the loss by post-training quantization (PTQ) quantization-aware training (QAT) recovers.

Stand-in: a small model trained here on the source of sympy, so no published number stands beside these rows. All models
continue from one trained model, those of a seed on the same text, for as many steps, with the same optimizer: one without QAT
(the baseline, which is then quantized: PTQ), and one per method in `QATConfig`'s step "prepare", converted at its end (QAT).

Measured are bits per held-out byte of the models as they would be served: converted, in float32. Every linear layer is
quantized, lm_head too. Rows of table "runs" are one seed each; those of table "recovery" are over seeds: of the losses of the
model trained in full precision (base), of that model quantized (ptq), and of the one trained for quantization (qat), all
differences are taken seed by seed.

A new method is one line of METHODS: a configuration of `quantize_`, and whether its scales are learned (only float32 scales can
be).
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from statistics import fmean, stdev

import numpy as np
from torch import nn

from ao_lab import (
    Int4WeightOnlyConfig,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    LowBitWeightOnlyConfig,
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    PerGroup,
    QATConfig,
    quantize_,
)
from experiments.data.evaluation import MultipleChoice, multiple_choice, score
from experiments.harness.measuring import bar, measure_all
from experiments.harness.rows import Interval, Journal, Row, interval, table_name
from experiments.models.llama import LanguageModel, ModelSettings
from experiments.models.quantized_model import PLAIN, quantized_model
from experiments.models.train import TrainSettings, cache_key, fit, trainable, trained_model
from experiments.qat.arms import Configured
from experiments.qat.real import check_methods, run_real
from experiments.report.results import Results
from experiments.report.targets import Target, limits
from experiments.runs.real_models import real_subject
from experiments.runs.settings import Settings

EXPERIMENT = "qat"
RUNS, RECOVERY = "runs", "recovery"
BASELINE = "baseline"
PTQ, QAT = "bits per byte, PTQ", "bits per byte, QAT"
#: The baseline quantized with the initial scales of QAT, where those are not quantize_'s.
CLIPPED = "bits per byte, PTQ clipped"


check_parts = check_methods

#: A loss of fewer than this many of its standard deviations over seeds has no percentage: it would be a ratio of noise.
DEVIATIONS = 10
NO_PERCENTAGE = f"recovered: no percentage, the loss is under {DEVIATIONS} seed deviations"


@dataclass(frozen=True)
class Task:
    """One method of one seed; without a method, the baseline."""

    seed: int
    method: Method | None

    @property
    def key(self) -> tuple[str, str]:
        """Setting and method of its rows."""
        return (BASELINE, "float32") if self.method is None else (self.method.setting, self.method.name)


@dataclass(frozen=True)
class Models:
    """Models of a seed: the common initial model, and the baseline, trained on from it without QAT."""

    initial: LanguageModel
    base: LanguageModel


@dataclass(frozen=True)
class Shared:
    """What all tasks share."""

    settings: Settings
    plan: Plan
    evaluations: tuple[MultipleChoice, ...]
    models: Mapping[int, Models]


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the training of every seed, or the real models that were asked for."""
    if settings.asked is not None:
        return real_subject(settings)
    plan = PLANS[settings.scale]
    keys = [
        cache_key(plan.training(settings, seed), settings.corpus, settings.device)
        for seed in range(plan.seeds)
    ]
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:16]


def run(settings: Settings, journal: Journal | None = None, plan: Plan | None = None) -> list[Row]:
    """Rows of all seeds and methods, and over seeds, or of real models; rows in the journal are not measured again."""
    if settings.asked is not None:
        return run_real(settings, journal if journal is not None else Journal())
    journal, plan = journal if journal is not None else Journal(), plan or PLANS[settings.scale]
    done = {row.table for row in journal.rows}
    if tasks := unfinished(settings, plan, journal):
        done.clear()
        # Models that several tasks share are trained before the tasks run in parallel.
        models = {seed: models_of(settings, plan, seed) for seed in sorted({task.seed for task in tasks})}
        shared = Shared(settings, plan, evaluations_of(settings, plan), models)
        changed = changed_seeds(shared, journal)
        journal.drop([one for one in runs_of(settings, journal.rows) if one.seed in changed])
        tasks = unfinished(settings, plan, journal)
        with bar("QAT", len(tasks)) as step:
            for task, rows in measure_all(tasks, lambda task: measure(shared, task), settings.device):
                journal.add(rows)
                step(f"{task.key[1]}, seed {task.seed}")
    found = summary(settings, plan, journal.rows)
    # What follows from rows that were not measured again is as old as they are.
    journal.add(row for row in found if row.table not in done)
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
    return [task for task in all_tasks(plan) if not journal.finished(table, *task.key, task.seed)]


def changed_seeds(shared: Shared, journal: Journal) -> set[int]:
    """Seeds that an interrupted run measured with models other than those of the cache.

    Training on a GPU is not reproducible: rows of a seed whose models have left the cache are not paired with new ones.
    """
    rows = runs_of(shared.settings, journal.rows)
    base = {one.seed: one.value for one in rows if (one.setting, one.method) == (BASELINE, "float32")}
    return {
        seed
        for seed in {one.seed for one in rows} & set(shared.models)
        if base.get(seed) != bits(shared.models[seed].base, shared.evaluations)
    }


def evaluations_of(settings: Settings, plan: Plan) -> tuple[MultipleChoice, ...]:
    """The evaluations of a plan: a window of each of `plan.windows` held-out files, with other windows in each."""
    wanted = [
        replace(settings.multiple_choice, questions=1, windows=plan.windows, seed=EVALUATION_SEED + number)
        for number in range(plan.evaluations)
    ]
    return tuple(multiple_choice(settings.corpus, one) for one in wanted)


def models_of(settings: Settings, plan: Plan, seed: int) -> Models:
    """The models of a seed, from the cache or trained now."""
    training = plan.training(settings, seed)
    if training.start is None:
        raise ValueError("quantization-aware training continues from a trained model; `start` is None")
    initial, base = (
        trained_model(one, settings.corpus, settings.device, settings.cache).model
        for one in (training.start, training)
    )
    return Models(initial, base)


def measure(shared: Shared, task: Task) -> list[Row]:
    """All rows of one method of one seed."""
    base = shared.models[task.seed].base
    if task.method is None:
        rounded = quantized_model(base, "bfloat16", "bfloat16").model
        models = {("float32", "bits per byte"): base, ("bfloat16", "bits per byte"): rounded}
    else:
        name = task.method.name
        models = {
            (name, PTQ): quantized(copy.deepcopy(base), task.method.config),
            (name, QAT): trained_with(shared, task.method, task.seed),
        }
        if task.method.learn_scales:
            prepared = quantized(trainable(base), task.method.step("prepare"))
            models[name, CLIPPED] = quantized(prepared.eval(), task.method.step("convert"))
    return [
        row(
            shared.settings,
            RUNS,
            task.key[0],
            method,
            metric,
            bits(model, shared.evaluations),
            "bit",
            task.seed,
        )
        for (method, metric), model in models.items()
    ]


def trained_with(shared: Shared, method: Method, seed: int) -> LanguageModel:
    """The initial model after QAT with a method, converted."""
    model = quantized(trainable(shared.models[seed].initial), method.step("prepare"))
    fit(model, shared.plan.training(shared.settings, seed), shared.settings.corpus)
    return quantized(model.eval(), method.step("convert"))


def quantized(model: LanguageModel, config: object) -> LanguageModel:
    """The model itself, after `quantize_` of all its linear layers."""
    quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


def bits(model: LanguageModel, evaluations: Sequence[MultipleChoice]) -> float:
    """Mean bits per byte over the windows of all evaluations."""
    model.requires_grad_(False)
    mean = np.concatenate([score(model, one).bits_per_byte for one in evaluations]).mean()
    # Rounded as in a journal, so that a resumed run computes the same means over seeds.
    return float(f"{mean:.9g}")


def row(
    settings: Settings, kind: str, setting: str, method: str, metric: str, value: float, unit: str, seed: int
) -> Row:
    """A row of one seed; those over seeds carry seed 0."""
    of_seed = replace(settings, seed=seed)
    return of_seed.row(EXPERIMENT, kind, settings.corpus.name, setting, method, metric, value, unit)


def summary(settings: Settings, plan: Plan, rows: list[Row]) -> list[Row]:
    """Rows over seeds: losses, their intervals, and the recovered percentage or why there is none."""
    runs = runs_of(settings, rows)
    by_key = {(one.setting, one.method, one.metric, one.seed): one.value for one in runs}

    def seeds(setting: str, method: str, metric: str) -> list[float]:
        return [by_key[setting, method, metric, seed] for seed in range(plan.seeds)]

    base = seeds(BASELINE, "float32", "bits per byte")
    over = [
        row(settings, RECOVERY, BASELINE, name, metric, value, unit, 0)
        for name in PLAIN
        for metric, (value, unit) in over_seeds(base, seeds(BASELINE, name, "bits per byte")).items()
    ]
    for method in plan.methods:
        key = (method.setting, method.name)
        values = of_method(recovery(base, seeds(*key, PTQ), seeds(*key, QAT)), target_of(method.name))
        if method.learn_scales:
            values |= loss_rows("loss, PTQ clipped", base, seeds(*key, CLIPPED))
        over += [
            row(settings, RECOVERY, *key, metric, value, unit, 0) for metric, (value, unit) in values.items()
        ]
    return over


def over_seeds(base: Sequence[float], values: Sequence[float]) -> dict[str, tuple[float, str]]:
    """A baseline's bits per byte, its standard deviation over seeds, and its paired change to float32."""
    return {
        "bits per byte": (fmean(values), "bit"),
        "bits per byte, standard deviation over seeds": (stdev(values), "bit"),
        **loss_rows("loss", base, values),
    }


def loss_rows(name: str, base: Sequence[float], values: Sequence[float]) -> dict[str, tuple[float, str]]:
    """A loss against float32 and half the width of its interval."""
    found = interval([after - before for after, before in zip(values, base, strict=True)])
    return {name: (found.mean, "bit"), f"{name}, 95% interval": (found.half, "bit")}


def of_method(found: Recovery, target: float | None) -> dict[str, tuple[float, str]]:
    """A method's losses with half the widths of their intervals, and the recovered percentage."""
    values = {
        "loss, PTQ": (found.ptq.mean, "bit"),
        "loss, PTQ, 95% interval": (found.ptq.half, "bit"),
        "loss, QAT": (found.qat.mean, "bit"),
        "loss, QAT, 95% interval": (found.qat.half, "bit"),
        "loss to recover, in seed deviations": (found.deviations, "deviations"),
    }
    if found.recovered is None:
        values[NO_PERCENTAGE] = (found.deviations, "deviations")
    else:
        values[RECOVERED] = (found.recovered.mean, "%")
        values["recovered, 95% interval"] = (found.recovered.half, "points")
    if target is not None:
        values[TARGET_METRIC] = (target, "%")
    return values


def target_of(method: str) -> float | None:
    """Percent of the PTQ loss to recover; None where a method has no target."""
    return next((one.bound for one in limits(EXPERIMENT) if fnmatchcase(method, one.key)), None)


@dataclass(frozen=True)
class Method(Configured):
    """A configuration to train for and to quantize with, and its options in `QATConfig`."""

    learn_scales: bool = False

    def step(self, step: str) -> QATConfig:
        """The configuration of step "prepare" or "convert"."""
        if step == "convert" or not self.learn_scales:
            return QATConfig(self.config, step=step)
        return QATConfig(self.config, step=step, learn_scales=True, scale_start="error")


METHODS = (
    Method(Int8DynamicActivationIntxWeightConfig("int4", PerGroup(32)), True),
    Method(Int8DynamicActivationIntxWeightConfig("int4", PerGroup(256)), True),
    Method(Int4WeightOnlyConfig(128), True),
    Method(IntxWeightOnlyConfig("int3", PerGroup(32)), True),
    Method(IntxWeightOnlyConfig("int3", PerGroup(128)), True),
    Method(IntxWeightOnlyConfig("int2", PerGroup(32)), True),
    Method(LowBitWeightOnlyConfig(1.58, PerGroup(32)), True),
    Method(MXDynamicActivationMXWeightConfig(activation_dtype="float4_e2m1fn", weight_dtype="float4_e2m1fn")),
    Method(NVFP4DynamicActivationNVFP4WeightConfig()),
)
#: Few enough for two cores.
QUICK_METHODS = tuple(
    method for method in METHODS if method.name in ("int4_g256", "int3_g128", "mxfp4_rceil")
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One scale of the experiment.

    start: training of the common initial model; None: that of the other experiments.
    seeds: of the text that is drawn for the compared training.
    steps, batch, rate, scale_rate: of the compared training, with and without QAT, by AdamW, down to a rate of 0.
    windows, evaluations: held-out files with a window in each evaluation, and the number of evaluations.
    """

    methods: tuple[Method, ...]
    seeds: int
    start: TrainSettings | None
    steps: int
    batch: int
    rate: float
    scale_rate: float
    windows: int
    evaluations: int = 1

    def __post_init__(self) -> None:
        if self.seeds < 2:
            raise ValueError(f"an interval over seeds needs at least two, got {self.seeds}")

    def training(self, settings: Settings, seed: int) -> TrainSettings:
        """The training of a seed, the same for the baseline and for every method in step "prepare"."""
        start = self.start or settings.train
        return replace(
            start,
            start=start,
            steps=self.steps,
            batch=self.batch,
            warmup=max(1, self.steps // 20),
            matrix_rate=None,
            rate=self.rate,
            last_rate=0.0,
            scale_rate=self.scale_rate,
            # Other text than in the training of the initial model.
            seed=TRAINING_SEED + seed,
        )


#: First seeds of the compared training and of its evaluations, far above those of the initial training and of the evaluation
#: that chose the learning rates.
TRAINING_SEED, EVALUATION_SEED = 2000, 100
PLANS = {
    "quick": Plan(
        methods=QUICK_METHODS, seeds=2, start=None, steps=30, batch=4, rate=3e-4, scale_rate=5e-3, windows=40
    ),
    "full": Plan(
        methods=METHODS,
        seeds=5,
        # Long enough that further training changes little: two runs on different text then end alike, and the loss by
        # quantization exceeds the noise (after 600 steps models differ by half the loss of 4 bits).
        start=TrainSettings(
            model=ModelSettings(width=512, layers=3, heads=8, kv_heads=4, feed_forward=1536, context=512),
            batch=32,
            steps=3000,
            warmup=200,
            matrix_rate=None,
            rate=2e-3,
        ),
        steps=1000,
        batch=32,
        rate=3e-4,
        scale_rate=5e-3,
        windows=70,
        evaluations=8,
    ),
}

# Targets of experiment `qat`: the percentage of the PTQ loss that QAT is to recover, mean over seeds.

#: Metrics of rows: the target of a method, and what it reached.
TARGET_METRIC, RECOVERED = "bar", "recovered"


def targets_of(results: Results) -> list[Target]:
    """The targets of all methods that have one; without a value where the loss is too small for a percentage."""
    found = dict.fromkeys((row.setting, row.method) for row in results.rows if row.metric == TARGET_METRIC)
    return [
        Target(
            name=method,
            value=results.value(setting, method, RECOVERED),
            limit=results.value(setting, method, TARGET_METRIC) or 0.0,
            unit="%",
            value_format=".1f",
            limit_format=".0f",
            day=results.day(setting, method),
        )
        for setting, method in found
    ]


@dataclass(frozen=True)
class Recovery:
    """The loss of PTQ and of QAT in bits per byte over float32, and the recovered percentage.

    deviations: the loss to recover, in its standard deviations over seeds. recovered: mean over seeds of
    100 (ptq - qat) / (ptq - base); None where `deviations` is under DEVIATIONS, or nothing was lost.
    """

    ptq: Interval
    qat: Interval
    deviations: float
    recovered: Interval | None


def deviations_of(values: Sequence[float]) -> float:
    """The mean in standard deviations; infinite where all values are the same, except of zeros."""
    mean, spread = fmean(values), stdev(values)
    if spread:
        return mean / spread
    return math.copysign(math.inf, mean) if mean else 0.0


def recovery(base: Sequence[float], ptq: Sequence[float], qat: Sequence[float]) -> Recovery:
    """Of the losses of each seed, in the same order."""
    lost = [after - before for after, before in zip(ptq, base, strict=True)]
    remaining = [after - before for after, before in zip(qat, base, strict=True)]
    deviations = deviations_of(lost)
    recovered = None
    if deviations >= DEVIATIONS:
        recovered = interval(
            [100 * (whole - rest) / whole for whole, rest in zip(lost, remaining, strict=True)]
        )
    return Recovery(interval(lost), interval(remaining), deviations, recovered)
