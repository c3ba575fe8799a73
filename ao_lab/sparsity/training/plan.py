"""Which layers train sparse, and why others do not: all that can be refused is, before anything changes.

Selected are the layers that one-shot pruning selects (`ao_lab.sparsity.selection`), of these nn.Linear itself and what has
registered beside it (layers prepared for QAT): what computes otherwise, or trains by a recipe already, would lose that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from ao_lab.quantization.modules import (
    check_model,
    is_linear,
    never_called,
    quantizable_parameters,
    shorten,
    training_state,
)
from ao_lab.quantization.selection import Filter
from ao_lab.sparsity.plan import DTYPES, others, raise_refused
from ao_lab.sparsity.report import SparseLayer
from ao_lab.sparsity.selection import Selection
from ao_lab.sparsity.training.config import SparseTrainingConfig
from ao_lab.sparsity.training.layers import CLASSES
from ao_lab.sparsity.training.masks import other_pattern_reason
from ao_lab.sparsity.training.products import PRODUCTS
from ao_lab.sparsity.training.schedule import SPARSE, phase
from ao_lab.sparsity.weights import in_place_reason, layout_reason
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.sparse.sparse_tensor import SparseQuantizedTensor

STORED = (
    "it is in 2:4 storage, for inference; module.weight = torch.nn.Parameter(module.weight.dequantize()) makes it dense, and "
    "fixed masks are its zeros then"
)


@dataclass
class Group:
    """The layers that share one weight, by full names of it."""

    layers: dict[str, nn.Linear] = field(default_factory=dict)
    #: Full names of places that have it and do not train sparse.
    others: list[str] = field(default_factory=list)

    @property
    def weight(self) -> torch.Tensor:
        """The weight."""
        return next(iter(self.layers.values())).weight


@dataclass
class Plan:
    """Layers to convert by the identity of their weight, and the reason of each parameter, by full name."""

    groups: dict[int, Group] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    #: What the filter accepts and is no linear layer, as the report lists it.
    others: tuple[SparseLayer, ...] = ()


def planned(model: nn.Module, config: SparseTrainingConfig, filter_fn: Filter | None) -> Plan:
    """The plan; ValueError where nothing is selected, or something that cannot train sparse."""
    check_model(model)
    select, plan, refused = Selection(model, filter_fn, None), Plan(), {}
    for path, module, name, parameter in quantizable_parameters(model):
        full = f"{path}.{name}" if path else name
        wanted, plan.reasons[full] = select(path, module, name, parameter)
        if not wanted:
            continue
        if not is_linear(module):
            refused[full] = plan.reasons[full]
        elif isinstance(module, nn.Linear) and type(module) in CLASSES:
            plan.groups.setdefault(id(parameter), Group()).layers[full] = module
        else:
            refused[full] = _module_reason(module)
    plan.others = others(model, filter_fn)
    plan.reasons.update((layer.name, layer.reason) for layer in plan.others)
    if not plan.groups and not refused:
        told = shorten([f"{name}: {reason}" for name, reason in plan.reasons.items()])
        raise ValueError(f"sparsify_: no linear layer is selected, so that nothing would change. {told}")
    _find_others(model, plan)
    for group in plan.groups.values():
        reason = _weight_reason(group, config)
        refused.update(dict.fromkeys(group.layers, reason) if reason is not None else {})
    refused.update(_passed_by(model, plan, config))
    raise_refused(refused)
    return plan


def _passed_by(model: nn.Module, plan: Plan, config: SparseTrainingConfig) -> dict[str, str]:
    """Layers that torch's fast path of encoder layers multiplies without, in eval mode: with weights that are not masked."""
    inside = {} if config.masks == "fixed" else never_called(model)
    return {
        full: f"in eval mode torch's fast path of {inside[id(layer)]} computes with weights that are not "
        f"masked; call torch.backends.mha.set_fastpath_enabled(False) before"
        for group in plan.groups.values()
        for full, layer in group.layers.items()
        if id(layer) in inside
    }


def _module_reason(module: nn.Module) -> str:
    """Why a module cannot train sparse."""
    state, kind = training_state(module), type(module).__name__
    said = None if state is None else state.unsupported_reason() or state.parameter_reason("weight")
    return said or f"nn.Linear itself trains sparse; a {kind} may compute otherwise"


def _find_others(model: nn.Module, plan: Plan) -> None:
    """Note where else each weight is."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            group, full = plan.groups.get(id(parameter)), f"{path}.{name}" if path else name
            if group is not None and not any(module is layer for layer in group.layers.values()):
                group.others.append(full)


def _weight_reason(group: Group, config: SparseTrainingConfig) -> str | None:
    """Why a weight cannot train sparse, and the way out."""
    w, (_, size) = group.weight, config.scoring().kept_of
    shape = tuple(w.shape)
    if isinstance(w, SparseQuantizedTensor):
        return STORED
    if isinstance(w, QuantizedTensor):
        return "it is quantized already; sparse layers train dense weights"
    if type(w) is not nn.Parameter:
        return f"a {type(w).__name__} holds its values elsewhere; call sparsify_ before it is made (before fully_shard)"
    if w.is_meta:
        return "on the meta device there are no values to find masks from; load the weights first"
    if w.dtype not in DTYPES:
        return f"{w.dtype} is not float32, bfloat16 or float16; convert the model first"
    if (reason := layout_reason(w) or in_place_reason(w)) is not None:
        return reason
    if group.others:
        return f"{group.others[0]} has the same weight and is not to train sparse; untie them, or select both"
    if not w.numel() or shape[1] % size:
        return f"{config.pattern} needs a last axis that is a multiple of {size}, got shape {shape}"
    if config.transposable and shape[0] % 4:
        return f"transposable masks need rows and columns in multiples of 4, got shape {shape}"
    kinds = {CLASSES[type(layer)] for layer in group.layers.values()}
    reasons = (
        *(kind.unsupported_config(config) for kind in kinds),
        PRODUCTS[config.products].unsupported_reason(w),
    )
    reason = next((reason for reason in reasons if reason is not None), None)
    # In a warm-up zeros grow, and masks are found of what came of them.
    return other_pattern_reason(w, config) if reason is None and phase(config, 0) == SPARSE else reason


__all__ = ["Group", "Plan", "planned"]
