"""`dispatch_`: a recipe for each layer and product of a model in training, by measured time under a budget of error.

Other rules stand beside, as they are published or uniform. Ours is a multiple-choice knapsack
(`reference.calibration.allocate`): the sum of seconds is least while the sum of variances is at most the square of what
outputs may move by; options whose gradients are too noisy are ruled out one by one. Its relaxation bounds what any choice
within the budget could take. Every uniform policy that the budget allows is one of the choices, so none of them is quicker;
and dense is one.

LoKA's rule (arXiv 2605.10886, by notes on it): an option is fit where the mean relative error of its outputs is below a
threshold and it is quicker than 16 bits by a factor; of these the quickest. It has no budget over layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ao_lab.gemm.choices import DENSE, device_name
from ao_lab.policy.options import (
    LayerOptions,
    Measure,
    Option,
    StepTime,
    check_probed,
    check_timed,
    measured_times,
    options_of,
    step_seconds,
)
from ao_lab.probe.report import BUDGET, MOST_NOISE, ProbeReport
from ao_lab.training.autograd import prepare
from ao_lab.training.layers import LowPrecisionLinear, Settings, class_of, plain_again, train_by
from ao_lab.transforms.layers import check_model
from ao_lab.transforms.plan import all_or_none
from ao_lab.tuning.samples import SampleInput
from fast.user_cache import write_own
from reference.calibration.allocate import allocate
from reference.training.recipe import PRODUCTS, Recipe, recipe_of

#: LoKA's threshold of the mean relative error, and its least speedup.
THETA, SPEEDUP = 0.2, 1.05


@dataclass(frozen=True)
class Decision:
    """The option of each layer by its name, and what they come to.

    seconds: the sum over layers. variance: the sum of what outputs move by, squared; room: what it may be. fits: whether every
    option may be taken and the sum is within the room. bound: seconds that no choice within the room is below (None: none).
    """

    name: str
    options: dict[str, Option]
    seconds: float
    variance: float
    room: float
    fits: bool
    bound: float | None = None

    def __str__(self) -> str:
        bound = "" if self.bound is None else f", at least {self.bound * 1e6:.1f} us for any choice"
        moved = f"outputs move by {self.variance**0.5:.3g} of {self.room**0.5:.3g}"
        return f"{self.name}: {self.seconds * 1e6:.1f} us{bound}; {moved}{'' if self.fits else ': beyond the budget'}"


def least_time(layers: Sequence[LayerOptions], room: float) -> Decision:
    """The quickest choice within the room; ValueError where there are no layers or the room is no positive number."""
    if not layers:
        raise ValueError(
            "no layer was both probed and timed; give sample_input that reaches the sites of the report"
        )
    if not room > 0:
        raise ValueError(f"the room for changes of outputs is positive, got {room!r}")
    most = max(len(one.options) for one in layers)
    scores, costs = (np.full((len(layers), most), fill) for fill in (np.inf, 0.0))
    for at, one in enumerate(layers):
        for j, option in enumerate(one.options):
            scores[at, j], costs[at, j] = np.inf if option.reason else option.seconds, option.variance
    found = allocate(scores, costs, room)
    options = {one.name: one.options[j] for one, j in zip(layers, found.choice, strict=True)}
    return summed("least time", options, room, found.bound)


def summed(name: str, options: dict[str, Option], room: float, bound: float | None = None) -> Decision:
    """A decision of its options."""
    seconds, variance = (
        sum(getattr(one, what) for one in options.values()) for what in ("seconds", "variance")
    )
    allowed = not any(one.reason for one in options.values())
    return Decision(name, options, seconds, variance, room, allowed and variance <= room * (1 + 1e-12), bound)


def uniform(layers: Sequence[LayerOptions], recipe: str, room: float) -> Decision:
    """All products of every layer by one recipe ("" for dense); a layer that cannot, or was not timed so, is dense."""

    def pick(one: LayerOptions) -> Option:
        whole = [o for o in one.options if o.recipe == recipe and len(o.products) == len(PRODUCTS)]
        return whole[0] if whole and recipe else one.dense

    return summed(f"uniform {recipe or DENSE}", _each(layers, pick), room)


def loka(
    layers: Sequence[LayerOptions], room: float, theta: float = THETA, speedup: float = SPEEDUP
) -> Decision:
    """LoKA's rule for whole layers: the quickest of what is fit, else dense."""

    def pick(one: LayerOptions) -> Option:
        fit = [
            o
            for o in one.options
            if len(o.products) == len(PRODUCTS) and o.mere < theta and o.seconds * speedup < one.dense.seconds
        ]
        return min(fit, key=lambda o: o.seconds, default=one.dense)

    return summed(f"LoKA (error < {theta:g}, speedup > {speedup:g})", _each(layers, pick), room)


def _each(layers: Sequence[LayerOptions], pick: Callable[[LayerOptions], Option]) -> dict[str, Option]:
    return {one.name: pick(one) for one in layers}


FORMAT = 1
#: Turns in which whole steps are timed.
ROUNDS = 3
#: A policy has drifted where outputs move by more than so many times what the budget allows (of squares), or gradients' errors
#: grow as much beyond theirs: less is the noise of estimates, and a change recompiles.
HYSTERESIS = 1.5


@dataclass(frozen=True)
class Policy:
    """The result of `dispatch_`. others: uniform policies and LoKA's rule on the same measurements.

    device: of the measurements. digest: of the names and shapes of the model's linear layers.
    """

    decision: Decision
    others: tuple[Decision, ...]
    recipes: Mapping[str, Recipe]
    device: str
    digest: str

    def __str__(self) -> str:
        width = max(map(len, self.decision.options), default=0)
        lines = [str(self.decision), *(str(one) for one in self.others)]
        lines += [f"  {name:<{width}}  {option.name}" for name, option in self.decision.options.items()]
        return "\n".join(lines)

    def drifted(self, report: ProbeReport, hysteresis: float = HYSTERESIS) -> tuple[str, ...]:
        """Why the policy no longer holds by a later report of the same model: lines of text; none where it does."""
        variance, told = 0.0, []
        for name, option in self.decision.options.items():
            if not option.recipe:
                continue
            errors = report.site(name).candidates[option.recipe]
            if "output" in option.products and errors.variance is not None:
                variance += errors.variance.value
            if (
                "weight_grad" in option.products
                and errors.noise is not None
                and errors.noise.low > MOST_NOISE * hysteresis
            ):
                told.append(f"{name}: its gradient's error is {errors.noise.value:.2g} of the batch's noise")
        if variance > self.decision.room * hysteresis:
            room = self.decision.room**0.5
            told.append(f"outputs move by {variance**0.5:.3g}, {room:.3g} is what they may")
        return tuple(told)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for the same model on the same kind of GPU."""
        told = {
            "ao_lab_policy": FORMAT, "device": self.device, "model": self.digest, "torch": torch.__version__,
            "recipes": {name: recipe.key for name, recipe in self.recipes.items()},
            "decision": asdict(self.decision), "others": [asdict(one) for one in self.others],
        }  # fmt: skip
        write_own(Path(path), (json.dumps(told, indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: str | Path, model: nn.Module, recipes: Iterable[str | Recipe] = ()) -> Policy:
        """What `save` wrote, for a model. recipes: records of its names that are no recipes of this package.

        ValueError for a file of another format or model, and for recipes that are unknown or have changed.
        """
        try:
            told = json.loads(Path(path).read_text(encoding="utf-8"))
            if told["ao_lab_policy"] != FORMAT:
                raise ValueError(f"it is of another version than {FORMAT}")
            decision, others = _decision(told["decision"]), tuple(map(_decision, told["others"]))
            keys, device, digest = told["recipes"], told["device"], told["model"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is no policy as Policy.save writes it: {error}") from error
        if digest != model_digest(model):
            raise ValueError(
                f"{path} is the policy of another model: names or shapes of linear layers differ"
            )
        given = {one.name: one for one in map(recipe_of, recipes)}
        found = {name: given[name] if name in given else recipe_of(name) for name in keys}
        changed = [name for name, recipe in found.items() if recipe.key != keys[name]]
        if changed:
            raise ValueError(f"{path} was decided with other records of {', '.join(changed)}; decide anew")
        return cls(decision, others, found, device, digest)


def _decision(told: Mapping[str, Any]) -> Decision:
    options = {
        name: Option(**{**one, "products": tuple(one["products"])}) for name, one in told["options"].items()
    }
    return Decision(**{**told, "options": options})


def model_digest(model: nn.Module) -> str:
    """Of the names and shapes of linear layers."""
    lines = [
        f"{name} {module.out_features}x{module.in_features}"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def dispatch_(
    model: nn.Module,
    sample_input: SampleInput,
    report: ProbeReport,
    *,
    recipes: Iterable[str | Recipe] | None = None,
    budget: float = BUDGET,
    most_noise: float = MOST_NOISE,
    launches: str = "graph",
    confirm: bool = False,
    apply: bool = True,
    measure: Measure = measured_times,
) -> Policy:
    """Let each linear layer train with the recipe, and in the matmuls, that make a step fastest within an error budget.

    sample_input: as for `tune`; a step on it gives the inputs and gradients that times are measured with. report: of `probe_`,
    or of `Probe.report` in training, with the recipes as candidates; its sites are the layers to convert. recipes: None for all
    candidates of the report. budget: largest acceptable change of the outputs, in their standard deviations, over all layers.
    most_noise: largest error of a weight gradient over the noise of its minibatch. launches: how the model will run, as for
    `tune`. confirm: also time whole steps, of the choice and of every other policy within the budget, interleaved, and take the
    fastest. apply: convert the layers (`ao_lab.convert_from_training_` undoes it), or only decide. measure: a function that
    times layers. Default: measured on the device, where kernels exist; a CPU only emulates.

    Leaving a layer unconverted is always an option, and every uniform policy is among the choices: on the same measurements
    none within the budget is faster. Nothing is measured again during training; `Policy.drifted` compares with a later report.

    ValueError, before anything is measured, for recipes without errors in the report, a report of another model, budgets that
    are not positive, layers that train with a recipe already, and a device without FP8 units unless measure is given; then for
    no common layers. A UserWarning names layers that measure gave no dense time of: they stay dense. After an error the model
    is unchanged.
    """
    check_model(model)
    if not budget > 0 or not most_noise > 0:
        raise ValueError(f"budget and most_noise are positive, got {budget!r} and {most_noise!r}")
    records = [recipe_of(one) for one in (report.candidates if recipes is None else recipes)]
    modules = dict(model.named_modules())
    check_probed(report, records, modules)
    room = room_of(report, budget)
    names = [line.name for line in report.sites if isinstance(modules.get(line.name), nn.Linear)]
    for name in names:
        if isinstance(known := class_of(modules[name]), str):
            raise ValueError(f"{name}: {known}")
    if measure is measured_times:
        check_timed(model)
    layers = options_of(report, measure(model, sample_input, records, names, launches), records, most_noise)
    policy = decided(model, layers, records, room)
    if confirm:
        policy = confirmed(model, sample_input, policy)
    if apply:
        apply_policy_(model, policy)
    return policy


def decided(
    model: nn.Module, layers: Sequence[LayerOptions], records: Sequence[Recipe], room: float
) -> Policy:
    """The policy of layers' options."""
    others = [uniform(layers, name, room) for name in ("", *(one.name for one in records))]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return Policy(
        least_time(layers, room), (*others, loka(layers, room)), {one.name: one for one in records},
        device_name(device), model_digest(model),
    )  # fmt: skip


def confirmed(
    model: nn.Module,
    sample_input: SampleInput,
    policy: Policy,
    timed: StepTime = step_seconds,
    rounds: int = ROUNDS,
) -> Policy:
    """The policy whose whole step is quickest of those within the budget, timed in turn; the model is then as it was."""
    able = [policy.decision, *(one for one in policy.others if one.fits)]
    best = [float("inf")] * len(able)
    for _ in range(rounds):
        for at, one in enumerate(able):
            apply_policy_(model, replace(policy, decision=one))
            try:
                best[at] = min(best[at], timed(model, sample_input))
            finally:
                _dense_again(model, one.options)
    # Of two alike the first, which is the choice by layers.
    first = min(range(len(able)), key=lambda at: best[at])
    chosen = able[first]
    rest = tuple(one for one in (policy.decision, *policy.others) if one is not chosen)
    return replace(policy, decision=chosen, others=rest)


def _dense_again(model: nn.Module, names: Iterable[str]) -> None:
    modules = dict(model.named_modules())
    for name in names:
        module = modules[name]
        if isinstance(module, LowPrecisionLinear):
            plain_again(module)


def room_of(report: ProbeReport, budget: float) -> float:
    """The square of what outputs may move by; ValueError where the report does not know the outputs."""
    outputs = [one.outputs for one in report.models.values()]
    if not outputs:
        raise ValueError(
            "the report has no outputs of the model, in whose standard deviations the budget is; use probe_'s"
        )
    return float((budget * outputs[0]) ** 2)


def apply_policy_(model: nn.Module, policy: Policy, *, pad: bool = True) -> tuple[str, ...]:
    """Let layers train by a policy; returns the names of those that are converted.

    ValueError for a policy of another model, and for layers that train with a recipe already, unconverted ones of the policy
    included. After an error nothing has changed.
    """
    check_model(model)
    if policy.digest != model_digest(model):
        raise ValueError("this is the policy of another model: names or shapes of linear layers differ")
    modules: dict[str, Any] = dict(model.named_modules())
    changed = [(name, option) for name, option in policy.decision.options.items() if option.recipe]
    for name, option in policy.decision.options.items():
        known = class_of(modules[name])
        if isinstance(known, str) and (option.recipe or isinstance(modules[name], LowPrecisionLinear)):
            raise ValueError(f"{name}: {known}")
    with all_or_none(
        lambda module: plain_again(module) if isinstance(module, LowPrecisionLinear) else None
    ) as begun:
        for name, option in changed:
            record = prepare(policy.recipes[option.recipe])["+".join(option.products)]
            begun.append(modules[name])
            train_by(modules[name], Settings(record, pad))
    return tuple(name for name, _ in changed)


__all__ = [
    "SPEEDUP",
    "THETA",
    "Decision",
    "Policy",
    "apply_policy_",
    "dispatch_",
    "least_time",
    "loka",
    "room_of",
    "summed",
    "uniform",
]
