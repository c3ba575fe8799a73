"""`sparsify_` for a `SparseTrainingConfig`, `step_sparsity_` after each step of the optimizer, and `finish_sparsity_`.

Which layers train sparse, and why others do not: all that can be refused is, before anything changes.

Selected are the layers that one-shot pruning selects (`ao_lab.sparsity.plan.selected`), of these nn.Linear itself and what has
registered beside it (layers prepared for QAT): what computes otherwise, or trains by a recipe already, would lose that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import nn

from ao_lab.sparsity.plan import (
    DTYPES,
    TRANSFORMS,
    SparseLayer,
    SparsityPlan,
    SparsityReport,
    in_place_reason,
    layout_reason,
    selected,
)
from ao_lab.sparsity.training.config import (
    SPARSE_PHASE,
    WARMUP_PHASE,
    SparseTrainingConfig,
    finds_masks,
    phase,
)
from ao_lab.sparsity.training.layers import ADDED, TRAINS_AS, SparseLinear, plain_again, train_sparse
from ao_lab.sparsity.training.masks import (
    count,
    find_mask,
    is_capturing,
    other_pattern_reason,
    share_of_zeros,
    stored_as,
    stored_dtype,
    zero_pruned_,
)
from ao_lab.sparsity.training.products import PRODUCTS
from ao_lab.tensor.quantized_tensor import QuantizedTensor, SparseQuantizedTensor
from ao_lab.transforms.layers import (
    ConvertedModule,
    check_model,
    computed_reason,
    full_name,
    never_called,
    quantizable_parameters,
)
from ao_lab.transforms.plan import Filter, WeightChange, all_or_none
from ao_lab.transforms.report import remember_pruned, warn_of_saved_state

STORED = (
    "it is in 2:4 storage, for inference; module.weight = torch.nn.Parameter(module.weight.dequantize()) makes it dense, and "
    "fixed masks are its zeros then"
)


@dataclass
class Group(WeightChange):
    """The layers that share one weight."""

    @property
    def linears(self) -> dict[str, nn.Linear]:
        """They, by full names of the weight."""
        return cast("dict[str, nn.Linear]", self.layers)


def planned(model: nn.Module, config: SparseTrainingConfig, filter_fn: Filter | None) -> SparsityPlan[Group]:
    """The plan; ValueError where nothing is selected, or something that cannot train sparse."""
    plan = selected(model, filter_fn, Group, module_reason=_module_reason)
    for group in plan.changes.values():
        reason = _weight_reason(group, config)
        plan.unable.update(dict.fromkeys(group.layers, reason) if reason is not None else {})
    plan.unable.update(_passed_by(model, plan, config))
    plan.check()
    return plan


def _passed_by(model: nn.Module, plan: SparsityPlan[Group], config: SparseTrainingConfig) -> dict[str, str]:
    """Layers that torch's fast path of encoder layers multiplies without, in eval mode: with weights that are not masked."""
    inside = {} if config.masks == "fixed" else never_called(model)
    return {
        full: f"in eval mode torch's fast path of {inside[id(layer)]} computes with weights that are not "
        f"masked; call torch.backends.mha.set_fastpath_enabled(False) before"
        for group in plan.changes.values()
        for full, layer in group.layers.items()
        if id(layer) in inside
    }


def _module_reason(module: nn.Module) -> str | None:
    """Why a linear layer cannot train sparse; None where it can."""
    if isinstance(module, nn.Linear) and type(module) in TRAINS_AS:
        return None
    if isinstance(module, ConvertedModule):
        said = module.unsupported_reason() or module.parameter_reason("weight")
        if said is not None:
            return said
    return f"nn.Linear itself trains sparse; a {type(module).__name__} may compute otherwise"


def _weight_reason(group: Group, config: SparseTrainingConfig) -> str | None:
    """Why a weight cannot train sparse, and the way out."""
    w, (_, size) = group.parameter, config.scoring().kept_of
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
    kinds = {TRAINS_AS[type(layer)] for layer in group.layers.values()}
    reasons = (
        *(kind.unsupported_config(config) for kind in kinds),
        PRODUCTS[config.products].unsupported_reason(w),
    )
    reason = next((reason for reason in reasons if reason is not None), None)
    # In a warm-up zeros grow, and masks are found of what came of them.
    return other_pattern_reason(w, config) if reason is None and phase(config, 0) == SPARSE_PHASE else reason


#: What the report says in place of a score where a fixed mask is what an earlier pruning left.
OWN_ZEROS = "its own zeros"


@TRANSFORMS.register(SparseTrainingConfig)
def train(
    model: nn.Module, config: SparseTrainingConfig, filter_fn: Filter | None, further: tuple[str, ...]
) -> SparsityReport:
    """Convert linear layers to train sparse, from step 0 on. `zeros` in the report are what products take as zero.

    Raises ValueError for keywords of one-shot pruning, and as `ao_lab.sparsity.training.api` says; nothing has changed then.
    """
    if further:
        raise ValueError(
            f"SparseTrainingConfig computes masks by magnitude, without data; leave {', '.join(further)} out (prune once by "
            f"SparsityConfig first: fixed masks keep the existing zeros)"
        )
    # Masks of inference mode could be saved for no backward.
    with torch.inference_mode(False), torch.no_grad():
        plan = planned(model, config, filter_fn)
        own = _convert(plan, config)
        names = {name: config.pattern for group in plan.changes.values() for name in group.layers}
        for name in names:
            remember_pruned(model, name, f"{config.pattern} in training")
        if config.masks == "recomputed" or config.warmup or config.cooldown:
            warn_of_saved_state(model, ADDED, "sparsify_")
        report = _report(model, names, plan.reasons, dict.fromkeys(own, OWN_ZEROS))
        return SparsityReport((*report.layers, *plan.passed_over))


def _convert(plan: SparsityPlan[Group], config: SparseTrainingConfig) -> list[str]:
    """Make layers train sparse; the names of those whose masks are the zeros that were there."""
    masks: dict[int, torch.Tensor] = {}
    own: list[str] = []
    for key, group in plan.changes.items():
        masks[key], is_own = _first_mask(group, config)
        own += group.layers if is_own else []
    with all_or_none(plain_again) as begun:
        for key, group in plan.changes.items():
            step = torch.zeros((), dtype=torch.int64, device=group.parameter.device)
            for layer in group.linears.values():
                begun.append(layer)
                train_sparse(layer, config, masks[key], step).settle(0)
    return own


def _first_mask(group: Group, config: SparseTrainingConfig) -> tuple[torch.Tensor, bool]:
    """The mask of a weight before the first step, as it is stored; whether it is the weight's zeros."""
    own = False
    if phase(config, 0) == SPARSE_PHASE:
        mask = find_mask(group.parameter, config)
        own = config.masks == "fixed" and torch.equal(mask, group.parameter != 0)
    else:
        mask = torch.ones(group.parameter.shape, dtype=torch.bool, device=group.parameter.device)
    return stored_as(mask, stored_dtype(config)), own


class SparsityStep(NamedTuple):
    """What `step_sparsity_` says. step: how many steps have been done; phase: "warm-up", "sparse" or "cool-down", of the step
    that comes now ("mixed" where layers have several configurations and differ); renewed: weights whose mask was found anew."""

    step: int
    phase: str
    renewed: int


def step_sparsity_(model: nn.Module) -> SparsityStep:
    """Count one step of the layers in sparse training; call it after each optimizer.step(), on every rank.

    Computes masks when they are due (when the sparse phase begins, and every `every` steps if they are recomputed), from the
    weights after the step; drops them when the cool-down begins; sets pruned weights to zero if masks are fixed, so that an
    optimizer's momentum and weight decay cannot change them. The optimizer's moments are unchanged: those of weights that a new
    mask drops fade ("masked" gives them no gradients), or continue ("straight-through", "sr-ste"). An optimizer's weight decay
    also shrinks dropped weights of recomputed masks; together with "sr-ste" both apply. Layers that share a weight have one
    count.

    There is no host synchronization, except under fixed masks when they are computed, and if the count was loaded, copied or
    moved since the last call. In the capture of a CUDA graph, after a call outside of it, masks are computed in each replay;
    that requires layers without warm-up and cool-down whose masks stay or are recomputed in every step. `step` is then that of
    the capture.

    Training that forgets this call raises RuntimeError in the next optimizer.step(), before that changes anything
    (`ao_lab.sparsity.training.layers`).

    Raises TypeError for anything but a model, ValueError if no layer is in sparse training, and for layers whose weight is
    computed (a parametrization, weight_norm), RuntimeError in the capture of a CUDA graph that does not support the step.
    """
    check_model(model)
    layers = sparse_layers(model)
    if not layers:
        raise ValueError(
            "step_sparsity_: no layer trains sparse; call ao_lab.sparsify_(model, SparseTrainingConfig(...)) first"
        )
    check_plain_weights(layers, "step_sparsity_")
    groups, buffers = _by_weight(layers.values()), [layer.sparse_step for layer in layers.values()]
    if is_capturing(buffers):
        _check_repeatable(layers)
    of_layer = dict(zip(map(id, layers.values()), count(buffers), strict=True))
    steps = [of_layer[id(places[0])] for places in groups]
    renewed, phases = 0, set()
    for places, done in zip(groups, steps, strict=True):
        renewed += _step(places, done)
        phases.add(phase(places[0].sparse, done))
    return SparsityStep(max(steps), phases.pop() if len(phases) == 1 else "mixed", renewed)


def _step(places: list[SparseLinear], done: int) -> bool:
    """One step of the layers that share a weight; whether a mask was found."""
    config = places[0].sparse
    finds = finds_masks(config, done)
    if finds or phase(config, done) != phase(config, done - 1):
        # Into the first one's buffer, which those of other places mostly are.
        first = places[0].renew_mask(done)
        for layer in places[1:]:
            if layer.stored_mask is not first:
                layer.stored_mask.copy_(first)
    for layer in places:
        layer.settle(done)
    return finds


def _by_weight(layers: Iterable[SparseLinear]) -> list[list[SparseLinear]]:
    """Layers by the weight that they share."""
    groups: dict[int, list[SparseLinear]] = {}
    for layer in layers:
        groups.setdefault(id(layer.weight), []).append(layer)
    return list(groups.values())


def _check_repeatable(layers: dict[str, SparseLinear]) -> None:
    """RuntimeError where steps of layers differ, which a CUDA graph would repeat as they are captured."""
    for name, layer in layers.items():
        config = layer.sparse
        if config.warmup or config.cooldown or config.every != 1:
            raise RuntimeError(
                f"step_sparsity_: a CUDA graph repeats one step, and those of {name} differ (warmup={config.warmup}, "
                f"cooldown={config.cooldown}, every={config.every}); capture with 0, 0 and 1, or call it outside of the graph"
            )


def sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """The layers of a model that train sparse, by name, each once."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SparseLinear)}


def finish_sparsity_(model: nn.Module) -> SparsityReport:
    """End sparse training: layers are nn.Linear again, their weights exactly N:M, +0 where the last mask drops them.

    Layers that were prepared for QAT are QAT layers again.
    In the cool-down weights are dense, and stay so; the report lists them as left. Hooks, names and parameters stay; afterwards
    `sparsify_` stores weights compressed, `quantize_` quantizes them. Under FSDP2 each rank sets its own shard.

    Raises TypeError for anything but a model, and for layers that fully_shard was given by themselves (their class is its own);
    ValueError where no layer trains sparse, in the warm-up, before masks were found, and for layers whose weight something
    computes (a parametrization, weight_norm). Nothing has changed then.
    """
    check_model(model)
    layers = sparse_layers(model)
    _check_finished(layers)
    patterns, reasons = {}, {}
    for path, layer in layers.items():
        config, name = layer.sparse, full_name(path, "weight")
        sparse = phase(config, int(layer.sparse_step)) == SPARSE_PHASE
        if sparse:
            zero_pruned_(layer.weight, layer.stored_mask)
        patterns[name] = config.pattern if sparse else ""
        reasons[name] = f"trained sparse, masks {config.masks}" if sparse else "dense in its cool-down"
        remember_pruned(model, name, f"{config.pattern} by training" if sparse else "")
    report = _report(model, patterns, reasons, dict.fromkeys(patterns, "training"))
    for layer in layers.values():
        plain_again(layer)
    return report


def check_plain_weights(layers: dict[str, SparseLinear], what: str) -> None:
    """ValueError for layers whose weight something computes: there is no parameter to find a mask of, or to set to zero."""
    for name, layer in layers.items():
        if (reason := computed_reason(layer)) is not None:
            raise ValueError(
                f"{what} changed nothing. {full_name(name, 'weight')}: {reason}, and call it then"
            )


def _check_finished(layers: dict[str, SparseLinear]) -> None:
    """The errors of `finish_sparsity_`."""
    if not layers:
        raise ValueError("finish_sparsity_: no layer trains sparse")
    check_plain_weights(layers, "finish_sparsity_")
    for name, layer in layers.items():
        if type(layer) not in TRAINS_AS.values():
            raise TypeError(
                f"{name} was given to fully_shard by itself, which made it a {type(layer).__name__}: load its full weights and "
                f"masks into a model on one rank, and finish that"
            )
        if phase(layer.sparse, int(layer.sparse_step)) == WARMUP_PHASE:
            raise ValueError(
                f"{name} has not begun to train sparse: step {int(layer.sparse_step)} of warmup={layer.sparse.warmup}; call "
                f"ao_lab.step_sparsity_(model) after each optimizer step"
            )


def _report(
    model: nn.Module, patterns: dict[str, str], reasons: dict[str, str], scores: dict[str, str]
) -> SparsityReport:
    """What was done to every parameter, while layers have their masks. scores: what decided, where that was not magnitude."""
    layers = []
    for slot in quantizable_parameters(model):
        (_, module, _, parameter), full = slot, slot.full
        pattern, shape = patterns.get(full, ""), tuple(parameter.shape)
        kind = (module.plain if isinstance(module, SparseLinear) else type(module)).__name__
        line = SparseLayer(full, kind, shape, reasons.get(full, "it does not train sparse"))
        if pattern and isinstance(module, SparseLinear):
            zeros, score = share_of_zeros(parameter, module.sparse_mask), scores.get(full, "magnitude")
            line = SparseLayer(full, kind, shape, line.reason, pattern, score, zeros)
        layers.append(line)
    return SparsityReport(tuple(layers))


__all__ = ["SparsityStep", "finish_sparsity_", "step_sparsity_"]
