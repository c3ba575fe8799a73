"""What each layer could train by: recipes, cut to the products that run in low precision, with measured times and errors."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ao_lab.gemm.choices import DENSE, SUBSETS, choices_for, rows_range
from ao_lab.probe.report import ProbeReport, SiteErrors
from ao_lab.training.api import convert_for_training_, convert_from_training_
from ao_lab.training.layers import steps
from ao_lab.training.products import has_fp8
from ao_lab.transforms.layers import shorten
from ao_lab.tuning.candidates import Limits, choices_of
from ao_lab.tuning.measure import release
from ao_lab.tuning.samples import SampleInput, TrainingSample, backward_of, output_of, record, untouched
from reference.training.recipe import PRODUCTS, Recipe, recipe_of

#: (recipe, subset of its products) to seconds of a layer's forward and backward; of subsets that were measured.
Times = Mapping[tuple[str, str], float]
#: Steps that are timed, and seconds after which two are enough.
STEPS, ENOUGH = 5, 0.3


@dataclass(frozen=True)
class Option:
    """One way for a layer to train. recipe: "" for dense; products: those in low precision, of PRODUCTS.

    seconds: of forward and backward with casts. variance: what it adds to the mean square change of the model's outputs.
    noise: the error of the weight's gradient over its minibatch's noise (None: not known, or not in low precision). mere: the
    mean relative error of outputs. reason: why it is not to be taken whatever the budget; "" where it may be.
    """

    recipe: str
    products: tuple[str, ...]
    seconds: float
    variance: float = 0.0
    noise: float | None = None
    mere: float = 0.0
    reason: str = ""

    @property
    def name(self) -> str:
        """For people."""
        if not self.recipe:
            return DENSE
        whole = len(self.products) == len(PRODUCTS)
        return self.recipe if whole else f"{self.recipe} ({', '.join(self.products)})"


@dataclass(frozen=True)
class LayerOptions:
    """A layer, its weight's shape (N, K), and its options, dense first."""

    name: str
    shape: tuple[int, int]
    options: tuple[Option, ...]

    @property
    def dense(self) -> Option:
        """The option without low precision."""
        return self.options[0]


def check_probed(report: ProbeReport, recipes: Sequence[Recipe], modules: Mapping[str, nn.Module]) -> None:
    """ValueError for recipes that the report does not know, and for a report of another model."""
    for line in report.sites:
        weight = getattr(modules.get(line.name), "weight", None)
        if isinstance(modules.get(line.name), nn.Linear) and tuple(weight.shape) != line.shape:  # type: ignore[union-attr]
            raise ValueError(
                f"the report is of another model: {line.name} is {line.shape[0]}x{line.shape[1]} there and "
                f"{'x'.join(map(str, weight.shape))} here; probe_ this one"  # type: ignore[union-attr]
            )
    unknown = [one.name for one in recipes if one.name not in report.candidates]
    if unknown:
        raise ValueError(
            f"the report has no errors of {', '.join(unknown)}; probe_ the model with these candidates: it has "
            f"{', '.join(report.candidates)}"
        )


def options_of(
    report: ProbeReport, times: Mapping[str, Times], recipes: Sequence[Recipe], most_noise: float
) -> list[LayerOptions]:
    """The options of each site of a report whose dense layer was timed.

    A UserWarning names those of which only recipes were: nothing can be said to be quicker there, so they stay dense.
    ValueError where that is so of all.
    """
    layers, untimed = [], []
    for line in report.sites:
        timed = times.get(line.name)
        if timed is None:
            continue
        dense = [seconds for (_, subset), seconds in timed.items() if subset == DENSE]
        if not dense:
            untimed.append(line.name)
            continue
        options = [Option("", (), min(dense))]
        for recipe in recipes:
            for subset in SUBSETS[:-1]:
                if (seconds := timed.get((recipe.name, subset))) is not None:
                    options.append(_option(recipe, subset, seconds, line.candidates[recipe.name], most_noise))
        layers.append(LayerOptions(line.name, line.shape, tuple(options)))
    _tell_of_untimed(untimed, any_timed=bool(layers))
    return layers


def _tell_of_untimed(names: Sequence[str], any_timed: bool) -> None:
    """A warning, or the error where no layer was timed."""
    if not names:
        return
    told = f"{shorten(names)}: there is no time of the dense layer"
    if not any_timed:
        raise ValueError(f"{told}, which recipes are compared with; give it by measure=")
    warnings.warn(f"{told}, so it stays dense; give it by measure=", UserWarning, stacklevel=4)


def check_timed(model: nn.Module) -> None:
    """ValueError for a model on a device that recipes are not timed on, before anything is measured."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if not has_fp8(device):
        raise ValueError(
            f"without FP8 units ({device}) matmuls are emulated and not timed; run this on the GPU that the model trains on, "
            f"or give measure="
        )


def _option(recipe: Recipe, subset: str, seconds: float, errors: SiteErrors, most_noise: float) -> Option:
    products = tuple(subset.split("+"))
    output, gradient = "output" in products, "weight_grad" in products
    noise = errors.noise.value if gradient and errors.noise is not None else None
    reason = errors.reason
    if not reason and output and errors.variance is None:
        reason = "the report has no variance of its outputs"
    if not reason and noise is not None and noise > most_noise:
        reason = f"its gradient's error is {noise:.2g} of the batch's noise, more than {most_noise:g}"
    variance = errors.variance.value if output and errors.variance is not None else 0.0
    mere = errors.mere.value if output and errors.mere is not None else 0.0
    return Option(recipe.name, products, seconds, variance, noise, mere, reason)


def measured_times(
    model: nn.Module,
    sample_input: SampleInput,
    recipes: Sequence[Recipe],
    names: Sequence[str],
    launches: str,
) -> dict[str, Times]:
    """Seconds of each named layer by recipe and subset, on its device, from one step on sample_input.

    The kernel of each product is chosen by time as `tune` does, and stays chosen in this process. The model is afterwards as it
    was.
    """
    samples = layer_samples(model, sample_input, names)
    known: dict[Any, Times] = {}
    result: dict[str, Times] = {}
    limits = Limits(launches=launches, every=True)
    try:
        for name, sample in samples.items():
            key = (tuple(sample.w.shape), tuple(sample.x.shape), sample.x.dtype)
            if key not in known:
                known[key] = {
                    (recipe.name, subset): seconds
                    for recipe in recipes
                    for subset, seconds in _timed(sample, recipe, limits).items()
                }
            result[name] = known[key]
    finally:
        release()
    return result


def _timed(sample: TrainingSample, recipe: Recipe, limits: Limits) -> dict[str, float]:
    one = replace(sample, recipe=recipe, steps=steps(recipe))
    table, found = choices_for(sample.x.device), {}
    for choice in choices_of(one.of_rows(sample.x.shape[0]), limits):
        if choice.problem.direction != "training":
            table.add(
                choice
            )  # the policy says which products are dense: what `tune` would choose cuts no recipe
        else:
            found = {c.kernel: c.seconds for c in choice.candidates if c.seconds is not None}
    return found


def layer_samples(
    model: nn.Module, sample_input: SampleInput, names: Sequence[str]
) -> dict[str, TrainingSample]:
    """Inputs, weight and output gradient of each named layer; the model is converted for that, and is then as it was."""
    wanted, modules = set(names), dict(model.named_modules())
    tokens: dict[str, int] = {}
    probe = recipe_of("rowwise")
    convert_for_training_(model, probe, lambda module, name: name in wanted, pad=True)
    handles = [modules[name].register_forward_pre_hook(partial(_count, tokens, name)) for name in names]
    try:
        samples = [one for one in record(model, sample_input) if isinstance(one, TrainingSample)]
    finally:
        for handle in handles:
            handle.remove()
        convert_from_training_(model)
    # One sample stands for all layers of its shape that have about as many tokens.
    known = {(tuple(one.w.shape), rows_range(len(one.x))): one for one in samples if one.g is not None}
    found = {}
    for name in names:
        weight: Any = modules[name]._parameters["weight"]
        sample = known.get((tuple(weight.shape), rows_range(tokens.get(name, 0))))
        if sample is not None:
            found[name] = replace(sample, name=name)
    return found


def _count(tokens: dict[str, int], name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    tokens.setdefault(name, args[0].numel() // max(args[0].shape[-1], 1))


StepTime = Callable[[nn.Module, SampleInput], float]


def step_seconds(model: nn.Module, sample_input: SampleInput) -> float:
    """Seconds of a forward and a backward on a sample, the least of a few after one that is not timed."""
    device = next(model.parameters()).device
    taken = []
    with untouched(model, sample_input):
        for _ in range(STEPS + 1):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            backward_of(output_of(model, sample_input))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - started)
            if len(taken) > 2 and sum(taken[1:]) > ENOUGH:
                break
    return min(taken[1:])


Measure = Callable[[nn.Module, SampleInput, Sequence[Recipe], Sequence[str], str], Mapping[str, Times]]
__all__ = [
    "LayerOptions",
    "Measure",
    "Option",
    "StepTime",
    "Times",
    "check_timed",
    "measured_times",
    "options_of",
    "step_seconds",
]
