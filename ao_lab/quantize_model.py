"""`quantize_`: replace the weights of a model by `QuantizedTensor`s, in place, all or none.

First a plan: which parameters, by which configuration, and why the others stay. Nothing has changed until it stands. Then layer
by layer; where one fails, those before it get their weights back. A weight whose shape the blocks do not divide is left and
reported; a filter or pattern that matches nothing, and a call that would change nothing, raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from ao_lab.configs import Config
from ao_lab.fqn import FqnToConfig, Patterns
from ao_lab.layers import candidates, is_linear
from ao_lab.products import chosen
from ao_lab.recipes import Recipe
from ao_lab.report import ATTRIBUTE, Report, described_layer
from ao_lab.tensor import QuantizedTensor, quantized
from ao_lab.tensor_meta import DTYPES
from reference.blocks import Blocks

Filter = Callable[[nn.Module, str], bool]


@dataclass
class Change:
    """One weight to be replaced, wherever it is."""

    parameter: torch.Tensor
    config: Config
    recipe: Recipe
    #: (module, parameter's name) of every place that has it, by full name.
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)


@dataclass
class Plan:
    """What is to be changed, and why each parameter (by full name) is as it will be."""

    #: By the identity of the weight: what was shared stays shared.
    changes: dict[int, Change] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


def quantize_(
    model: nn.Module,
    config: Config | FqnToConfig,
    filter_fn: Filter | None = None,
    device: torch.device | str | int | None = None,
) -> Report:
    """Quantize weights of `model` as `config` says; the report lists each layer, changed or left, with its reason.

    filter_fn(module, name) says which modules; without it those are all nn.Linear. It may also accept nn.Embedding and
    modules with batched weights (parameters with three axes). With `FqnToConfig`, which names modules itself, there is none.
    `device`: where weights are quantized and stay; None: where they are.

    Raises ValueError where the filter or a pattern matches nothing and where nothing can be changed, TypeError for another
    kind of config. After an error the model is as it was.
    """
    plan = planned(model, config, filter_fn)
    done: list[tuple[nn.Module, str, torch.Tensor]] = []
    try:
        for change in plan.changes.values():
            made = made_parameter(change, device)
            for module, name in change.places.values():
                done.append((module, name, change.parameter))
                module._parameters[name] = made
    except BaseException as error:
        for module, name, parameter in done:
            module._parameters[name] = parameter  # type: ignore[assignment]
        error.add_note("quantize_ changed nothing: the layers before this one have their weights back")
        raise
    known = {layer.name: layer.reason for layer in getattr(model, ATTRIBUTE, Report()).layers}
    reasons = {
        name: known.get(name, reason) if reason == ALREADY else reason
        for name, reason in plan.reasons.items()
    }
    report = Report(tuple(described_layer(*found, reasons) for found in candidates(model)))
    object.__setattr__(model, ATTRIBUTE, report)
    return report


ALREADY = "already quantized"


def planned(model: nn.Module, config: Config | FqnToConfig, filter_fn: Filter | None) -> Plan:
    """The plan; raises as `quantize_` says."""
    if not isinstance(config, (Config, FqnToConfig)):
        raise TypeError(
            f"quantize_ takes a configuration of ao_lab, got {type(config).__module__}.{type(config).__name__}; "
            f"ao_lab has torchao's under the same names"
        )
    if isinstance(config, FqnToConfig) and filter_fn is not None:
        raise ValueError("FqnToConfig names the layers itself; leave filter_fn out")
    decide = Patterns(config) if isinstance(config, FqnToConfig) else Filtered(config, filter_fn)
    plan, matched = Plan(), 0
    for path, module, name, parameter in candidates(model):
        full = f"{path}.{name}" if path else name
        wanted, reason = decide(path, module, full)
        matched += wanted is not None
        if wanted is not None:
            reason = _entered(plan, wanted, (full, module, name), parameter) or reason
        plan.reasons[full] = reason
    decide.check_all_matched(model)
    _say_what_was_shared(plan, model)
    if not plan.changes:
        raise ValueError(_nothing(plan, matched))
    return plan


@dataclass
class Filtered:
    """One configuration for the modules that a function accepts."""

    config: Config
    filter_fn: Filter | None

    def __call__(self, path: str, module: nn.Module, full: str) -> tuple[Config | None, str]:
        """The configuration of a parameter (None: it stays) and the reason."""
        kind = type(module).__name__
        if self.filter_fn is None:
            good = is_linear(module)
            return (self.config, f"{kind}") if good else (None, f"{kind}: without filter_fn only nn.Linear")
        good = self.filter_fn(module, path)
        return (self.config, "accepted by filter_fn") if good else (None, "refused by filter_fn")

    def check_all_matched(self, model: nn.Module) -> None:
        """A filter that accepts nothing is found by the caller, which counts."""


def _entered(
    plan: Plan, config: Config, place: tuple[str, nn.Module, str], parameter: torch.Tensor
) -> str | None:
    """Put a parameter into the plan; the reason where it cannot be quantized. ValueError for one weight in two schemes."""
    full, module, name = place
    recipe = config.recipe()
    if isinstance(module, nn.Embedding):
        recipe = replace(recipe, activation=None, kernel="auto")
    obstacle = why_not(parameter, recipe, config.axis)
    if obstacle is not None:
        return obstacle
    change = plan.changes.setdefault(id(parameter), Change(parameter, config, recipe))
    if (change.recipe.weight, change.config.axis) != (recipe.weight, config.axis):
        names = " and ".join([*change.places, full])
        raise ValueError(
            f"{names} share one weight, but are to have {change.recipe} and {recipe}; give them one scheme"
        )
    if change.recipe.activation is None:
        # An embedding ignores how inputs are quantized; a layer that shares its weight does not.
        change.config, change.recipe = config, recipe
    change.places[full] = (module, name)
    return None


def _say_what_was_shared(plan: Plan, model: nn.Module) -> None:
    """Add to the reasons where a changed weight is elsewhere left as it was."""
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    for key, change in plan.changes.items():
        others = [name for name in owners[key] if name not in change.places]
        for full in change.places if others else ():
            verb = "stays" if len(others) == 1 else "stay"
            plan.reasons[full] += f"; was shared with {', '.join(others)}, which {verb} dense"


def why_not(parameter: torch.Tensor, recipe: Recipe, axis: int) -> str | None:
    """Why a parameter cannot be quantized by a recipe; None where it can."""
    if isinstance(parameter, QuantizedTensor):
        return ALREADY
    if parameter.dtype not in DTYPES:
        return f"{parameter.dtype} is not a floating-point type that can be quantized"
    if parameter.is_meta:
        return "on the meta device there are no numbers; load the weights first"
    try:
        Blocks.of(tuple(parameter.shape), recipe.weight.scale, axis)
    except ValueError as error:
        return str(error)
    return None


def made_parameter(change: Change, device: torch.device | str | int | None) -> nn.Parameter:
    """The quantized weight; the kernel that its recipe names is asked whether it takes it."""
    dense = change.parameter.detach()
    dense = dense if device is None else dense.to(device)
    static = change.config.input_scales() if change.recipe.activation is not None else None
    made = quantized(dense, change.recipe, axis=change.config.axis, input_scales=static)
    if change.recipe.kernel != "auto":
        chosen(made if made.block_axis == -2 else made.turned(), made.dtype)
    return nn.Parameter(made, requires_grad=False)


def _nothing(plan: Plan, matched: int) -> str:
    """Why a call would change nothing."""
    if not plan.reasons:
        return "quantize_: the model has no nn.Linear, no nn.Embedding and no batched weights"
    first = [f"{name}: {reason}" for name, reason in list(plan.reasons.items())[:5]]
    what = "matches nothing" if not matched else "matches layers, but none of them can be changed"
    return f"quantize_: the filter {what}. Of {len(plan.reasons)} parameters: " + "; ".join(first)


__all__ = ["planned", "quantize_"]
