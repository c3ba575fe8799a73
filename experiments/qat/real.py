"""The part of experiment `qat` on real models: `ao-lab reproduce qat --model DIR`.

For each seed the model is fine-tuned as it is, on sequences that the seed draws from prose that no evaluation sees (or from
`--text`), and trained for quantization by each method on the same sequences, in the same order, with the same optimizer. The
fine-tuned model quantized without training is the line that QAT is to improve on. Every model is evaluated in bfloat16 as it
would be served; rows are of one seed, what is recovered follows from them on the page.

The fine-tuned model of a seed stays in the cache until all of the seed is measured, since training on a GPU is not
reproducible: a run that goes on without it measures that seed anew.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.eval import exponential, measured
from ao_lab.measure.folders import longest
from experiments.data.texts import (
    TextWindows,
    calibration_documents,
    drawn_sequences,
    mean_and_error,
    prose_of,
)
from experiments.harness.measuring import Deadline, Values, status
from experiments.harness.rows import Journal, Row
from experiments.models.causal_lm import (
    BASE,
    DTYPE,
    REAL,
    Bench,
    RealModel,
    Uncached,
    encoding_of,
    sizes,
)
from experiments.models.fine_tuning import Tuning, fine_tune, trainable, training_dtype
from experiments.models.quantized_model import WEIGHTS
from experiments.qat import arms
from experiments.qat.arms import METHODS, PTQ_BASE, TRAINED, Method, methods_named
from experiments.runs.real_models import (
    BATCH,
    Place,
    Tables,
    asked_of,
    bench_of,
    by_data,
    facts,
    harness_values,
    run_models,
)
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings

EXPERIMENT = "qat"
TUNED = f"{BASE}, fine-tuned"


@dataclass(frozen=True, kw_only=True)
class RealPlan:
    """One scale: paired seeds, how models train, and sequences that calibration reads."""

    seeds: int
    tuning: Tuning
    calibrating: int
    methods: tuple[Method, ...]


PLANS = {
    "quick": RealPlan(
        seeds=2,
        tuning=Tuning(steps=6, batch=2, length=128, rate=1e-4, scale_rate=5e-3),
        calibrating=8,
        methods=METHODS[:1],
    ),
    "full": RealPlan(
        seeds=5,
        tuning=Tuning(steps=100, batch=8, length=512, rate=1e-4, scale_rate=5e-3),
        calibrating=64,
        methods=METHODS,
    ),
}
#: Parameters from which the peak rate is that of published fine-tunings of larger models, and that rate.
LARGE, LARGE_RATE = 1_000_000_000, 2e-5


@dataclass(frozen=True)
class Task:
    """What is measured at once: the base model (no method, no seed), the fine-tuned one, or an arm of a method."""

    seed: int
    method: Method | None
    arm: str

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        return WEIGHTS if self.method is None else self.method.setting

    @property
    def name(self) -> str:
        """The method of its rows."""
        return self.arm if self.method is None else f"{self.method.name}: {self.arm}"

    @property
    def place(self) -> Place:
        """Where its rows stand."""
        return Place(self.setting, self.name, self.seed)


@dataclass
class Here:
    """One model: its windows, its training text by seed, and the fine-tuned model of the seed that is measured."""

    settings: Settings
    #: With the rate and the length that suit the model; and as it was asked for, by which the cache names models.
    plan: RealPlan
    asked: RealPlan
    bench: Bench
    documents: tuple[str, ...]
    tuned: tuple[int, nn.Module] | None = None

    @classmethod
    def of(cls, settings: Settings, plan: RealPlan, model: RealModel) -> Here:
        """Load a model, and what it reads."""
        bench = bench_of(settings, model)
        rate = plan.tuning.rate if parameters(bench.base) < LARGE else LARGE_RATE
        tuning = replace(plan.tuning, rate=rate, length=min(plan.tuning.length, longest(model.folder)))
        return cls(settings, replace(plan, tuning=tuning), plan, bench, training_documents(settings))

    def sequences(self, seed: int) -> Tensor:
        """Token ids that a seed trains on (steps * batch, length)."""
        encode, beginning = encoding_of(self.bench.model)
        tuning = self.plan.tuning
        return drawn_sequences(
            self.documents, encode, tuning.length, tuning.sequences, TRAINING_SEED + seed, beginning
        )

    def batches(self, seed: int) -> list[Tensor]:
        """The first of them, for calibration, on the device."""
        ids = self.sequences(seed)[: self.plan.calibrating]
        return list(ids.to(self.settings.device).split(BATCH[self.settings.device]))

    @property
    def dtype(self) -> torch.dtype:
        """Of weights in training."""
        return training_dtype(self.bench.base, self.settings.device)


#: Far above the seeds of calibration.
TRAINING_SEED = 2000


def parameters(model: nn.Module) -> int:
    """How many a model has."""
    return sum(one.numel() for one in model.parameters())


def training_documents(settings: Settings) -> tuple[str, ...]:
    """Text that models train on: the user's own, else what calibration may see."""
    own = asked_of(settings).own_text
    return (own.train,) if own is not None else calibration_documents(prose_of(settings.text, settings.cache))


def check_methods(names: Sequence[str]) -> None:
    """ValueError for names that are no schemes."""
    methods_named(names)


def plan_of(settings: Settings) -> RealPlan:
    """The plan of a run: the scale's, with the schemes that `settings.only` names."""
    plan = PLANS[settings.scale]
    return replace(plan, methods=methods_named(settings.only)) if settings.only else plan


def planned(plan: RealPlan) -> list[Task]:
    """The base model and its PTQ, then seed by seed the fine-tuned model and all arms."""
    tasks = [Task(0, None, BASE), *(Task(0, one, PTQ_BASE) for one in plan.methods)]
    for seed in range(plan.seeds):
        tasks.append(Task(seed, None, TUNED))
        tasks += [Task(seed, one, arm) for one in plan.methods for arm in one.arms if arm != PTQ_BASE]
    return tasks


def run_real(settings: Settings, journal: Journal) -> list[Row]:
    """Rows of all models that were asked for; rows in the journal are not measured again."""

    def measure_one(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
        return measure_model(settings, plan_of(settings), model, journal, deadline)

    return all_rows(settings, journal, run_models(EXPERIMENT, settings, journal, measure_one))


def measure_model(
    settings: Settings, plan: RealPlan, model: RealModel, journal: Journal, deadline: Deadline
) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""

    def load() -> tuple[Values, Callable[[Task], dict[str, Values]]]:
        here = Here.of(settings, plan, model)
        return {**facts(here.bench), **training_facts(here)}, partial(measure, here)

    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)
    drop_unpaired(tables, plan, model)
    tasks = {one.place: one for one in planned(plan)}
    failed = tables.measure(f"QAT, {model.name}", tasks, load, lambda task: arms.missing(task.arm), even=True)
    forget_tuned(tables, plan, model)
    return failed


def forget_tuned(tables: Tables, plan: RealPlan, model: RealModel) -> None:
    """Delete the fine-tuned models of seeds of which nothing is left to measure."""
    open_ = {place.seed for place in tables.left({one.place: one for one in planned(plan)})}
    for seed in set(range(plan.seeds)) - open_:
        tuned_path(tables.settings, plan, model, seed).unlink(missing_ok=True)


def training_facts(here: Here) -> Values:
    """How models train."""
    tuning = here.plan.tuning
    return {
        f"trains in: {str(here.dtype).removeprefix('torch.')}": (1.0, ""),
        "steps": (tuning.steps, ""),
        "tokens of a step": (tuning.batch * tuning.length, ""),
        "learning rate": (tuning.rate, ""),
    }


def tuned_path(settings: Settings, plan: RealPlan, model: RealModel, seed: int) -> Path:
    """Where the fine-tuned model of a seed waits for the rest of the seed."""
    parts = (str(model.folder.resolve()), plan.tuning, settings.device, asked_of(settings).own_text)
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
    return settings.cache / "qat" / f"{model.name}-{key}-{seed}.pt"


def drop_unpaired(tables: Tables, plan: RealPlan, model: RealModel) -> None:
    """Drop rows of a seed that is not whole and whose fine-tuned model has left the cache."""
    paired = {one.place: one for one in planned(plan) if one.arm not in (BASE, PTQ_BASE)}
    kind, names = f"{tables.kind}/{tables.settings.scale}/", {place.method for place in paired}
    for seed in {place.seed for place in tables.left(paired)}:
        if not tuned_path(tables.settings, plan, model, seed).is_file():
            mine = [row for row in tables.journal.rows if row.table.startswith(kind) and row.seed == seed]
            tables.journal.drop([row for row in mine if row.method in names])


def measure(here: Here, task: Task) -> dict[str, Values]:
    """Values of a task by the data of their tables: each text, and the model."""

    def work(found: dict[str, Values]) -> Values:
        model, values = model_of(here, task)
        model = model.eval().requires_grad_(False).to(DTYPE)
        for windows in here.bench.windows:
            found[windows.text.name] = {**losses(model, windows), **status("ok")}
        if task.arm != arms.BY_TORCHAO:
            values |= sizes(model)
        return {**values, **harness_values(here.settings, here.bench.model, model)}

    return by_data(work)


def losses(model: nn.Module, windows: TextWindows) -> Values:
    """Loss and perplexity of a model on a text, as `experiments.models.causal_lm.values_of` has them."""
    sums = measured(Uncached(model), windows)  # type: ignore[arg-type]
    loss, error = mean_and_error(sums.losses, windows.documents)
    return {
        "loss": (loss, "nat"),
        "loss, standard error": (error, "nat"),
        "perplexity": (exponential(loss), ""),
        "windows": (len(windows.ids), ""),
        "tokens of a window": (windows.ids.shape[1], ""),
        "windows begin with BOS": (float(windows.first == 1 and windows.share == 1.0), ""),
    }


def model_of(here: Here, task: Task) -> tuple[nn.Module, Values]:
    """The model of a task, and what making it took."""
    if task.method is None and task.arm == BASE:
        return copy.deepcopy(here.bench.base), {}
    if task.method is None:
        return copy.deepcopy(tuned(here, task.seed)), tuned_values(here, task.seed)
    if task.arm in TRAINED:
        return trained(here, task, task.method)
    base = here.bench.base if task.arm == PTQ_BASE else tuned(here, task.seed)
    started = time.perf_counter()
    made = arms.quantized(copy.deepcopy(base).eval(), task.method, task.arm, batches_for(here, task))
    return made, {"time to quantize": (time.perf_counter() - started, "s")}


def batches_for(here: Here, task: Task) -> list[Tensor]:
    """What calibration reads, where a task calibrates."""
    reads = task.arm in arms.READING
    return here.batches(task.seed) if reads else []


def trained(here: Here, task: Task, method: Method) -> tuple[nn.Module, Values]:
    """The model after QAT, converted."""
    model = trainable(here.bench.base, here.dtype)
    arms.prepare(model, method, task.arm, batches_for(here, task))
    tuning = arms.tuning_of(task.arm, here.plan.tuning)
    values = fine_tune(model, here.sequences(task.seed), tuning)
    return arms.convert(model, method, task.arm), {**values, "learning rate": (tuning.rate, "")}


def tuned(here: Here, seed: int) -> nn.Module:
    """The fine-tuned model of a seed, from memory, from the cache, or trained now."""
    if here.tuned is not None and here.tuned[0] == seed:
        return here.tuned[1]
    here.tuned = None
    path = tuned_path(here.settings, here.asked, here.bench.model, seed)
    model = trainable(here.bench.base, here.dtype)
    if path.is_file():
        state = torch.load(path, map_location=here.settings.device, weights_only=True)
        model.load_state_dict(state["model"])
    else:
        values = fine_tune(model, here.sequences(seed), here.plan.tuning)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        torch.save({"model": model.state_dict(), "values": {name: one for name, (one, _) in values.items()},
                    "units": {name: unit for name, (_, unit) in values.items()}}, partial)  # fmt: skip
        partial.replace(path)
    here.tuned = seed, model.eval().requires_grad_(False)
    return model


def tuned_values(here: Here, seed: int) -> Values:
    """What fine-tuning took."""
    path = tuned_path(here.settings, here.asked, here.bench.model, seed)
    state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {name: (value, state["units"][name]) for name, value in state["values"].items()}
