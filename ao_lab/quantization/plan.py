"""What `quantize_` is going to do: which parameters, by which configuration, and why the others stay.

A plan touches no weight and holds none, so that each can be freed when its time comes. All that can be known from shapes,
dtypes and devices is found here: blocks that do not divide a shape leave the weight dense with that reason; a kernel that
does not take a weight raises, as do filters and patterns that match nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode

from ao_lab.config.base import Config, FqnToConfig, kind_of
from ao_lab.config.recipe import Recipe, changed_recipe
from ao_lab.gemm.select import select_kernel
from ao_lab.quantization.groups import undivided, with_groups
from ao_lab.tensor.chunked import outer_scale
from ao_lab.tensor.metadata import DTYPES
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor, quantized
from ao_lab.tensor.sparse import not_sparse, quantized_compressed, unstorable
from ao_lab.transforms.layers import (
    TABLES,
    Slot,
    adapters_of_peft,
    check_model,
    contraction_axis,
    is_transposed,
    offloaded,
    other_reason,
    quantizable_parameters,
    refuse_offloaded,
    routers,
    tied_layers,
    unsupported_reason,
)
from ao_lab.transforms.plan import Device, Filter, Plan, WeightChange, passed_over, selection
from reference import Scheme
from reference.quantize.blocks import Blocks
from reference.sparsity.compress import is_plain

ALREADY = "already quantized"
ADAPTER = "an adapter of peft, which is trained beside the weight; merge_and_unload() adds it to that"


@dataclass
class Change(WeightChange):
    """One weight to be quantized, wherever it is."""

    config: Config
    recipe: Recipe
    #: Whether it is stored (in, out), so that it is quantized the other way round, as nn.Linear has it.
    transposed: bool
    #: Along which its blocks run: the configuration's axis, or else the contraction axis.
    axis: int = -1


QuantizationPlan = Plan[Change]


def planned(
    model: nn.Module,
    config: Config | FqnToConfig,
    filter_fn: Filter | None,
    device: Device = None,
    *,
    streamed: bool = False,
    again: bool = False,
    watching: bool = False,
    tied: Mapping[str, str] | None = None,
) -> QuantizationPlan:
    """The plan; raises as `quantize_` says. `streamed`: values of weights on the meta device are to come. `again`: of a model
    that was quantized by this configuration before, so that nothing may be left to do. `watching`: only
    inputs are to be seen, so that weights may be offloaded by accelerate. `tied`: layers that are going to
    have the weight of an embedding, and of which, beside those that have."""
    check_model(model)
    if not isinstance(config, (Config, FqnToConfig)):
        raise TypeError(
            f"quantize_ takes a configuration of ao_lab, got {kind_of(config)}; ao_lab has torchao's under the same names, "
            "and SchemeConfig(scheme=NAME) for a scheme"
        )
    decide = selection(config, filter_fn, routers(model), {**tied_layers(model), **(tied or {})})
    plan, matched, check = QuantizationPlan(), 0, Checks(device, streamed)
    away = frozenset() if streamed or again or watching else offloaded(model)
    adapters = adapters_of_peft(model)
    for slot in quantizable_parameters(model):
        wanted, reason = decide(slot.path, slot.module, slot.full)
        matched += wanted is not None
        if wanted is None:
            plan.refused.add(slot.full)
        else:
            if not isinstance(slot.parameter, QuantizedTensor):
                refuse_offloaded([slot.full], away)
            adapter = ADAPTER if id(slot.module) in adapters else None
            reason = adapter or _entered(plan, wanted, slot, check) or reason
        plan.reasons[slot.full] = reason
    others = passed_over(model, lambda path, module, full: decide(path, module, full)[0] is not None)
    plan.reasons.update({full: other_reason(module) for full, (module, _) in others.items()})
    matched += len(others)
    decide.check_all_matched(model)
    plan.find_others(model)
    if not plan.changes and not again:
        raise ValueError(_nothing(plan, matched))
    return plan


class Checks:
    """What shapes, dtypes and devices say about a weight, found once for all weights that are alike."""

    def __init__(self, device: Device, streamed: bool) -> None:
        self.device = "cpu" if streamed and device is None else device
        self.streamed = streamed
        self.known: dict[tuple[object, ...], str | None] = {}

    def unsupported_reason(
        self,
        parameter: torch.Tensor,
        recipe: Recipe,
        axis: int,
        transposed: bool,
        sparsity: str | None = None,
    ) -> str | None:
        """Why a parameter cannot be quantized by a recipe, and stored as `Config.sparsity` asks; None where it can.

        ValueError where the recipe names a kernel that does not take it, or where values would have to leave the meta device.
        """
        if isinstance(parameter, QuantizedTensor):
            return ALREADY
        if parameter.dtype not in DTYPES:
            return f"{parameter.dtype} is not a floating-point type that can be quantized"
        device = parameter.device if self.device is None else torch.device(self.device)
        if parameter.is_meta and device.type != "meta" and not self.streamed:
            raise ValueError(
                f"on the meta device there are no values to quantize on {device}; leave device out, or load the weights "
                f"first (ao_lab.quantize_pretrained does both)"
            )
        shape = tuple(parameter.shape)
        shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        key = (recipe, axis, sparsity, shape, parameter.dtype, device)
        if key not in self.known:
            self.known[key] = self._found(*key)
        return self.known[key]

    def _found(
        self,
        recipe: Recipe,
        axis: int,
        sparsity: str | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> str | None:
        # A kernel is asked about the weight as it will be stored: of 2:4 storage there are some that take no other. It needs a
        # fake one, which has a device; making that mode imports torch's compiler, half a second for the first call.
        quantize = quantized if sparsity is None else quantized_compressed
        asks = recipe.kernel != "auto"
        try:
            Blocks.of(shape, recipe.weight.scale, axis)
            with (detect_fake_mode() or FakeTensorMode()) if asks else nullcontext():
                weight = torch.empty(shape, dtype=dtype, device=device if asks else "meta")
                result = quantize(weight, recipe, axis=axis)
        except ValueError as error:
            return str(error)
        if asks:
            select_kernel(result if result.block_axis == -2 else result.transposed(), result.dtype)
        return None


def _entered(plan: QuantizationPlan, config: Config, slot: Slot, check: Checks) -> str | None:
    """Put a parameter into the plan; the reason where it cannot be quantized. ValueError for one weight in two schemes."""
    full, (_, module, name, parameter) = slot.full, slot
    recipe, transposed = config.recipe(), is_transposed(module)
    if isinstance(module, TABLES):
        recipe = changed_recipe(recipe, activation=None, kernel="auto")
    _refuse_plain_elements(full, parameter)
    reason = unsupported_reason(module, name, parameter) or (
        ALREADY if isinstance(parameter, QuantizedTensor) else None
    )
    if reason is not None:
        return reason
    axis = _axis(config, module, full, parameter)
    reason = check.unsupported_reason(
        parameter, recipe, axis, transposed, config.sparsity
    ) or config.unsupported_reason(module)
    if config.sparsity is not None:
        _check_sparse(full, parameter, recipe, axis, transposed, reason)
    if reason is not None:
        return with_groups(reason, config)
    change = plan.changes.setdefault(id(parameter), Change(config, recipe, transposed, axis))
    if (change.recipe.weight, change.axis, change.transposed) != (recipe.weight, axis, transposed):
        names = " and ".join([*change.places, full])
        raise ValueError(
            f"{names} share one weight, but are to have {change.recipe} and {recipe}; give them one scheme"
        )
    if change.recipe.activation is None:
        # An embedding ignores how inputs are quantized; a layer that shares its weight does not.
        change.config, change.recipe = config, recipe
    change.places[full] = (module, name)
    return None


def _refuse_plain_elements(full: str, parameter: torch.Tensor) -> None:
    """ValueError for a weight that `sparsify_` has compressed as it was: quantizing it would lose its masks."""
    if isinstance(parameter, SparseQuantizedTensor) and is_plain(parameter.scheme):
        raise ValueError(
            f"{full} is in 2:4 storage already, its elements as they were; quantize_ changed nothing. Prune with "
            f"SparsityConfig(storage='dense'), then quantize with sparsity='2:4', or exclude it with filter_fn"
        )


def _check_sparse(
    full: str, parameter: torch.Tensor, recipe: Recipe, axis: int, transposed: bool, reason: str | None
) -> None:
    """ValueError for a weight that is to be stored 2:4 and cannot be; one that is quantized already stays with its reason."""
    dense = parameter.detach()
    dense = dense.transpose(-2, -1) if transposed else dense
    why = reason or unstorable(dense, recipe, axis) or not_sparse(dense, recipe)
    if why is not None:
        raise ValueError(
            f"{full}: {why}. quantize_ changed nothing; leave sparsity out, or exclude this layer with filter_fn"
        )


def _axis(config: Config, module: nn.Module, full: str, parameter: torch.Tensor) -> int:
    """Along which a weight's blocks run; ValueError where nothing says which axis its product sums over."""
    axis = contraction_axis(module, parameter) if config.axis is None else config.axis
    if axis is None:
        raise ValueError(
            f"{full} of shape {tuple(parameter.shape)}: {type(module).__name__} does not say whether its weight is "
            f"(experts, out, in) or (experts, in, out); give the configuration axis=-1 or axis=-2, or if it is "
            f"not a batch of matrices exclude it with filter_fn (ao_lab.linear_and_experts does)"
        )
    return axis


def _nothing(plan: QuantizationPlan, matched: int) -> str:
    """Why a call would change nothing."""
    if not plan.reasons:
        return "quantize_: the model has no nn.Linear, no nn.Embedding and no batched weights"
    meant = [name for name in plan.reasons if name not in plan.refused]
    if meant and all(plan.reasons[name] == ALREADY for name in meant):
        return (
            f"quantize_: the filter matches layers, but none of them can be changed: {', '.join(meant[:3])}"
            f"{', ...' * (len(meant) > 3)} {ALREADY}; for other schemes load the dense model again and quantize that"
        )
    if told := undivided([plan.reasons[name] for name in meant]):
        return f"quantize_: {told}"
    groups: dict[str, list[str]] = {}
    for name in meant or plan.reasons:
        groups.setdefault(plan.reasons[name], []).append(name)
    first = [
        f"{names[0]}{f' and {len(names) - 1} more' * (len(names) > 1)}: {reason}"
        for reason, names in list(groups.items())[:3]
    ]
    what = "matches nothing" if not matched else "matches layers, but none of them can be changed"
    return f"quantize_: the filter {what}. Of {len(plan.reasons)} parameters: " + "; ".join(first)


# Layers that programs join into one matrix, and that need one outer scale for that: queries, keys and values; gate and up.
#
# vLLM and SGLang load q_proj, k_proj and v_proj of a layer as one weight. Its blocks keep their scales; of the outer scales,
# one for each tensor, one is taken for all rows, and the others' weights would be off by the ratio. `for_layout` gives such
# schemes (nvfp4_pow2) a power of two as outer scale, and layers of them that are joined get the largest of theirs, as
# llm-compressor does. Every other scheme keeps each tensor's own.

#: Names of layers of one module that are joined: `packed_modules_mapping` of vLLM's models, and weights of experts.
JOINED = (
    ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"), ("query_proj", "key_proj", "value_proj"), ("wq", "wk", "wv"), ("w_gate", "w_up"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("fc1_g", "fc1_x"), ("wi_0", "wi_1"), ("c_fc_0", "c_fc_1"),
)  # fmt: skip
PLACES = {name: names for names in JOINED for name in names}


def shares_outer(scheme: Scheme) -> bool:
    """Whether a scheme's outer scale is one that joined layers share."""
    outer = scheme.outer
    return outer is not None and outer.rule == "ratio_pow2" and outer.statistic == "absmax_elements"


def group_of(name: str) -> tuple[str, tuple[str, ...]] | None:
    """What a weight "PATH.q_proj.weight" is joined in: the path and the names of the layers; None for others."""
    path, _, leaf = name.removesuffix(".weight").rpartition(".")
    return (path, PLACES[leaf]) if name.endswith(".weight") and leaf in PLACES else None


def joined(changes: Iterable[Change]) -> dict[str, list[Change]]:
    """For the first name of each weight that shares an outer scale all weights that do, itself included."""
    groups: dict[object, list[Change]] = {}
    for change in changes:
        place = group_of(change.name)
        if place is not None and shares_outer(change.recipe.weight):
            groups.setdefault((place, change.recipe), []).append(change)
    return {one.name: group for group in groups.values() if len(group) > 1 for one in group}


class JoinedScales:
    """The outer scales of the weights of a plan, found when the first of a group is asked for."""

    def __init__(self, changes: Iterable[Change]) -> None:
        self.groups = joined(changes)
        self.known: dict[str, torch.Tensor] = {}

    def of(self, change: Change) -> torch.Tensor | None:
        """The outer scale that a weight shares, of the dense weights of the model; None where it has its own."""
        name = change.name
        if name in self.groups and name not in self.known:
            members = {one.name: one for one in self.groups[name]}
            scale = largest([one.parameter for one in members.values()], change.recipe.weight)
            self.known.update(dict.fromkeys(members, scale))
        return self.known.pop(name, None)


def largest(weights: Iterable[torch.Tensor], scheme: Scheme) -> torch.Tensor:
    """The largest outer scale of dense weights in a scheme."""
    scales = [outer_scale(weight.detach(), scheme) for weight in weights]
    return torch.stack([one if one.is_meta else one.cpu() for one in scales]).max()
