"""The two steps of quantization-aware training on a model; `ao_lab.quantize_` is the way in.

Step "prepare" plans as `quantize_` does, then makes layers train, all or none: after an error every module is as it was.
Step "convert" goes from weight to weight, and each is quantized in every place that has it before the next begins; after an
error, layers are converted or still in training, `explain(model)` says which, and the same call goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.statistics import InputScales
from ao_lab.config.base import Config, FqnToConfig, Observer
from ao_lab.qat.config import QATConfig
from ao_lab.qat.layers import (
    ADDED,
    QATLinear,
    QATModule,
    Training,
    first_scales,
    plain_again,
    train_as,
    was_written,
)
from ao_lab.qat.linear import weight_as_stored
from ao_lab.qat.lora import (
    LoRALinear,
    LoRASumLinear,
    add_adapters,
    check_mergeable,
    fold,
    freeze,
    freeze_rest,
    merge,
    prepare_lora,
)
from ao_lab.qat.starts import calibrated_starts
from ao_lab.quantization.api import Call, calibrated, keep_report, report_of, required_observers, transform
from ao_lab.quantization.groups import warn_of_undivided
from ao_lab.quantization.plan import ALREADY, Change, QuantizationPlan, planned
from ao_lab.quantization.report import Report, known_reasons
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.training.layers import never_ran
from ao_lab.transforms.data import unwatch
from ao_lab.transforms.layers import (
    computed_reason,
    full_name,
    offloaded,
    quantizable_parameters,
    refuse_offloaded,
    rounded_buffers,
    shorten,
)
from ao_lab.transforms.plan import Device, Filter, Filtered, Patterns, all_or_none, check_called, selection
from ao_lab.transforms.report import warn_of_saved_state
from ao_lab.transforms.training_records import warn_of_saved_training
from reference import Scales


@transform(QATConfig)
def train_quantized(call: Call) -> Report:
    """Both steps of `QATConfig`: prepare layers for training, or convert what was trained."""
    configs = configs_of(call.config)
    if len({one.step for one in configs}) > 1:
        raise ValueError("FqnToConfig: QATConfigs of one step; call quantize_ for each step")
    if configs[0].step == "convert":
        return convert_qat(call)
    rounds = {None if one.lora is None else one.lora.rounds for one in configs}
    if len(rounds) > 1:
        raise ValueError(
            "FqnToConfig: lora in every QATConfig (LoRA(rank=0) freezes alone), rounding the same, or in none"
        )
    return prepare_lora(call) if rounds == {"base"} else prepare_qat(call)


def configs_of(config: Config | FqnToConfig) -> list[QATConfig]:
    """A QATConfig, or those that FqnToConfig names."""
    inner = config.fqn_to_config.values() if isinstance(config, FqnToConfig) else [config]
    return [one for one in inner if isinstance(one, QATConfig)]


def prepare_qat(call: Call) -> Report:
    """Step "prepare"."""
    model, device, observers = call.model, call.device, call.observers
    plan = planned(model, call.config, call.filter_fn, device)
    _check_untouched(plan)
    training = [module for change in plan.changes.values() for module, _ in change.places.values()]
    check_called(model, training, "before step='prepare'")
    if call.forward_loop is not None and observers is not None:
        raise ValueError("observers have seen their data; leave forward_loop out")
    if call.forward_loop is not None:
        observers = calibrated(plan, model, call.forward_loop)
    known = required_observers(plan, observers)
    starts = calibrated_starts(call, plan) if call.request is not None else {}
    with all_or_none(plain_again) as begun:
        for change in plan.changes.values():
            _prepare_one(change, known, starts, begun)
        if device is not None:
            model.to(device)
    adapted = [
        c for c in plan.changes.values() if isinstance(c.config, QATConfig) and c.config.lora is not None
    ]
    for change in adapted:
        freeze(change.places.values())
    if adapted:
        freeze_rest(model, (c.config.lora for c in adapted))  # type: ignore[attr-defined]
    keep_report(model, plan)
    warn_of_undivided(plan, call.config, stacklevel=5)
    warn_of_saved_state(model, ADDED, "step='prepare'")
    warn_of_saved_training(model, "QAT")
    return report_of(model)


def _check_untouched(plan: QuantizationPlan) -> None:
    """ValueError where something that is to be trained is quantized, or trains already."""
    quantized = [name for name, reason in plan.reasons.items() if reason == ALREADY]
    training = [name for name, reason in plan.reasons.items() if reason.startswith("it is prepared for QAT")]
    if quantized:
        raise ValueError(
            f"QAT trains dense weights, and {', '.join(quantized[:5])} already quantized; exclude them with filter_fn"
        )
    if training:
        raise ValueError(
            f"{', '.join(training[:5])} are prepared for QAT already; train, then call quantize_ with step='convert'"
        )


def _prepare_one(
    change: Change, known: Mapping[str, Observer], starts: Mapping[str, Scales], begun: list[nn.Module]
) -> None:
    """Make every layer of a weight train; what is learned or static is shared by them. starts: what calibration found."""
    config = change.config
    if not isinstance(config, QATConfig):
        raise TypeError(f"a QATConfig, got {type(config).__name__}")
    start = next((starts[name] for name in change.places if name in starts), None)
    added = _added(change, config, known, start)
    for module, _ in change.places.values():
        begun.append(module)
        embedding = isinstance(module, nn.Embedding)
        recipe = config.recipe()
        if embedding:
            recipe = replace(recipe, activation=None, kernel="auto")
        own = {name: part for name, part in added.items() if not (embedding and name.startswith("qat_input"))}
        settings = (change.axis, config.learn_scales, config.scale_gradient, config.start_step)
        train_as(module, Training(recipe, *settings, added=bool(own)))
        for name, tensor in own.items():
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, tensor)
            else:
                module.register_buffer(name, tensor)
        unwatch(module)
        if isinstance(module, nn.Linear) and config.lora is not None and config.lora.rank:
            add_adapters(module, config.lora)


def _added(
    change: Change, config: QATConfig, known: Mapping[str, Observer], start: Scales | None
) -> dict[str, torch.Tensor]:
    """Parameters and buffers that the layers of a weight get. start: of learned scales; None: as the configuration says."""
    weight = change.parameter
    result: dict[str, torch.Tensor] = {}
    frozen = not weight.requires_grad
    if config.learn_scales:
        if weight.is_meta:
            raise ValueError(
                "learned scales start from the weight's values; on the meta device there are none"
            )
        if start is None:
            start = first_scales(weight, change.recipe.weight, change.axis, config.scale_start)
        result["qat_scale"] = _parameter(start.scale, frozen)
        if start.zero is not None:
            result["qat_zero"] = (
                _parameter(start.zero, frozen) if start.zero.is_floating_point() else start.zero
            )
    inputs = _input_scales(change, config, known)
    if inputs is not None:
        scale = inputs.scale.to(weight.device)
        result["qat_input_scale"] = _parameter(scale, frozen) if config.learn_scales else scale
        if inputs.zero is not None:
            result["qat_input_zero"] = inputs.zero.to(weight.device)
    if config.start_step:
        result["qat_step"] = torch.zeros((), dtype=torch.int64, device=weight.device)
    return result


def _parameter(x: torch.Tensor, frozen: bool) -> nn.Parameter:
    return nn.Parameter(x.detach().clone(), requires_grad=not frozen)


def _input_scales(change: Change, config: QATConfig, known: Mapping[str, Observer]) -> Scales | None:
    """Static scales of the inputs of a weight's layers: given, or found by an observer."""
    if config.recipe().activation is None or not change.layers:
        return None
    observer = next((known[name] for name in change.layers if name in known), None)
    if observer is None:
        return config.input_scales()
    if not isinstance(observer, InputScales):
        raise ValueError(
            f"{type(observer).__name__} computes quantized values from data; QAT learns them by training"
        )
    return observer.scales()


def convert_qat(call: Call) -> Report:
    """Step "convert". Buffers that a cast has rounded and that no file holds get their values back, as loaders have them."""
    model, device, progress = call.model, call.device, call.progress
    selected, reasons = _select_layers(model, call.config, call.filter_fn)
    refuse_offloaded((name for name, _, _ in selected), offloaded(model))
    weights: dict[int, list[tuple[str, QATModule, QATConfig]]] = {}
    adapted: list[tuple[str, LoRALinear, QATConfig]] = []
    for name, module, wanted in selected:
        if isinstance(module, LoRALinear):
            check_mergeable(name, module, wanted)
            adapted.append((name, module, wanted))
        else:
            _check_convertible(name, module, wanted)
    _tell_never_ran(model, selected, reasons)
    for name, module, wanted in selected:
        if isinstance(module, LoRASumLinear):
            fold(module)
        if isinstance(module, QATModule):
            weights.setdefault(id(module.weight), []).append((name, module, wanted))
    for places in weights.values():
        _check_one_end(places)
    total, moved = len(weights) + len(adapted), list[tuple[float, float]]()
    try:
        for done, places in enumerate(weights.values(), 1):
            _convert_one(places, device)
            if progress is not None:
                progress(places[0][0], done, total)
        for done, (name, layer, wanted) in enumerate(adapted, len(weights) + 1):
            moved.append(merge(layer, wanted, device))
            if progress is not None:
                progress(name, done, total)
        if device is not None:
            model.to(device)
        for holder, name, own in list(rounded_buffers(model)):
            holder._buffers[name] = own
        for name, _, _ in adapted:
            reasons[name] += _loss_of_merging(moved)
    finally:
        keep_report(model, QuantizationPlan(reasons=reasons))
    return report_of(model)


def _loss_of_merging(moved: list[tuple[float, float]]) -> str:
    """How much rounding the sums of weights and adapters moved the weights, of all layers; "" where it moved none."""
    lost, added = (sum(both) for both in zip(*moved, strict=True))
    if not lost or not added:
        return ""
    ratio = (lost / added) ** 0.5
    told = f"; rounding the sums moved the weights by {ratio:.2g} times what the adapters had added"
    return told + (f" ({LOST})" if ratio > MUCH else "")


#: From which part on the rounding of merged sums is told as a loss, and what is said then.
MUCH = 0.3
LOST = (
    "training is lost in it, most of it from 1 on: LoRA(rounds='sum') trains for the rounded sum, ao_lab.save_adapter before "
    "step='convert' keeps the adapters apart"
)


def _select_layers(
    model: nn.Module, config: Config | FqnToConfig, filter_fn: Filter | None
) -> tuple[list[tuple[str, QATModule | LoRALinear, QATConfig]], dict[str, str]]:
    """The layers in training that a configuration means (all, without a filter), and why each layer is as it will be."""
    if filter_fn is None and not isinstance(config, FqnToConfig):
        filter_fn = every_layer
    select = selection(config, filter_fn)
    selected: list[tuple[str, QATModule | LoRALinear, QATConfig]] = []
    reasons = known_reasons(model)
    _check_computed(model, select)
    plain: list[str] = []
    for slot in quantizable_parameters(model):
        full, module = slot.full, slot.module
        wanted: Any = select(slot.path, module, full)[0]
        if not isinstance(module, (QATModule, LoRALinear)):
            plain += [full] if wanted is not None else []
            continue
        if wanted is not None and slot.name == "weight":
            selected.append((full, module, wanted))
            ended = "QAT ended; dense again" if wanted.base_config is None else "trained by QAT"
            reasons[full] = (
                f"{ended}, adapters merged" if isinstance(module, (LoRALinear, LoRASumLinear)) else ended
            )
    select.check_all_matched(model)
    if not selected and (done := _quantized(model)):
        raise ValueError(
            f"step='convert': no layer is in training; {done} weights are quantized already. Save the model, or prepare the "
            f"dense one with QATConfig(..., step='prepare') to train it again"
        )
    if not selected:
        raise ValueError(
            f"step='convert': none of the selected layers is in training ({', '.join(plain[:5]) or 'none is selected'}); "
            f"call quantize_ with QATConfig(..., step='prepare') first, and train"
        )
    return selected, reasons


def _quantized(model: nn.Module) -> int:
    """How many weights of a model are quantized."""
    return sum(isinstance(parameter, QuantizedTensor) for parameter in model.parameters())


def _check_computed(model: nn.Module, select: Filtered | Patterns) -> None:
    """ValueError for layers in training whose weight something computes, so that there is no parameter to quantize."""
    for path, module in model.named_modules():
        if not isinstance(module, (QATModule, LoRALinear)) or (reason := computed_reason(module)) is None:
            continue
        name = full_name(path, "weight")
        if select(path, module, name)[0] is not None:
            raise ValueError(f"step='convert' changed nothing. {name}: {reason}")


def _tell_never_ran(
    model: nn.Module, selected: list[tuple[str, QATModule | LoRALinear, QATConfig]], reasons: dict[str, str]
) -> None:
    """The reason in the report of layers whose forward never ran while others' did, and a UserWarning where they trained."""
    training = (QATModule, LoRALinear)
    modules = {path: module for path, module in model.named_modules() if isinstance(module, training)}
    idle = {full_name(path, "weight") for path in never_ran(modules)}
    names = []
    for name, module, _ in selected:
        if name not in idle:
            continue
        trains = getattr(module, "lora_b", module.weight)
        names += [name] if was_written(module, trains) else []
        reasons[name] = "forward never ran since step='prepare': it did not train with rounded operands"
    if names:
        warnings.warn(
            f"forward never ran: {shorten(names)} did not train with rounded operands since step='prepare'; code that uses "
            f"their weight directly (a fused or chunked loss that takes lm_head.weight) has to call the module instead",
            UserWarning,
            stacklevel=4,
        )


def every_layer(module: nn.Module, name: str) -> bool:
    """The filter of step "convert" where none is given."""
    return True


def _check_convertible(name: str, module: QATModule, config: QATConfig) -> None:
    """ValueError where a layer was trained for something else, or not yet."""
    if (reason := module.conversion_reason()) is not None:
        raise ValueError(f"{name} {reason}")
    if hasattr(module.weight, "full_tensor"):
        raise TypeError(
            f"{name} is distributed: load its full weights into a prepared model on one rank, and convert that"
        )
    training, base = module.qat, config.base_config
    if base is None:
        if training.learn_scales:
            raise ValueError(f"{name} has learned scales, which a dense layer cannot keep; give base_config")
        return
    wanted, linear = config.recipe(), isinstance(module, QATLinear)
    same = wanted.weight == training.recipe.weight and base.axis in (None, training.axis)
    if not same or (linear and wanted.activation != training.recipe.activation):
        raise ValueError(f"{name} was trained as {training.recipe}, not as {wanted}; convert it to that")
    step = module._buffers.get("qat_step")
    if step is not None and not step.is_meta and int(step) < training.start_step:
        raise ValueError(
            f"{name} has not begun to round: step {int(step)} of start_step {training.start_step}; "
            f"call ao_lab.advance_qat(model) after each optimizer step, or convert without base_config"
        )


def _check_one_end(places: list[tuple[str, QATModule, QATConfig]]) -> None:
    """ValueError where one weight is to be both quantized and dense."""
    if len({config.base_config is None for _, _, config in places}) > 1:
        names = " and ".join(name for name, _, _ in places)
        raise ValueError(
            f"{names} share one weight, but are to be quantized and dense; give them one configuration"
        )


def _convert_one(places: list[tuple[str, QATModule, QATConfig]], device: Device) -> None:
    """The quantized weight of one dense weight in every place, and plain layers around it."""
    linear = [place for place in places if isinstance(place[1], QATLinear)]
    _, module, config = (linear or places)[0]
    result: nn.Parameter | None = None
    if config.base_config is not None:
        given, weight = module.given(), module.weight.detach()
        recipe = module.qat.recipe if not linear else config.recipe()
        stored = weight_as_stored(weight, recipe, module.qat.axis, given)
        result = nn.Parameter(stored if device is None else stored.to(device), requires_grad=False)
    for _, place, _ in places:
        plain_again(place)
        if result is not None:
            place._parameters["weight"] = result
