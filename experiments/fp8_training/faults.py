"""Trainings with a planted fault beside one without: what the loss shows, and what the counters of the layer show.

Faults planted into one operand of one layer, and what they change; the library has no hook for this and needs none.

`plant` replaces the forward of one converted layer by the same three products on operands that are quantized here, one by one,
where they can be watched and spoiled. Without a fault outputs and gradients are those of the layer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fast
from ao_lab.training.layers import LowPrecisionLinear, autocast
from ao_lab.training.products import product
from experiments.data.corpus import evaluation_texts
from experiments.fp8_training.convergence import EXPERIMENT, UNITS, Counters, converter, mean
from experiments.fp8_training.methods import PAIRED, Plan, Trial
from experiments.harness.measuring import Deadline
from experiments.harness.processes import measure_each
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.pretraining import Budget, bits_per_byte, pretrain
from experiments.pretraining.run import BITS, Values, loss_curve, quality
from experiments.runs.settings import Settings
from reference import Quantized, Scales
from reference.training.recipe import PLACES, Operand, Recipe

Matrix = Tensor | Quantized


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
