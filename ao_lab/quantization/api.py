"""`quantize_`: replace the weights of a model by `QuantizedTensor`s, in place, one after the other.

First a plan (`ao_lab.quantization.plan`): which parameters, by which configuration, and why the others stay. All that can
go wrong by names, shapes, dtypes, kernels or missing calibration is found while it is made, before anything changes.

Then layer by layer, and each original is let go as soon as its quantized weight stands in every place that had it: peak
memory is the model and what one layer needs. To give originals back after an error, all of them would have to be kept
somewhere: twice the memory, on the host if not on the device. So they are not. What still may fail, memory or an
interruption, leaves every weight either as it was or quantized, never between the two, and `explain(model)` says which; the
same call again goes on with those that remain and ends with the same bits as a call that was never interrupted (where it
calibrates: with the same `observers`; a forward_loop would see the inputs that quantized layers make).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from ao_lab.calibration.hooks import ForwardLoop, calibrated, prepare, prepared, unwatch
from ao_lab.calibration.observers import Observer
from ao_lab.config.base import Config
from ao_lab.config.fqn import FqnToConfig
from ao_lab.qat.config import lora_mode, qat_step
from ao_lab.quantization.chunked import quantized_by_rows
from ao_lab.quantization.modules import candidates
from ao_lab.quantization.plan import ALREADY, Change, Device, Filter, Plan, planned
from ao_lab.quantization.report import ATTRIBUTE, Report, described_layer
from ao_lab.tensor.quantized_tensor import QuantizedTensor

#: Told of each weight when it is quantized: its full name, how many are, of how many.
Progress = Callable[[str, int, int], None]


def quantize_(
    model: nn.Module,
    config: Config | FqnToConfig,
    filter_fn: Filter | None = None,
    device: Device = None,
    *,
    forward_loop: ForwardLoop | None = None,
    observers: Mapping[str, Observer] | None = None,
    progress: Progress | None = None,
) -> Report:
    """Quantize weights of `model` as `config` says; the report lists each layer, changed or left, with its reason.

    filter_fn(module, name) says which modules; without it those are all nn.Linear (and transformers' Conv1D, the same with a
    transposed weight). It may also accept nn.Embedding and modules with batched weights (parameters with three axes). With
    `FqnToConfig`, which names modules itself, there is none.
    `device`: where weights are quantized, one at a time, and where the whole model is afterwards; None: where they are. On the
    meta device the quantized weights are there too, to be filled by load_state_dict(assign=True).
    `forward_loop(model)` runs data for configurations whose static scales are to be found, see `ao_lab.calibration.hooks`;
    `observers` are those of an earlier `calibrate`. `progress(name, done, total)` is called after each weight.

    Raises ValueError where the filter or a pattern matches nothing, where nothing can be changed, where a kernel does not take
    a weight and where a layer was not reached by calibration, TypeError for another kind of config: nothing has changed then.
    After an error later than that (out of memory, an interruption) every weight is as it was or quantized; see the module text.
    """
    if (step := qat_step(config)) is not None:
        from ao_lab.qat.api import convert_qat, prepare_qat
        from ao_lab.qat.lora.model import prepare_lora

        if step == "prepare" and lora_mode(config) == "base":
            return prepare_lora(model, config, filter_fn, device, forward_loop, observers)
        if step == "prepare":
            return prepare_qat(model, config, filter_fn, device, forward_loop, observers)
        return convert_qat(model, config, filter_fn, device, progress)
    plan = planned(model, config, filter_fn, device)
    making = {key: change for key, change in plan.changes.items() if not change.config.prepares}
    known = _observers(plan, making, model, forward_loop, observers)
    _prepare(plan, making)
    try:
        _make_all(making, known, device, progress)
        if device is not None and making:
            model.to(device)
    finally:
        keep_report(model, plan)
    return report_of(model)


def _make_all(
    making: dict[int, Change], known: Mapping[str, Observer], device: Device, progress: Progress | None
) -> None:
    """Make and place each weight; a weight that was placed somewhere is placed everywhere, whatever happens."""
    done = 0
    made: tuple[Change, nn.Parameter] | None = None
    try:
        for change in making.values():
            observer = next((known[name] for name in change.layers if name in known), None)
            made = change, made_parameter(change, device, observer)
            change.put(made[1])
            for module in change.layers.values():
                unwatch(module)
            done += 1
            if progress is not None:
                progress(next(iter(change.places)), done, len(making))
    except BaseException as error:
        if made is not None:
            made[0].put(made[1])
        error.add_note(
            f"quantize_ stopped with {done} of {len(making)} weights quantized; the others are as they were. "
            f"ao_lab.explain(model) lists both, and the same call goes on where this one stopped"
        )
        raise


def made_parameter(change: Change, device: Device, observer: Observer | None = None) -> nn.Parameter:
    """The quantized weight; `observer`, where there is one, makes it."""
    return nn.Parameter(made_weight(change, change.parameter, device, observer), requires_grad=False)


def made_weight(
    change: Change, parameter: torch.Tensor, device: Device, observer: Observer | None = None
) -> QuantizedTensor:
    """The quantized weight of a dense one that belongs where `change` says."""
    dense = parameter.detach()
    dense = dense if device is None else dense.to(device)
    dense = dense.transpose(-2, -1).contiguous() if change.turned else dense
    if observer is not None:
        made = observer.weight(dense, change.recipe, change.axis)
    else:
        static = change.config.input_scales() if change.recipe.activation is not None else None
        made = quantized_by_rows(dense, change.recipe, axis=change.axis, input_scales=static)
    return made.turned() if change.turned else made


def _observers(
    plan: Plan,
    making: dict[int, Change],
    model: nn.Module,
    forward_loop: ForwardLoop | None,
    given: Mapping[str, Observer] | None,
) -> Mapping[str, Observer]:
    """`required_observers`, after the data have run where there is a loop."""
    if forward_loop is not None and given is not None:
        raise ValueError("observers have seen their data; leave forward_loop out")
    if forward_loop is not None:
        given = calibrated(Plan(making), model, forward_loop)
    return required_observers(Plan(making), given)


def required_observers(plan: Plan, given: Mapping[str, Observer] | None = None) -> Mapping[str, Observer]:
    """The observer of each weight that needs one: of those given, or of those that step "prepare" has left with the model.

    By the full names of its layers; ValueError where one is missing, or has not seen enough.
    """
    waiting = [c for c in plan.changes.values() if c.layers and c.config.observer() is not None]
    known = given or {name: watch for change in waiting for name, watch in prepared(change).items()}
    missing = [name for change in waiting for name in change.layers if name not in known]
    if missing:
        raise ValueError(
            f"{_some(missing)} needs calibration: give act_quant_scale, or forward_loop=, a function that runs data through "
            f"the model, or call quantize_ with step='prepare', run data, and call it again with step='convert'"
        )
    needed = {name: known[name] for change in waiting for name in change.layers}
    _check_seen(needed)
    return needed


def _check_seen(observers: Mapping[str, Observer]) -> None:
    """ValueError where an observer cannot make a weight yet."""
    obstacles: dict[str, list[str]] = {}
    for name, observer in observers.items():
        if (obstacle := observer.obstacle()) is not None:
            obstacles.setdefault(obstacle, []).append(name)
    if obstacles:
        told = "; ".join(f"{reason} by {_some(names)}" for reason, names in obstacles.items())
        raise ValueError(
            f"calibration: {told}. Nothing was changed. Run data that reaches these layers (by calling the modules, and "
            f"outside of compiled programs), or leave them out by filter_fn"
        )


def _prepare(plan: Plan, making: dict[int, Change]) -> None:
    """Watch the layers of step "prepare"."""
    for key, change in plan.changes.items():
        if key not in making:
            prepare(change)
            plan.reasons.update(
                dict.fromkeys(change.layers, "inputs are watched; step='convert' quantizes it")
            )


def keep_report(model: nn.Module, plan: Plan) -> None:
    """Keep with the model why each layer is as it is now."""
    known = {layer.name: layer.reason for layer in getattr(model, ATTRIBUTE, Report()).layers}
    quantized = {
        f"{path}.{leaf}" if path else leaf
        for path, _, leaf, parameter in candidates(model)
        if isinstance(parameter, QuantizedTensor)
    }
    # What was quantized before is as it is for the reason of that time, whatever the filter says now.
    before = {name for name, reason in plan.reasons.items() if reason == ALREADY} | (plan.refused & quantized)
    reasons = {
        name: known.get(name, reason) if name in before else reason for name, reason in plan.reasons.items()
    }
    for change in plan.changes.values():
        stopped = not change.config.prepares and not isinstance(change.parameter, QuantizedTensor)
        for name in change.places if stopped else ():
            reasons[name] = "quantize_ stopped before it; call it again"
    report = Report(tuple(described_layer(*found, reasons) for found in candidates(model)))
    object.__setattr__(model, ATTRIBUTE, report)


def report_of(model: nn.Module) -> Report:
    """The report that `quantize_` has left."""
    report: Report = getattr(model, ATTRIBUTE)
    return report


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


__all__ = [
    "Progress",
    "keep_report",
    "made_parameter",
    "made_weight",
    "quantize_",
    "report_of",
    "required_observers",
]
