"""Trainings by recipe, one after the other or in several processes at once; those with rows are not repeated.

Runs of one seed have the same initial weights and the same text in the same order, whatever their recipe, and the same bits in
whichever process. Weights and the words of stochastic rounding are drawn from torch's one generator: trainings in threads of
one process would not be paired. Trainings that share the device with others learn what they learn alone, but their seconds are
not those of the recipe: their rows have no times and speeds. Long trainings never share it, nor do those for a number of
seconds, which would take fewer steps. Rows of "paired", "sweep", "long" are one training each, rows of "gaps" are over seeds.

The gap of a recipe to bfloat16 over paired seeds, with its interval, and what that says of a margin named beforehand.

Of each seed there are two trainings with the same initial weights and the same text in the same order. The gap of a seed is
100 (loss of the recipe / loss of bfloat16 - 1) percent, positive where the recipe is worse; over seeds it has Student's
interval of 95%.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

import fast
from experiments.data.corpus import evaluation_texts
from experiments.fp8_training.methods import BASE, BASE_NAMES, LONG, PAIRED, Plan, Trial, is_linear
from experiments.harness.measuring import Deadline
from experiments.harness.processes import measure_each
from experiments.harness.revision import state
from experiments.harness.rows import Journal, Row, library_versions, table_name, table_parts
from experiments.models.pretraining import Convert, bits_per_byte, pretrain
from experiments.models.train import Checkpoint
from experiments.pretraining.run import BITS, CHECKPOINT_SECONDS, Values, loss_curve, quality, speed
from experiments.qat.run import interval
from experiments.runs.settings import Settings
from reference import Quantized

WITHIN, BEYOND, UNDECIDED = "within the margin", "beyond the margin", "undecided"


@dataclass(frozen=True)
class Gap:
    """Percent of bfloat16's loss: the mean over seeds, half the width of its 95% interval, and how many seeds."""

    mean: float
    half: float
    seeds: int

    def verdict(self, margin: float) -> str:
        """Within: the whole interval lies below the margin. Beyond: all of it lies above. Else undecided.

        Being better than bfloat16 is within: the question is whether a recipe costs anything.
        """
        if self.mean + self.half < margin:
            return WITHIN
        return BEYOND if self.mean - self.half > margin else UNDECIDED


def gap(base: Sequence[float], recipe: Sequence[float]) -> Gap:
    """Of the losses of each seed, in the same order; ValueError for fewer than two seeds, or a base that is not positive."""
    if min(base, default=0.0) <= 0:
        raise ValueError(f"losses to compare with are positive, got {list(base)}")
    percents = [100 * (mine / theirs - 1) for mine, theirs in zip(recipe, base, strict=True)]
    found = interval(percents)
    return Gap(found.mean, found.half, len(percents))


# What a quantized operand says of itself, step by step: numbers that show a fault before a loss does.

LOST = "share of nonzero that became zero"
SATURATED = "share at the largest magnitude"
SQNR = "signal to quantization noise"
AMAX_STEP = "change of the largest magnitude a step"
SCALE_STEP = "change of the scale a step"
BAD = "share of blocks with NaN"
UNITS = {LOST: "%", SATURATED: "%", SQNR: "dB", AMAX_STEP: "log2", SCALE_STEP: "log2", BAD: "%"}


@dataclass
class Counters:
    """Counters of every operand that was seen, by its place, a value a step; NaN where there is nothing to compare with."""

    values: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def see(self, place: str, x: Tensor, q: Quantized) -> None:
        """Count one operand: x as it was, q as the product gets it."""
        made, found = counted(x, q), self.values[place]
        for name, value in made.items():
            found[name].append(value)
        amax, scale = log2(x.abs().max()), log2(decoded_scales(q).max())
        before = self.last.get(place, (math.nan, math.nan))
        found[AMAX_STEP].append(abs(amax - before[0]))
        found[SCALE_STEP].append(abs(scale - before[1]))
        self.last[place] = amax, scale

    def means(self, place: str) -> dict[str, float]:
        """Each counter's mean over the steps that have it; NaN where none does."""
        return {name: mean(values) for name, values in self.values[place].items()}


def counted(x: Tensor, q: Quantized) -> dict[str, float]:
    """Shares in percent and the ratio in decibels, of one operand."""
    wide, y = x.float(), fast.dequantize(q, torch.float32)
    nonzero, noise = wide != 0, (wide - y).square().sum()
    lost = ((y == 0) & nonzero).sum() / nonzero.sum().clamp(min=1)
    # The largest code's magnitude in each block: its decoded value over its scale is the format's largest.
    top = (y.abs() >= largest(q) * (1 - 1e-6)) & nonzero
    return {
        LOST: 100 * float(lost),
        SATURATED: 100 * float(top.float().mean()),
        SQNR: 10 * math.log10(max(float(wide.square().sum() / noise), 1e-30)) if noise > 0 else math.inf,
        BAD: 100 * float(decoded_scales(q).isnan().float().mean()),
    }


def decoded_scales(q: Quantized) -> Tensor:
    """The scales as float32."""
    if q.scale.dtype == torch.float32:
        return q.scale
    if q.scheme.scale.storage == "float8_e8m0fnu":
        return torch.where(q.scale == 255, math.nan, torch.exp2(q.scale.to(torch.float32) - 127))
    return fast.decode(q.scale, q.scheme.scale.storage)


def largest(q: Quantized) -> Tensor:
    """The largest magnitude that each element could have, (rows, columns) or something that broadcasts to it."""
    scales, top = decoded_scales(q), float(q.scheme.format.max)
    rows, columns = q.shape
    if scales.dim() == 0:
        return scales * top
    across, along = rows // scales.shape[0], columns // scales.shape[1]
    return scales.repeat_interleave(across, 0).repeat_interleave(along, 1) * top


def log2(x: Tensor) -> float:
    """log2, NaN of zero."""
    value = float(x)
    return math.log2(value) if value > 0 else math.nan


def mean(values: Iterable[float]) -> float:
    """The mean of what is not NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


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
