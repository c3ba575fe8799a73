"""Trainings with a planted fault beside one without: what the loss shows, and what the counters of the layer show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from experiments.data.corpora.split_corpus import evaluation_texts
from experiments.fp8_training.deadline import Deadline
from experiments.fp8_training.training.convergence import EXPERIMENT, converter
from experiments.fp8_training.training.counters import UNITS, mean
from experiments.fp8_training.training.faults import Fault, Watcher, plant
from experiments.fp8_training.training.plans import PAIRED, Plan, Trial
from experiments.fp8_training.training.workers import measure_each
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.pretraining.evaluation import bits_per_byte
from experiments.models.pretraining.settings import Budget
from experiments.models.pretraining.training import pretrain
from experiments.pretraining.run import BITS, Values, loss_curve, quality
from experiments.runs.settings import Settings

KIND = "faults"
HEALTHY, CONTROL = "no fault", "no fault, nothing quantized"
LAYER = "model.layers.1.mlp.gate_proj"
#: One scale a tensor, as delayed scaling has it.
RECIPE = "tensorwise"
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


def name_of(case: Case) -> str:
    """The method of its rows."""
    return HEALTHY if case is None else case if isinstance(case, str) else case.name


def trial_of(settings: Settings, plan: Plan) -> Trial:
    """The training that all faults share."""
    size, budget = BUDGETS[settings.scale]
    return plan.trial(PAIRED, size, RECIPE, budget, 0)


def run(settings: Settings, journal: Journal, plan: Plan, deadline: Deadline) -> None:
    """Add the rows of all faults that the deadline reaches; the training without one comes first."""
    trial, table = trial_of(settings, plan), table_name(KIND, settings.scale, settings.corpus.name)
    missing = [one for one in CASES if not journal.finished(table, setting_of(trial), name_of(one))]
    works = {name_of(case): partial(measure, settings, plan, trial, case) for case in missing}
    measure_each("faults", works, settings.workers, deadline, lambda name, rows: journal.add(rows))


def setting_of(trial: Trial) -> str:
    """Size, budget and recipe."""
    return f"{trial.setting}, {RECIPE}"


def measure(settings: Settings, plan: Plan, trial: Trial, case: Case) -> list[Row]:
    """Train with a fault and evaluate the weights that it leaves, the fault taken out; all rows of it."""
    planting = None if isinstance(case, str) else Planting(case)
    made = pretrain(trial.settings, settings.corpus, settings.device, planting)
    if planting is not None:
        planting.undo()
    texts = {name: text[: plan.evaluated] for name, text in evaluation_texts(settings.corpus).items()}
    found = quality(bits_per_byte(made.model, texts, trial.settings.model.context), texts)
    values: Values = {
        **found,
        f"training {BITS} at the end": (made.last_loss, "bit"),
        **loss_curve(made.losses),
        **({} if planting is None else counter_values(planting.watcher)),
    }
    where = settings.corpus.name, setting_of(trial), name_of(case)
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


__all__ = ["CASES", "CONTROL", "FAULTS", "HEALTHY", "KIND", "Planting", "measure", "name_of", "run"]
