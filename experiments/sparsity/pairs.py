"""All models of one subject over paired seeds, and how far they lie from the dense one.

Of each seed one model is trained from random weights. From there it is trained on in three ways, on the same data in the same
order, for as many steps: dense (the base of all comparisons), with fixed 2:4 masks, and by SR-STE. One-shot pruning is of the
base, so that every method has seen as much data. Every model is evaluated with float weights and quantized. A GPU's trainings
are not reproducible bit for bit; the model of a seed's start is kept in the cache, so that what goes on from it is paired.

What is compared: dense weights, 2:4 by each score at once, 2:4 after sparse fine-tuning, each stored in three ways.

A method's name says how weights became 2:4; behind a plus it says how they are stored. Codes are symmetric, so that zero
stays zero: a weight that is 2:4 stays so when it is quantized. Here quantized 2:4 weights are dense codes with zeros, whose
values are those of the compressed ones.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ao_lab
from ao_lab.config.base import Config
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from experiments.data.evaluation import stored
from experiments.fp8_training.convergence import Gap
from experiments.harness.measuring import Deadline, Values, Work, bar, measure_all, measure_each
from experiments.harness.revision import state
from experiments.harness.rows import (
    PARTIAL,
    Journal,
    Row,
    interval,
    library_versions,
    table_name,
    table_parts,
)
from experiments.models.pretraining import adamw, set_rate
from experiments.runs.settings import Settings

EXPERIMENT = "sparsity"
#: The method of the model that all others go on from.
START = "before the compared training"
BITS_STORED, SPARSE = "bits per weight", "2:4 layers"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One model and task at one scale.

    kind, data, setting: of its rows. seeds: how many. metric: what gaps are of, in `unit`; higher_is_better: its direction;
    relative: whether a gap is in percent of the dense model's, or in units of the metric. margin: the largest gap that counts
    as none, named before anything was measured. build: the model with random weights. start: trains it from there.
    go_on: trains it on, with something called after each step. calibration: batches of training data. evaluate: its metrics.
    key: whatever determines the trained weights beside code and libraries.
    """

    kind: str
    data: str
    setting: str
    seeds: int
    metric: str
    unit: str
    higher_is_better: bool
    relative: bool
    margin: float
    build: Callable[[int], nn.Module]
    start: Callable[[int], nn.Module]
    go_on: Callable[[nn.Module, int, Callable[[nn.Module], object]], None]
    calibration: Callable[[int], Sequence[Tensor]]
    evaluate: Callable[[nn.Module], Values]
    key: tuple[Any, ...]


#: What a subject is found by in another process.
SubjectOf = Callable[[Settings], Subject]


def run(settings: Settings, journal: Journal, subject_of: SubjectOf, deadline: Deadline) -> None:
    """Add the rows of all models that the deadline reaches, and gaps over seeds."""
    subject, measured = subject_of(settings), False
    for name, methods in works_of(settings, subject_of, subject).items():
        missing = {
            f"{name}, seed {seed}": work
            for (method, seed), work in methods.items()
            if not is_finished(settings, journal, subject, method, seed)
        }
        measured = measured or bool(missing)
        title = f"{subject.kind}: {name}"
        if settings.device == "cpu" and settings.workers == 1:
            in_threads(title, missing, journal, deadline)
        else:
            measure_each(title, missing, settings.workers, deadline, lambda _, rows: journal.add(rows))
    # What follows from rows that were not measured again is as old as they are.
    gaps = gaps_kind(subject.kind)
    if measured or not any(table_parts(row.table)[0] == gaps for row in journal.rows):
        journal.add(gap_rows(settings, subject, journal.rows))


def in_threads(title: str, works: Mapping[str, Work], journal: Journal, deadline: Deadline) -> None:
    """On a CPU one thread a training, as many at once as there are cores: small models are not faster on several, and their
    weights then do not depend on the number of cores."""

    def work(name: str) -> list[Row]:
        return [] if deadline.reason() else works[name]()

    with bar(title, len(works)) as step:
        for name, rows in measure_all(list(works), work, "cpu"):
            journal.add(rows)
            step(name)


def works_of(
    settings: Settings, subject_of: SubjectOf, subject: Subject
) -> dict[str, dict[tuple[str, int], Work]]:
    """What is measured in turn: starts of all seeds first, as several trainings go on from each."""
    seeds = range(subject.seeds)
    found: dict[str, dict[tuple[str, int], Work]] = {
        START: {(START, seed): partial(measure_start, settings, subject_of, seed) for seed in seeds},
        DENSE: {(DENSE, seed): partial(measure_dense, settings, subject_of, seed) for seed in seeds},
    }
    for one in FINE_TUNINGS:
        found[one.name] = {
            (one.name, seed): partial(measure_tuned, settings, subject_of, one, seed) for seed in seeds
        }
    return found


def is_finished(settings: Settings, journal: Journal, subject: Subject, method: str, seed: int) -> bool:
    """Whether the rows of a training are there."""
    table = table_name(subject.kind, settings.scale, subject.data)
    return journal.finished(table, subject.setting, method, seed)


def measure_start(settings: Settings, subject_of: SubjectOf, seed: int) -> list[Row]:
    """Train a model from random weights; its rows."""
    subject = subject_of(settings)
    return rows_of(settings, subject, seed, {START: subject.evaluate(started(settings, subject, seed))})


def measure_dense(settings: Settings, subject_of: SubjectOf, seed: int) -> list[Row]:
    """Train on with dense weights; rows of that model, and of its copies that each score prunes."""
    subject = subject_of(settings)
    model = started(settings, subject, seed)
    subject.go_on(model, seed, lambda model: None)
    found = evaluations(subject, model, DENSE, sparse=False)
    for score in SCORES:
        pruned = copy.deepcopy(model)
        prune(pruned, score, subject.calibration(seed))
        found |= evaluations(subject, pruned, one_shot(score), sparse=True)
    return rows_of(settings, subject, seed, found)


def measure_tuned(settings: Settings, subject_of: SubjectOf, tuning: FineTuning, seed: int) -> list[Row]:
    """Train on with 2:4 weights; its rows."""
    subject = subject_of(settings)
    model = started(settings, subject, seed)
    if tuning.pruned_by:
        prune(model, tuning.pruned_by, subject.calibration(seed))
    train_sparse(subject, model, tuning, seed)
    return rows_of(settings, subject, seed, evaluations(subject, model, tuning.name, sparse=True))


def train_sparse(subject: Subject, model: nn.Module, tuning: FineTuning, seed: int) -> None:
    """Train a model on with 2:4 weights, in place; they are 2:4 at the end."""
    ao_lab.sparsify_(model, tuning.config, inside_blocks)
    subject.go_on(model, seed, ao_lab.step_sparsity_)
    ao_lab.finish_sparsity_(model)


def evaluations(subject: Subject, model: nn.Module, method: str, *, sparse: bool) -> dict[str, Values]:
    """Values of a model in every storage, by the names of methods."""
    found = {}
    for storage in STORAGES:
        made = copy.deepcopy(model)
        store(made, storage)
        values = subject.evaluate(made)
        count, layers = sparse_layers(made)
        if sparse and count < layers:
            raise ValueError(f"{stored_as(method, storage)}: {layers - count} of {layers} layers are not 2:4")
        values[BITS_STORED] = bits_per_weight(made, sparse=sparse), "bit"
        values[SPARSE] = float(count), ""
        found[stored_as(method, storage)] = values
    return found


def started(settings: Settings, subject: Subject, seed: int) -> nn.Module:
    """The model of a seed after training from random weights: from the cache, or trained now and stored there."""
    parts = [json.dumps([subject.key, seed], sort_keys=True, default=str), library_versions()]
    parts += [state(), settings.device_name]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    path = settings.cache / "models" / f"{EXPERIMENT}-{key}.safetensors"
    if path.exists():
        model = subject.build(seed)
        model.load_state_dict(load_file(path))
        return model.eval().requires_grad_(False)
    model = subject.start(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.{seed}{PARTIAL}")
    save_file({name: value.cpu().contiguous() for name, value in model.state_dict().items()}, partial_path)
    partial_path.replace(path)
    return model


def rows_of(settings: Settings, subject: Subject, seed: int, found: Mapping[str, Values]) -> list[Row]:
    """Tidy rows of a seed, by method."""
    of_seed = replace(settings, seed=seed)
    return [
        of_seed.row(EXPERIMENT, subject.kind, subject.data, subject.setting, method, metric, value, unit)
        for method, values in found.items()
        for metric, (value, unit) in values.items()
    ]


def gaps_kind(kind: str) -> str:
    """The kind of table of gaps over seeds."""
    return f"{kind} gaps"


def gap_rows(settings: Settings, subject: Subject, rows: Sequence[Row]) -> list[Row]:
    """Rows over seeds of every method that has at least two seeds with the dense model's beside them."""
    table, values = table_name(subject.kind, settings.scale, subject.data), dict[str, dict[int, float]]()
    for row in rows:
        if (row.table, row.setting, row.metric) == (table, subject.setting, subject.metric):
            values.setdefault(row.method, {})[row.seed] = row.value
    base, made = values.get(DENSE, {}), []
    for method, mine in values.items():
        seeds = sorted(base.keys() & mine.keys())
        if method not in (DENSE, START) and len(seeds) > 1:
            gap = gap_of(subject, [base[one] for one in seeds], [mine[one] for one in seeds])
            unit = "%" if subject.relative else "points"
            facts = (
                ("gap", gap.mean, unit),
                ("gap, 95% interval", gap.half, unit),
                ("gap, seeds", gap.seeds, ""),
            )
            where = EXPERIMENT, gaps_kind(subject.kind), subject.data, subject.setting, method
            made += [settings.row(*where, *fact) for fact in facts]
    return made


def gap_of(subject: Subject, base: Sequence[float], mine: Sequence[float]) -> Gap:
    """The paired gap to the dense model, positive where a method is worse."""
    sign = -1 if subject.higher_is_better else 1
    parts = [
        sign * (value - dense) * (100 / dense if subject.relative else 1)
        for dense, value in zip(base, mine, strict=True)
    ]
    found = interval(parts)
    return Gap(found.mean, found.half, len(parts))


# What is trained, pruned and evaluated: the common form of the vision transformer and of the language model.

#: Added to the seed of what is drawn: other data in training from random weights, after it, and for calibration.
TUNING_SEED, CALIBRATION_SEED = 1000, 2000


#: Held while a model draws its weights from torch's one generator.
DRAWING = threading.Lock()
Model = TypeVar("Model", bound=nn.Module)


def seeded(make: Callable[[], Model], seed: int) -> Model:
    """A model with the random weights of a seed, whatever other threads draw."""
    with DRAWING:
        torch.manual_seed(seed)
        return make()


# The loop that all models of this experiment are trained on with, dense or 2:4.

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Steps of AdamW: the rate rises linearly over the share `warmup` of them, then falls to 0 along a cosine.

    batch: images or sequences a step. clip: the largest norm of the gradients.
    """

    steps: int
    batch: int
    rate: float
    warmup: float = 0.1
    weight_decay: float = 0.05
    clip: float = 1.0

    def rate_at(self, number: int) -> float:
        """The rate of step `number`, from 0."""
        rise = min(1.0, (number + 1) / max(1.0, self.warmup * self.steps))
        return self.rate * rise * 0.5 * (1 + math.cos(math.pi * number / self.steps))


def fit(
    model: nn.Module,
    schedule: Schedule,
    draw: Callable[[torch.Generator], Batch],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    seed: int,
    after: Callable[[nn.Module], object] = lambda model: None,
) -> None:
    """Train a model in place. draw: a batch by a generator of the seed's own, so that all methods of a seed see the same.
    after: called after each step of the optimizer."""
    generator = torch.Generator().manual_seed(seed)
    model.train().requires_grad_(True)
    optimizer = adamw(model, schedule)  # type: ignore[arg-type]
    for number in range(schedule.steps):
        set_rate(optimizer, schedule.rate_at(number))
        loss_of(model, draw(generator)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        optimizer.zero_grad()
        after(model)
    model.eval().requires_grad_(False)


PATTERN = "2:4"
DENSE = "dense"
SCORES = ("magnitude", "wanda", "ria", "sparsegpt")
#: Weights in one group of 4-bit integers; it divides every layer of every model here.
GROUP = 32
#: How weights are stored: by its name what `quantize_` is told, None for float weights.
STORAGES: dict[str, Callable[[], Config] | None] = {
    "": None,
    "int4": lambda: ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(GROUP)),
    "fp8": lambda: ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow()),
}
#: Bits of a dense weight that is not quantized, as models are served: bfloat16. Of its place among four, where it is 2:4.
PLAIN_BITS, INDEX_BITS = 16, 1


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """One way to train on with 2:4 weights. pruned_by: the score that prunes the trained model first, "" for none."""

    name: str
    config: ao_lab.SparseTrainingConfig
    pruned_by: str = ""


#: SparseGPT, then training with its masks, is how Sparse-Llama-3.1-8B-2of4 was made; SR-STE (arXiv 2102.04010) prunes nothing
#: before.
FINE_TUNINGS = (
    FineTuning(
        name="fine-tuned, fixed masks",
        config=ao_lab.SparseTrainingConfig(pattern=PATTERN, masks="fixed", gradient="masked"),
        pruned_by="sparsegpt",
    ),
    FineTuning(
        name="fine-tuned, SR-STE",
        config=ao_lab.SparseTrainingConfig(pattern=PATTERN, masks="recomputed", gradient="sr-ste"),
    ),
)


def one_shot(score: str) -> str:
    """The method of a model that a score has pruned at once."""
    return f"one-shot, {score}"


def stored_as(method: str, storage: str) -> str:
    """The method with how its weights are stored."""
    return f"{method} + {storage}" if storage else method


def parts_of(method: str) -> tuple[str, str]:
    """How weights became 2:4, and how they are stored: the inverse of `stored_as`."""
    name, _, storage = method.partition(" + ")
    return name, storage


#: All methods without storage, in the order of tables.
METHODS = (DENSE, *map(one_shot, SCORES), *(one.name for one in FINE_TUNINGS))


def inside_blocks(module: nn.Module, name: str) -> bool:
    """The layers that are pruned and quantized: linear ones inside the blocks, as `sparsify_` chooses them."""
    return isinstance(module, nn.Linear) and name.startswith(("blocks.", "model.layers."))


def prune(model: nn.Module, score: str, calibration: Sequence[Tensor]) -> None:
    """Make the layers of a model 2:4 at once."""
    data: dict[str, Iterable[Tensor]] = {} if score == "magnitude" else {"calibration": calibration}
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN, score), inside_blocks, **data)


def store(model: nn.Module, storage: str) -> None:
    """Quantize the same layers."""
    config = STORAGES[storage]
    if config is not None:
        ao_lab.quantize_(model, config(), filter_fn=inside_blocks)


@torch.no_grad()
def sparse_layers(model: nn.Module) -> tuple[int, int]:
    """How many of the layers are 2:4, by their values, and how many there are."""
    found = [weight_of(module) for name, module in model.named_modules() if inside_blocks(module, name)]
    return sum(is_sparse(one) for one in found), len(found)


def is_sparse(weight: Tensor) -> bool:
    """Whether at most two of every four weights along the last axis are other than zero."""
    return bool(((weight != 0).unflatten(-1, (-1, 4)).sum(-1) <= 2).all())


def weight_of(layer: nn.Module) -> Tensor:
    """The values of a layer's weight."""
    weight = layer.weight
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.detach()


def bits_per_weight(model: nn.Module, *, sparse: bool) -> float:
    """Bits of these layers' weights as served, scales too; of 2:4 ones half the elements and two bits of index each."""
    total = count = 0
    for name, module in model.named_modules():
        if inside_blocks(module, name):
            weight, size, rest = module.weight, module.weight.numel(), 0
            bits = PLAIN_BITS
            if isinstance(weight, QuantizedTensor):
                found = stored(weight.quantized)
                bits, rest = weight.quantized.scheme.format.bits, found.total - found.elements
            total += (size * bits // 2 + size * INDEX_BITS if sparse else size * bits) + 8 * rest
            count += size
    return total / count
