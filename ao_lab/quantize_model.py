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
from ao_lab.tensor import DTYPES, QuantizedTensor, quantized
from reference.blocks import Blocks

Filter = Callable[[nn.Module, str], bool]


@dataclass
class Change:
    """One weight to be replaced, wherever it is."""

    parameter: torch.Tensor
    config: Config
    recipe: Recipe
    #: (module, parameter's name) of every place that has it.
    places: list[tuple[nn.Module, str]] = field(default_factory=list)


@dataclass
class Plan:
    """What is to be changed, and why each parameter (by full name) is as it will be."""

    changes: dict[tuple[int, Recipe], Change] = field(default_factory=dict)
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
            for module, name in change.places:
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
        plan.reasons[full] = (
            reason if wanted is None else _enter(plan, wanted, module, name, parameter, reason)
        )
    decide.check_all_matched(model)
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


def _enter(
    plan: Plan, config: Config, module: nn.Module, name: str, parameter: torch.Tensor, reason: str
) -> str:
    """Put a parameter into the plan, if it can be quantized; the reason for what becomes of it."""
    recipe = config.recipe()
    if isinstance(module, nn.Embedding):
        recipe = replace(recipe, activation=None, kernel="auto")
    obstacle = why_not(parameter, recipe, config.axis)
    if obstacle is not None:
        return obstacle
    change = plan.changes.setdefault((id(parameter), recipe), Change(parameter, config, recipe))
    change.places.append((module, name))
    return reason


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
