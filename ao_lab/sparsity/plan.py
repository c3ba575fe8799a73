"""What `sparsify_` is going to prune, and why other layers stay: everything that can be refused is, before a weight changes.

Pruned are linear layers: nn.Linear, along its last axis, and transformers' Conv1D, which stores (in, out), along its first.
What is no linear layer, or not selected, stays and is listed. What was selected and cannot be pruned is an error, as a model
that is sparse but for a layer in the middle would be found out much later: so are batched experts, which hold most weights of
their model, where a filter accepts them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from ao_lab.sparsity.config import SparsityConfig
from ao_lab.sparsity.prune_layer import (
    NOT_FINITE,
    in_place_reason,
    layout_reason,
    most_kept,
)
from ao_lab.sparsity.report import SparseLayer
from ao_lab.sparsity.selection import Selection, block_of
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.tensor.sparse import quantized_compressed
from ao_lab.transforms.layers import (
    check_model,
    is_linear,
    is_transposed,
    quantizable_parameters,
    shorten,
    unsupported_reason,
)
from ao_lab.transforms.select import Filter, passed_over

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPRESSED_DTYPES = (torch.bfloat16, torch.float16)
#: By score, why weights are finite.
SPREAD = {
    "sparsegpt": f"{NOT_FINITE}, which SparseGPT would spread; replace them",
    "ria": f"{NOT_FINITE}, which RIA would spread to the scores of its row and column; replace them",
}


@dataclass
class Target:
    """One weight to be pruned, wherever it is."""

    #: Whether it is stored (in, out).
    transposed: bool
    #: (module, parameter's name) of every place that is selected, by full name.
    places: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)
    #: Full names of places that have it and are not selected: they keep the dense weight.
    others: list[str] = field(default_factory=list)
    #: Whether NaN or infinity are among its values.
    not_finite: bool = False

    @property
    def name(self) -> str:
        """The first of its full names."""
        return next(iter(self.places))

    @property
    def parameter(self) -> nn.Parameter:
        """The weight as it is now."""
        module, name = next(iter(self.places.values()))
        found: nn.Parameter = getattr(module, name)
        return found

    @property
    def matrix(self) -> torch.Tensor:
        """Its values as (out, in)."""
        dense = self.parameter.detach()
        return dense.T.contiguous() if self.transposed else dense

    @torch.no_grad()
    def put_compressed(self, matrix: torch.Tensor) -> int:
        """A frozen parameter in 2:4 storage in every place, of a pruned (out, in); the bytes that it takes."""
        element = str(matrix.dtype).removeprefix("torch.")
        weight = quantized_compressed(matrix, element)
        new = nn.Parameter(weight.transposed() if self.transposed else weight, requires_grad=False)
        for module, name in self.places.values():
            module._parameters[name] = new
        return sum(part.nbytes for part in weight.parts.values() if part is not None)

    @torch.no_grad()
    def put(self, matrix: torch.Tensor) -> None:
        """New values, in the parameter itself; a new parameter where others keep the dense one."""
        values, old = matrix.T if self.transposed else matrix, self.parameter
        if not self.others:
            old.copy_(values)
            return
        new = nn.Parameter(values.contiguous(), requires_grad=old.requires_grad)
        for module, name in self.places.values():
            module._parameters[name] = new


@dataclass
class Plan:
    """The weights to be pruned, and the reason of each parameter (by full name) that was looked at."""

    targets: dict[int, Target] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    #: What the filter accepts and is no linear layer, as the report lists it.
    others: tuple[SparseLayer, ...] = ()


def planned(
    model: nn.Module, config: SparsityConfig, filter_fn: Filter | None, blocks: Iterable[str] | None = None
) -> Plan:
    """The plan; raises as `sparsify_` says. `blocks`: names of the blocks that calibration walks, where it does."""
    check_model(model)
    if not isinstance(config, SparsityConfig):
        raise TypeError(
            f"sparsify_ takes a SparsityConfig, got {type(config).__name__}; configurations of quantize_ come after it, in a "
            f"call of quantize_"
        )
    walked = None if blocks is None else tuple(blocks)
    select, plan, refused = Selection(model, filter_fn, walked), Plan(), {}
    for path, module, name, parameter in quantizable_parameters(model):
        full = f"{path}.{name}" if path else name
        wanted, plan.reasons[full] = select(path, module, name, parameter)
        if wanted and not is_linear(module):
            refused[full] = plan.reasons[full]
        elif wanted:
            target = plan.targets.setdefault(id(parameter), Target(is_transposed(module)))
            target.places[full] = (module, name)
    plan.others = others(model, filter_fn)
    plan.reasons.update((layer.name, layer.reason) for layer in plan.others)
    if not plan.targets and not refused:
        raise ValueError(_nothing(plan))
    _find_others(model, plan)
    for target in plan.targets.values():
        if (why := _refused(target, config, walked)) is not None:
            refused[target.name] = why
    raise_refused(refused)
    return plan


def others(model: nn.Module, filter_fn: Filter | None) -> tuple[SparseLayer, ...]:
    """Lines of a report for what a filter accepts and is no linear layer."""

    def accepts(path: str, module: nn.Module, full: str) -> bool:
        return bool(filter_fn and filter_fn(module, path))

    return tuple(
        SparseLayer(full, kind, tuple(weight.shape), f"{kind}: only linear layers are pruned")
        for full, (module, weight) in (passed_over(model, accepts) if filter_fn is not None else {}).items()
        for kind in (type(module).__name__,)
    )


def _find_others(model: nn.Module, plan: Plan) -> None:
    """Note where else each weight is, and say so."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            target, full = plan.targets.get(id(parameter)), f"{path}.{name}" if path else name
            if target is not None and full not in target.places:
                target.others.append(full)
    for target in plan.targets.values():
        for full in target.places if target.others else ():
            stay = "stays" if len(target.others) == 1 else "stay"
            plan.reasons[full] += f"; was shared with {', '.join(target.others)}, which {stay} dense"


def raise_refused(refused: dict[str, str]) -> None:
    """ValueError with the layers that were selected and cannot be pruned, and why; none where there are none."""
    alike: dict[str, list[str]] = {}
    for name, why in refused.items():
        alike.setdefault(why, []).append(name)
    if alike:
        told = shorten([f"{shorten(names)}: {why}" for why, names in alike.items()], 3)
        raise ValueError(f"sparsify_ changed nothing. {told}. Or leave these layers out by filter_fn")


def _refused(target: Target, config: SparsityConfig, walked: tuple[str, ...] | None) -> str | None:
    """Why a selected weight cannot be pruned, and the way out."""
    checks = (_kind_reason(target, config), _shape_reason(target, config), _walk_reason(target, walked))
    return next((why for why in checks if why is not None), None) or _value_reason(target, config)


def _kind_reason(target: Target, config: SparsityConfig) -> str | None:
    parameter: torch.Tensor = target.parameter
    module, name = next(iter(target.places.values()))
    if isinstance(parameter, SparseQuantizedTensor):
        return "it is in 2:4 storage already"
    if isinstance(parameter, QuantizedTensor):
        return "it is quantized already; prune first, then quantize"
    if type(parameter) not in (torch.Tensor, nn.Parameter):
        return f"a {type(parameter).__name__} holds its values elsewhere; prune before it is made"
    if parameter.is_meta:
        return "on the meta device there are no values to prune; load the weights first"
    if parameter.dtype not in DTYPES:
        return f"{parameter.dtype} is not float32, bfloat16 or float16; convert the model first"
    if len({is_transposed(module) for module, _ in target.places.values()}) > 1:
        return (
            f"{' and '.join(target.places)} share it and multiply it along different axes; untie them first"
        )
    return (
        unsupported_reason(module, name, parameter)
        or layout_reason(parameter)
        or _write_reason(target, config, parameter)
    )


def _write_reason(target: Target, config: SparsityConfig, parameter: torch.Tensor) -> str | None:
    """Why it cannot be written where it is; it need not be where its place gets another parameter."""
    if target.others or config.storage == "compressed":
        return None
    return in_place_reason(parameter, torch.is_inference_mode_enabled() and not config.calibrates)


def _shape_reason(target: Target, config: SparsityConfig) -> str | None:
    """The contraction axis in groups of M; rows too for transposable masks."""
    shape, (_, group) = tuple(target.parameter.shape), config.kept_of
    rows, length = shape[::-1] if target.transposed else shape
    axis = "first" if target.transposed else "last"
    if not rows * length:
        return f"shape {shape} has no elements"
    if length % group:
        return f"{config.pattern} needs a {axis} axis that is a multiple of {group}, got shape {shape}"
    if config.storage == "compressed" and target.parameter.dtype not in COMPRESSED_DTYPES:
        dtype = target.parameter.dtype
        return (
            f"compressed storage holds bfloat16 and float16, got {dtype}; convert the model, or use quantize_"
        )
    if config.transposable and rows % 4:
        return f"transposable masks need rows and columns in multiples of 4, got shape {shape}"
    return None


def _walk_reason(target: Target, walked: tuple[str, ...] | None) -> str | None:
    """Calibration sees the layers of one block at a time."""
    if walked is None:
        return None
    found = {block_of(full, walked) for full in target.places}
    if None in found:
        return (
            f"it is outside of the blocks ({walked[0]} and on) that calibration walks; prune it by magnitude in a call of its "
            f"own, or give blocks='' to take the whole model as one block"
        )
    return (
        None
        if len(found) == 1
        else f"blocks {' and '.join(sorted(map(str, found)))} share it; prune it by magnitude"
    )


def _value_reason(target: Target, config: SparsityConfig) -> str | None:
    """Sparse already, or not finite where scores or updates would spread it."""
    kept, group = config.kept_of
    matrix = target.parameter.detach()
    matrix = matrix.T if target.transposed else matrix
    target.not_finite = not bool(matrix.isfinite().all())
    most = most_kept(matrix != 0, group)
    if 0 < most <= kept and config.storage == "compressed" and not config.calibrates:
        return None  # its mask is what it is; it is only compressed
    if 0 < most <= kept:
        return f"it is {config.pattern} sparse already, with at most {most} of {group} weights in every group"
    return SPREAD[config.score] if target.not_finite and config.score in SPREAD else None


def _nothing(plan: Plan) -> str:
    """Why a call would change nothing."""
    if not plan.reasons:
        return "sparsify_: the model has no linear layers"
    told = shorten([f"{name}: {reason}" for name, reason in plan.reasons.items()])
    return f"sparsify_: no linear layer is selected, so that nothing would change. Of {len(plan.reasons)} parameters: {told}"


__all__ = ["Plan", "Target", "planned", "raise_refused"]
