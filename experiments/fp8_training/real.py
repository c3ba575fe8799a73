"""The part of experiment `fp8_training` on real models: `ao-lab reproduce fp8_training --model DIR`.

For each seed the model is fine-tuned in bfloat16 and in each recipe, on the same sequences in the same order with the same
optimizer, then evaluated as a plain model in bfloat16: training alone differs. Sequences and windows are those of `qat` on real
models, whose fine-tuning this is; all linear layers but a head that is tied to the embedding train by the recipe.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from ao_lab.training.api import convert_for_training_
from experiments.fp8_training.methods import BASE, RECIPES
from experiments.harness.measuring import Deadline, Values, status
from experiments.harness.rows import Journal, Row
from experiments.models.causal_lm import BASE as DENSE
from experiments.models.causal_lm import DTYPE, REAL, RealModel, linears, sizes
from experiments.models.fine_tuning import fine_tune, trainable
from experiments.models.quantized_model import WEIGHTS
from experiments.qat.real import PLANS, Here, losses, training_facts
from experiments.runs.real_models import Place, Tables, by_data, facts, harness_values, run_models
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings

EXPERIMENT = "fp8_training"
#: Recipes beside bfloat16, by scale.
DEFAULT = {"quick": ("rowwise",), "full": ("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8")}


@dataclass(frozen=True)
class Task:
    """The model as it came (no recipe), or fine-tuned in a recipe on the sequences of a seed."""

    seed: int
    recipe: str

    @property
    def method(self) -> str:
        """The method of its rows."""
        return method_of(self.recipe) if self.recipe else DENSE


def method_of(recipe: str) -> str:
    """The method of rows of a recipe."""
    return f"fine-tuned in {'bfloat16' if recipe == BASE else recipe}"


def planned(settings: Settings) -> list[Task]:
    """The model as it came, then seed by seed bfloat16 and the recipes."""
    names = dict.fromkeys([BASE, *(settings.only or DEFAULT[settings.scale])])
    return [Task(0, ""), *(Task(seed, one) for seed in range(PLANS[settings.scale].seeds) for one in names)]


def run_real(settings: Settings, journal: Journal) -> list[Row]:
    """Rows of all models that were asked for; rows in the journal are not measured again."""
    return all_rows(settings, journal, run_models(EXPERIMENT, settings, journal, measure_model))


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""

    def load() -> tuple[Values, Callable[[Task], dict[str, Values]]]:
        here = Here.of(settings, PLANS[settings.scale], model)
        return {**facts(here.bench), **training_facts(here)}, partial(measure, here)

    tasks = {Place(WEIGHTS, one.method, one.seed): one for one in planned(settings)}
    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)
    return tables.measure(f"fine-tuning, {model.name}", tasks, load, even=True)


def measure(here: Here, task: Task) -> dict[str, Values]:
    """Values of a task by the data of their tables: each text, and the model."""

    def work(found: dict[str, Values]) -> Values:
        model, values = model_of(here, task)
        for windows in here.bench.windows:
            found[windows.text.name] = {**losses(model, windows), **status("ok")}
        return {**values, **harness_values(here.settings, here.bench.model, model), **sizes(model)}

    return by_data(work)


def model_of(here: Here, task: Task) -> tuple[nn.Module, Values]:
    """The model of a task as a plain one in bfloat16, and what training it took."""
    plain = copy.deepcopy(here.bench.base)
    if not task.recipe:
        return plain, {}
    model = trainable(here.bench.base, here.dtype)
    if task.recipe != BASE:
        convert(model, task.recipe)
    values = fine_tune(model, here.sequences(task.seed), here.plan.tuning)
    plain.load_state_dict({name: one.to(DTYPE) for name, one in model.state_dict().items()})
    return plain.eval().requires_grad_(False), values


def convert(model: nn.Module, recipe: str) -> None:
    """Let the linear layers train by a recipe; ValueError where its blocks divide no layer."""
    names = set(linears(model))
    convert_for_training_(model, recipe, lambda module, name: name in names)


def check_recipes(names: Sequence[str]) -> None:
    """ValueError for names that are no recipes."""
    for name in names:
        if name not in (BASE, *RECIPES):
            raise ValueError(
                f"--only {name} is no recipe of training; those are {', '.join((BASE, *RECIPES))}"
            )
