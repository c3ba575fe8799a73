"""Trainings by recipe over paired seeds, their gaps to bfloat16, and trainings with a planted fault.

Runs of one seed have the same initial weights and the same text in the same order, whatever their recipe, and the same bits in
whichever process. Weights and the words of stochastic rounding are drawn from torch's one generator: trainings in threads of
one process would not be paired. Trainings that share the device with others learn what they learn alone, but their seconds are
not those of the recipe: their rows have no times and speeds. Long trainings never share it, nor do those for a number of
seconds, which would take fewer steps. Rows of "paired", "sweep", "long" are one training each, rows of "gaps" are over seeds.

The gap of a seed is 100 (loss of the recipe / loss of bfloat16 - 1) percent, positive where the recipe is worse; over seeds it
has Student's interval of 95%, which says on which side of a margin named beforehand it lies.

A fault is planted into one operand of one layer: `plant` replaces the forward of one converted layer by the same three products
on operands that are quantized here, one by one, where they can be watched and spoiled; the library has no hook for this and
needs none. Without a fault outputs and gradients are those of the layer, bit for bit. The loss, and the counters of the layer,
say what a fault shows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fast
from ao_lab.training.layers import LowPrecisionLinear, autocast
from ao_lab.training.products import product
from experiments.fp8_training.methods import BASE, BASE_NAMES, LONG, PAIRED, Plan, Trial, is_linear
from experiments.harness.measuring import Deadline, measure_each
from experiments.harness.revision import state
from experiments.harness.rows import Journal, Row, interval, library_versions, table_name, table_parts
from experiments.models.pretraining import Budget, Convert, pretrain
from experiments.models.train import Checkpoint
from experiments.pretraining.run import (
    BITS,
    CHECKPOINT_SECONDS,
    COMMON_BITS,
    LEFT_BITS,
    Values,
    evaluated,
    loss_curve,
    speed,
)
from experiments.runs.settings import Settings
from reference import Quantized, Scales
from reference.training.recipe import PLACES, Operand, Recipe

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
        journal.add(gap_rows(settings, journal.rows))


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
    found = evaluated(made.model, settings.corpus, trial.settings.model.context, plan.evaluated)
    facts = speed(made, trial, settings.device_name)
    if not made.alone:
        facts = {name: value for name, value in facts.items() if name not in TIMED}
    values = {**found, **facts}
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


def gap_rows(settings: Settings, rows: Sequence[Row]) -> list[Row]:
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
    """Whether a metric is one that gaps are taken of; without rare bytes those of whole splits."""
    common = metric.startswith((f"{COMMON_BITS}, ", f"{LEFT_BITS}, ")) and "/" not in metric
    return metric == TRAINED or common or metric.startswith(f"{BITS}, ")


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


KIND = "faults"
HEALTHY, CONTROL = "no fault", "no fault, nothing quantized"
LAYER = "model.layers.1.mlp.gate_proj"
#: One scale a tensor, as delayed scaling has it.
RECIPE = "tensorwise"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong in the operand at a place of `reference.training.recipe.PLACES`.

    scale_power: scales, for coding and decoding, are those of the values times two to this. decode_power: codes are right and
    are decoded with scales times two to this. stale: scales are those of so many steps before. dropped: rows and columns at the
    matrix's start whose codes are zero, as where a program's store is missing.
    """

    name: str
    place: str
    scale_power: int = 0
    decode_power: int = 0
    stale: int = 0
    dropped: tuple[int, int] = (0, 0)


#: A quarter and more of a layer's outputs, or all of an operand: none is so small that nothing would show.
FAULTS = (
    Fault(name="input's scale 16 times too small", place="output.a", scale_power=-4),
    Fault(name="gradient decoded with 4 times its scale", place="input_grad.a", decode_power=2),
    Fault(name="block of 128 x 128 of the weight dropped", place="output.b", dropped=(128, 128)),
    Fault(name="gradient's scale from 16 steps before", place="weight_grad.a", stale=16),
)
#: In the order in which they are trained: without a fault (None), without a recipe (CONTROL), and the faults.
Case = Fault | str | None
CASES: tuple[Case, ...] = (None, CONTROL, *FAULTS)
#: The budget of each scale, and which size is trained.
BUDGETS = {"quick": ("micro", Budget(bytes=36 * 512)), "full": ("30m", Budget(bytes=3_000_000))}


@dataclass
class Planting:
    """What makes a model train by the recipe with a watcher in one layer."""

    fault: Fault | None
    watcher: Watcher = field(init=False)
    undo: Callable[[], None] = field(init=False)

    def __post_init__(self) -> None:
        self.watcher = Watcher(self.fault)

    def __call__(self, model: nn.Module) -> None:
        """Convert the model and plant the fault."""
        convert = converter(RECIPE)
        if convert is not None:
            convert(model)
        self.undo = plant(model.get_submodule(LAYER), self.watcher)


def fault_name_of(case: Case) -> str:
    """The method of its rows."""
    return HEALTHY if case is None else case if isinstance(case, str) else case.name


def trial_of(settings: Settings, plan: Plan) -> Trial:
    """The training that all faults share."""
    size, budget = BUDGETS[settings.scale]
    return plan.trial(PAIRED, size, RECIPE, budget, 0)


def fault_run(settings: Settings, journal: Journal, plan: Plan, deadline: Deadline) -> None:
    """Add the rows of all faults that the deadline reaches; the training without one comes first."""
    trial, table = trial_of(settings, plan), table_name(KIND, settings.scale, settings.corpus.name)
    missing = [one for one in CASES if not journal.finished(table, setting_of(trial), fault_name_of(one))]
    works = {fault_name_of(case): partial(fault_measure, settings, plan, trial, case) for case in missing}
    measure_each("faults", works, settings.workers, deadline, lambda name, rows: journal.add(rows))


def setting_of(trial: Trial) -> str:
    """Size, budget and recipe."""
    return f"{trial.setting}, {RECIPE}"


def fault_measure(settings: Settings, plan: Plan, trial: Trial, case: Case) -> list[Row]:
    """Train with a fault and evaluate the weights that it leaves, the fault taken out; all rows of it."""
    planting = None if isinstance(case, str) else Planting(case)
    made = pretrain(trial.settings, settings.corpus, settings.device, planting)
    if planting is not None:
        planting.undo()
    values: Values = {
        **evaluated(made.model, settings.corpus, trial.settings.model.context, plan.evaluated),
        f"training {BITS} at the end": (made.last_loss, "bit"),
        **loss_curve(made.losses),
        **({} if planting is None else counter_values(planting.watcher)),
    }
    where = settings.corpus.name, setting_of(trial), fault_name_of(case)
    return [
        settings.row(EXPERIMENT, KIND, *where, metric, value, unit)
        for metric, (value, unit) in values.items()
        if value == value
    ]


def counter_values(watcher: Watcher) -> Values:
    """Means over all steps of every counter of every place."""
    return {
        f"{place}: {name}": (mean(values), UNITS[name])
        for place, found in watcher.counters.values.items()
        for name, values in found.items()
    }


Matrix = Tensor | Quantized


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


@dataclass
class Watcher:
    """Quantizes the operands of one layer, counts what comes out, and spoils those at the fault's place."""

    fault: Fault | None = None
    counters: Counters = field(default_factory=Counters)
    history: list[Scales] = field(default_factory=list)

    def __call__(self, place: str, x: Tensor, operand: Operand) -> Matrix:
        """The operand as its product gets it. ValueError for operands that are mixed, drawn or made of other codes."""
        if operand.scheme is None:
            return x
        if operand.hadamard or operand.is_stochastic or operand.source != "tensor":
            raise ValueError(
                f"{place}: operands that are mixed, drawn or made of other codes are not watched"
            )
        fault = self.fault if self.fault is not None and self.fault.place == place else None
        scales = fast.choose_scales(x, operand.scheme)
        q = fast.quantize(x, operand.scheme, scales=self.spoiled(fault, scales, operand))
        if fault is not None:
            q = spoiled_codes(fault, q)
        self.counters.see(place, x, q)
        return q

    def spoiled(self, fault: Fault | None, scales: Scales, operand: Operand) -> Scales:
        """The scales that are used; scales of earlier steps are kept where the fault wants them."""
        if fault is None:
            return scales
        if fault.stale:
            self.history.append(scales)
            scales = self.history[max(0, len(self.history) - 1 - fault.stale)]
        return replace(scales, scale=times_power(scales.scale, fault.scale_power, operand))


def times_power(scale: Tensor, power: int, operand: Operand) -> Tensor:
    """Scales times two to a power: float32, or e8m0 codes, whose ends stay."""
    if not power:
        return scale
    if scale.dtype == torch.float32:
        return scale * 2.0**power
    if operand.scheme is None or operand.scheme.scale.storage != "float8_e8m0fnu":
        raise ValueError(f"scales are float32 or e8m0, got {scale.dtype}; choose another recipe")
    return (scale.to(torch.int32) + power).clamp(0, 254).to(scale.dtype)


def spoiled_codes(fault: Fault, q: Quantized) -> Quantized:
    """Codes without the dropped block, scales as they are decoded."""
    rows, columns = fault.dropped
    if rows and columns:
        codes = q.codes.clone()
        codes[:rows, :columns] = 0
        q = replace(q, codes=codes)
    if fault.decode_power:
        q = replace(q, scale=times_power(q.scale, fault.decode_power, Operand(scheme=q.scheme)))
    return q


class WatchedLinear(torch.autograd.Function):
    """y = x @ w.T for x (M, K) by a recipe, each operand quantized by a watcher."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, recipe: Recipe, watcher: Watcher) -> Tensor:
        """The output."""
        ctx.save_for_backward(x, w)
        ctx.recipe, ctx.watcher = recipe, watcher
        return watched_product("output", x, w, recipe, watcher)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of x and w."""
        x, w = ctx.saved_tensors
        dx = watched_product("input_grad", g, w.t().contiguous(), ctx.recipe, ctx.watcher)
        dw = watched_product("weight_grad", g.t().contiguous(), x.t().contiguous(), ctx.recipe, ctx.watcher)
        return dx, dw, None, None


def watched_product(which: str, a: Tensor, b: Tensor, recipe: Recipe, watcher: Watcher) -> Tensor:
    """a @ b.T of the operands that the watcher makes."""
    record = getattr(recipe, which)
    left, right = watcher(f"{which}.a", a, record.a), watcher(f"{which}.b", b, record.b)
    return product(which, left, right, record, a.dtype)


def plant(module: nn.Module, watcher: Watcher) -> Callable[[], None]:
    """Let a converted layer without bias compute through a watcher; returns what undoes it.

    ValueError for other modules and for a fault whose place is none.
    """
    if not isinstance(module, LowPrecisionLinear) or module.bias is not None:
        raise ValueError(f"faults are planted into converted layers without bias, got {module}")
    if watcher.fault is not None and watcher.fault.place not in PLACES:
        raise ValueError(f"place is one of {', '.join(PLACES)}; got {watcher.fault.place!r}")
    module.forward = partial(watched_forward, module, watcher)  # type: ignore[method-assign]

    def undo() -> None:
        del module.forward

    return undo


def watched_forward(module: LowPrecisionLinear, watcher: Watcher, x: Tensor) -> Tensor:
    """x @ weight.T as the module computes it."""
    x, w, _ = autocast(x, module.weight, None)
    rows = x.reshape(-1, x.shape[-1])
    y = WatchedLinear.apply(rows, w, module.low_precision.recipe, watcher)
    return y.reshape(*x.shape[:-1], w.shape[0])
