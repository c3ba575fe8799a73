"""Trainings by recipe, one after the other or in several processes at once; those with rows are not repeated.

Runs of one seed have the same initial weights and the same text in the same order, whatever their recipe, and the same bits in
whichever process. Weights and the words of stochastic rounding are drawn from torch's one generator: trainings in threads of
one process would not be paired. Trainings that share the device with others learn what they learn alone, but their seconds are
not those of the recipe: their rows have no times and speeds. Long trainings never share it, nor do those for a number of
seconds, which would take fewer steps. Rows of "paired", "sweep", "long" are one training each, rows of "gaps" are over seeds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from torch import nn

from experiments.data.corpora.split_corpus import evaluation_texts
from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.methods import is_linear
from experiments.fp8_training.training.gaps import gap
from experiments.fp8_training.training.plans import BASE, BASE_NAMES, LONG, PAIRED, Plan, Trial
from experiments.fp8_training.training.workers import measure_each
from experiments.harness.revision import state
from experiments.harness.rows import Journal, Row, library_versions, table_name, table_parts
from experiments.models.pretraining.evaluation import bits_per_byte
from experiments.models.pretraining.training import Convert, pretrain
from experiments.models.training_checkpoint import Checkpoint
from experiments.pretraining.run import BITS, CHECKPOINT_SECONDS, Values, loss_curve, quality, speed
from experiments.runs.settings import Settings

EXPERIMENT = "fp8_training"
GAPS, CURVES = "gaps", "curves"
#: Metrics that gaps are taken of: totals of held-out splits, and the end of training.
TRAINED = f"training {BITS} at the end"
#: Metrics of a training that had the device to itself.
TIMED = ("time of steps", "tokens a second", "share of the bfloat16 peak")


def run(settings: Settings, journal: Journal, plan: Plan, kinds: Sequence[str], deadline: Deadline) -> None:
    """Add the rows of all trainings of a plan that the deadline reaches, and those over seeds."""
    missing = [one for one in plan.trials(kinds) if not is_finished(settings, journal, one)]
    trials = {name_of(one): one for one in missing}

    def keep(name: str, rows: list[Row]) -> None:
        journal.add(rows)
        checkpoint_of(settings, trials[name]).done()

    for sharing, workers in ((True, settings.workers), (False, 1)):
        works = {
            name: partial(train, settings, plan, one)
            for name, one in trials.items()
            if shares_device(settings, one) == sharing
        }
        measure_each("trainings", works, workers, deadline, keep)
    # What follows from rows that were not measured again is as old as they are.
    if PAIRED in kinds and (trials or not any(is_gap(row) for row in journal.rows)):
        journal.add(gap_rows(settings, plan, journal.rows))


def is_gap(row: Row) -> bool:
    """Whether a row follows from those of trainings."""
    return table_parts(row.table)[0] == GAPS


def train(settings: Settings, plan: Plan, trial: Trial) -> list[Row]:
    """All rows of a training, which is resumed from its checkpoint where there is one."""
    return measure(settings, plan, trial, checkpoint_of(settings, trial))


def name_of(trial: Trial) -> str:
    """What progress calls a training."""
    return f"{trial.kind}: {trial.setting}, {trial.recipe}, rate {trial.settings.rate:g}, seed {trial.settings.seed}"


def shares_device(settings: Settings, trial: Trial) -> bool:
    """Whether a training runs beside others: not the long ones, whose speeds are part of the answer."""
    return settings.workers > 1 and trial.kind != LONG and trial.settings.budget.seconds is None


def is_finished(settings: Settings, journal: Journal, trial: Trial) -> bool:
    """Whether a training's rows are there."""
    table = table_name(trial.kind, settings.scale, settings.corpus.name)
    return journal.finished(table, trial.setting, trial.method(settings.device), trial.settings.seed)


def checkpoint_of(settings: Settings, trial: Trial) -> Checkpoint:
    """The checkpoint of a training, in the cache, by a hash of everything that determines its weights."""
    parts = [
        json.dumps(asdict(trial.settings), sort_keys=True),
        settings.corpus.sha256,
        state(),
        library_versions(),
        settings.device_name,
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return Checkpoint(settings.cache / "models" / f"fp8_training-{key}.checkpoint", CHECKPOINT_SECONDS)


def converter(recipe: str) -> Convert | None:
    """What makes a model train by a recipe: every linear layer, the output layer too; None where nothing is to be done."""
    if recipe == BASE:
        return None

    def convert(model: nn.Module) -> None:
        from ao_lab import convert_for_training_

        convert_for_training_(model, recipe, is_linear)

    return convert


def measure(settings: Settings, plan: Plan, trial: Trial, checkpoint: Checkpoint) -> list[Row]:
    """Train a model; all rows of it, without times where it shared the device, be it for a part of its steps. It is evaluated
    as it trained, with its layers converted."""
    convert = converter(trial.recipe)
    alone = not shares_device(settings, trial)
    made = pretrain(trial.settings, settings.corpus, settings.device, convert, checkpoint, alone=alone)
    texts = {name: text[: plan.evaluated] for name, text in evaluation_texts(settings.corpus).items()}
    found = bits_per_byte(made.model, texts, trial.settings.model.context)
    facts = speed(made, trial, settings.device_name)
    if not made.alone:
        facts = {name: value for name, value in facts.items() if name not in TIMED}
    values = {**quality(found, texts), **facts}
    return [
        *rows_of(settings, trial.kind, trial, values),
        *rows_of(settings, CURVES, trial, loss_curve(made.losses)),
    ]


def rows_of(settings: Settings, kind: str, trial: Trial, values: Values) -> list[Row]:
    """Tidy rows of a training; curves of a sweep and of others differ in their setting."""
    of_seed = replace(settings, seed=trial.settings.seed)
    setting = f"{trial.kind}: {trial.setting}" if kind == CURVES else trial.setting
    where = settings.corpus.name, setting, trial.method(settings.device)
    return [
        of_seed.row(EXPERIMENT, kind, *where, metric, value, unit) for metric, (value, unit) in values.items()
    ]


def gap_rows(settings: Settings, plan: Plan, rows: Sequence[Row]) -> list[Row]:
    """Rows over seeds of every recipe that has at least two seeds with bfloat16's beside them."""
    table, by_key = table_name(PAIRED, settings.scale, settings.corpus.name), {}
    for row in rows:
        if row.table == table:
            by_key.setdefault((row.setting, row.method, row.metric), {})[row.seed] = row.value
    made = []
    for (setting, method, metric), losses in by_key.items():
        base = by_key.get((setting, BASE_NAMES[settings.device], metric), {})
        if method != BASE_NAMES[settings.device] and is_loss(metric):
            values = over_seeds(metric, base, losses)
            where = GAPS, settings.corpus.name, setting, method
            made += [settings.row(EXPERIMENT, *where, *found) for found in values]
    return made


def is_loss(metric: str) -> bool:
    """Whether a metric is one that gaps are taken of."""
    return metric == TRAINED or metric.startswith(f"{BITS}, ")


def over_seeds(
    metric: str, base: Mapping[int, float], losses: Mapping[int, float]
) -> list[tuple[str, float, str]]:
    """(metric, value, unit) of the gap over the seeds that both have; nothing for fewer than two."""
    seeds = sorted(base.keys() & losses.keys())
    if len(seeds) < 2:
        return []
    found = gap([base[seed] for seed in seeds], [losses[seed] for seed in seeds])
    return [
        (f"gap, {metric}", found.mean, "%"),
        (f"gap, {metric}, 95% interval", found.half, "%"),
        (f"gap, {metric}, seeds", found.seeds, ""),
    ]


__all__ = ["CURVES", "GAPS", "TRAINED", "converter", "gap_rows", "measure", "run"]
