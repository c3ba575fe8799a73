"""`quantize_`: replace the weights of a model by `QuantizedTensor`s, in place, one after the other.

First a plan (`ao_lab.quantization.plan`): which parameters, by which configuration, and why the others stay. All that can
go wrong by names, shapes, dtypes, kernels or missing calibration is found while it is made, before anything changes.

Then layer by layer, and each original is let go as soon as its quantized weight stands in every place that had it: peak
memory is the model and what one layer needs. To give originals back after an error, all of them would have to be kept
somewhere: twice the memory, on the host if not on the device. So they are not. What still may fail, memory or an
interruption, leaves every weight either as it was or quantized, never between the two, and `explain(model)` says which; the
same call again goes on with those that remain and ends with the same bits as a call that was never interrupted (where it
calibrates: with the same `observers`; a forward_loop would see the inputs that quantized layers make).

Observers see the inputs of layers while data runs through the model, in two ways, which give the same scales.
`quantize_(model, config, forward_loop=...)` (or `calibrate` and then `quantize_(..., observers=...)`) watches layers while
`forward_loop(model)` runs, and never longer, whatever it raises. With torchao's steps the caller runs the data between two
calls: `quantize_` with step="prepare", any forwards, `quantize_` with step="convert"; between them each layer has a `Watch`
among its forward hooks, and nothing else of the model is changed.

Which observer a weight needs is what its configuration says (`Config.observer`); `ao_lab.calibration` has the methods.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ao_lab.config.base import Config, FqnToConfig, Observer
from ao_lab.quantization.groups import warn_of_undivided
from ao_lab.quantization.plan import ALREADY, Change, JoinedScales, QuantizationPlan, joined, largest, planned
from ao_lab.quantization.report import Report, described, explain, held, keep_configuration, warn_of_slower
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.tensor.metadata import PRESHUFFLED, read_preshuffled
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.sparse import compressed, not_sparse, unstorable
from ao_lab.tensor.sparse_codes import metadata_of, positive_zeros
from ao_lab.transforms.data import Watched, observe, unwatch, watch, watches
from ao_lab.transforms.layers import (
    TABLES,
    check_model,
    is_in_training,
    quantizable_parameters,
    shorten,
    untying,
)
from ao_lab.transforms.plan import Device, Filter, Progress, Transforms, noting
from ao_lab.transforms.report import ATTRIBUTE
from ao_lab.transforms.telling import telling

if TYPE_CHECKING:
    from ao_lab.calibration.run import Request

ForwardLoop = Callable[[nn.Module], Any]
Observers = Mapping[str, Observer]


LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of `quantize_`, for the transform of its configuration."""

    model: nn.Module
    config: Config | FqnToConfig
    filter_fn: Filter | None = None
    device: Device = None
    forward_loop: ForwardLoop | None = None
    observers: Mapping[str, Observer] | None = None
    progress: Progress | None = None
    #: Methods that find scales and codes otherwise than by rounding, and the data that they read.
    request: Request | None = None


#: What a configuration does with a model. It leaves a report with the model (`keep_report`), and returns it.
Transform = Callable[[Call], Report]
TRANSFORMS: Transforms[Transform] = Transforms()


def transform(kind: type[Config]) -> Callable[[Transform], Transform]:
    """Register what `quantize_` does for a class of configurations, and for its subclasses; ValueError for a second one.

    A class without a transform of its own has its weights quantized as its recipe says (`quantize_weights`).
    """
    return TRANSFORMS.register(kind)


def transform_of(config: object) -> Transform:
    """The transform of a configuration, or of those that FqnToConfig names; ValueError where these have several."""
    wanted = {TRANSFORMS.of(one) or quantize_weights: one for one in configs_of(config)}
    for function, one in wanted.items():
        _check_sparsity_of(function, one)
    if len(wanted) > 1:
        names = " and ".join(sorted(type(one).__name__ for one in wanted.values()))
        raise ValueError(f"FqnToConfig: {names} do different things to a model; call quantize_ for each")
    return next(iter(wanted), quantize_weights)


def configs_of(config: object) -> list[object]:
    """A configuration, or those that FqnToConfig names."""
    configs = config.fqn_to_config.values() if isinstance(config, FqnToConfig) else [config]
    return [one for one in configs if one is not None]


def _observes(config: object) -> bool:
    """Whether a configuration finds static scales of inputs."""
    return isinstance(config, Config) and not config.prepares and config.observer() is not None


def _check_sparsity_of(function: Transform, config: object) -> None:
    """ValueError for 2:4 storage asked of a configuration that trains or adapts: what comes in between fills zeros."""
    asked = (config, getattr(config, "base_config", None))
    if function is not quantize_weights and any(getattr(one, "sparsity", None) is not None for one in asked):
        raise ValueError(
            f"{type(config).__name__}: 2:4 storage holds pruned weights for inference; leave sparsity out, and prune and "
            f"compress after training (after QAT with sparse weights: finish_sparsity_(model), quantize_(model, "
            f"QATConfig(step='convert')), which makes layers dense, then quantize_ with sparsity='2:4')"
        )


def quantize_(
    model: nn.Module,
    config: Config | FqnToConfig,
    filter_fn: Filter | None = None,
    device: Device = None,
    *,
    forward_loop: ForwardLoop | None = None,
    observers: Mapping[str, Observer] | None = None,
    calibration: Iterable[Any] | None = None,
    methods: Iterable[Any] = (),
    blocks: str | None = None,
    offload: bool = False,
    resume: str | os.PathLike[str] | None = None,
    prefix: str = "quantized",
    progress: Progress | bool | None = None,
) -> Report:
    """Quantize weights of `model` in place, as `config` says; the report lists each layer, changed or not, with the reason.

    filter_fn(module, name) selects modules. Default: all nn.Linear (and transformers' Conv1D, the same with a transposed
    weight), a language model's head included unless its weight is tied to the embedding: a tied head is left unquantized, since
    both weights would be stored. `ao-lab quantize` and `HfConfig` select the same layers, and batched experts. A filter can
    select nn.Embedding and modules with batched weights (parameters with three axes). `FqnToConfig` names modules itself and
    takes no filter.
    device: where weights are quantized, one at a time, and where the model is afterwards. Default: the device of each weight.
    With calibration one block of the model is there at a time, with its batches (`ao_lab.calibration.residence`). On the
    meta device the quantized weights are meta tensors, to be filled by load_state_dict(assign=True).
    forward_loop(model) runs calibration data for configurations with static activation scales, see `ao_lab.transforms.data`;
    observers are those of an earlier `calibrate`. progress(name, done, total) is called after each weight, and in a calibration
    with what begins in place of a name. Default: calls with methods or calibration that take more than some seconds say on
    stderr how far they are (`ao_lab.transforms.telling`). True: any call does; False, or a logger "ao_lab" set to ERROR: none.

    methods: algorithms such as (Clip(), GPTQ()) (`ao_lab.calibration.methods`). Default: round to nearest with the scheme's own
    scales. calibration: data for methods that need layer inputs: an iterable of batches (a tensor, a tuple of positional or a
    mapping of keyword arguments of a call of the model; its attention_mask marks padding, which is ignored). The model is
    calibrated block by block (`ao_lab.transforms.walk`), each block with the inputs that the quantized blocks before it
    produce; layers outside of the blocks are rounded to nearest. A tenth of the tokens is held out: no weight has a larger
    output error on them than with rounding to nearest, and the report lists the gains. blocks: name of the list of blocks.
    Default: the longest one; "" treats the whole model as one block. offload: keep block inputs in host memory. resume: folder
    for finished blocks; after an interruption the same call on the original model continues there, with bitwise equal results.
    prefix: "quantized", or "float": inputs of a block come from the unquantized blocks before it.

    On GPUs with kernels for it weights are preshuffled at the end (`ao_lab.tensor.metadata`): the same quantized values and
    scales, in the order in which kernels for few tokens read them.

    With `sparsity="2:4"` in the configuration pruned weights are stored compressed: call `sparsify_` first, so that masks are
    chosen before rounding. A weight that is not 2:4, or is compressed already, is a ValueError.

    Raises ValueError if the filter or a pattern matches nothing, if no layer can be quantized, if a kernel does not support a
    weight, and if calibration did not reach a layer; TypeError for another kind of config. The model is unchanged then. After a
    later error (out of memory, an interruption) every weight is either original or quantized; the same call goes on.
    """
    request = None
    how = blocks is not None or offload or resume is not None or prefix != "quantized"
    if calibration is not None or methods != () or how:
        from ao_lab.calibration.run import (
            request_of,  # a tenth of what this package is: for calls that ask for it
        )

        request = request_of(
            calibration, methods, blocks, offload, any(map(_observes, configs_of(config))), resume, prefix
        )
    if calibration is not None and (forward_loop is not None or observers is not None):
        raise ValueError("calibration finds static scales too; leave forward_loop and observers out")
    run = transform_of(config)
    starting = all(getattr(one, "learn_scales", False) for one in configs_of(config))
    if request is not None and run is not quantize_weights and not starting:
        raise ValueError(
            f"methods quantize weights, which {type(config).__name__} does not; leave methods and calibration out here, and "
            f"give them to the call that quantizes"
        )
    check_model(model)
    with telling(progress, "quantize", long=request is not None) as told, untying(model):
        report = run(Call(model, config, filter_fn, device, forward_loop, observers, told, request))
    keep_configuration(model, config, request)
    if preshuffle(model):
        report = explain(model)
        object.__setattr__(model, ATTRIBUTE, report)
    return report


def quantize_weights(call: Call) -> Report:
    """Quantize the weights that a plan names; what `quantize_` does for configurations without a transform of their own."""
    model = call.model
    plan = planned(model, call.config, call.filter_fn, call.device)
    _refuse_sharded(plan)
    quantizing = {key: change for key, change in plan.changes.items() if not change.config.prepares}
    known = _observers(quantizing, call) if not calibrated_here(call) else {}
    _prepare(plan, quantizing)
    changed, total, shared = [*quantizing.values()], len(quantizing), JoinedScales(quantizing.values())
    try:
        if call.request is not None:
            _calibrate(plan, quantizing, shared, call)
        _quantize_all(quantizing, known, shared, call, total - len(quantizing))
        if call.device is not None and changed:
            model.to(call.device)
    finally:
        keep_report(model, plan)
    report = report_of(model)
    warn_of_slower(report, (name for change in changed for name in change.places))
    warn_of_undivided(plan, call.config)
    return report


def calibrated_here(call: Call) -> bool:
    """Whether the call's own calibration finds static scales."""
    return call.request is not None and call.request.batches is not None


def _calibrate(
    plan: QuantizationPlan, quantizing: dict[int, Change], shared: JoinedScales, call: Call
) -> None:
    """Quantize by methods what they can quantize, and take it out of `quantizing`; the rest has a reason."""
    from ao_lab.calibration.experts import takes_methods
    from ao_lab.calibration.run import Job

    request = call.request
    assert request is not None
    targets = [change for change in quantizing.values() if change.layers and takes_methods(change)]
    job = Job(call.model, request, targets, shared.of, call.progress, device=call.device)
    job.total = len(quantizing)
    if request.batches is not None:
        job.observers = fresh_observers(quantizing.values())
    try:
        with noting(job.stopped):
            job.run()
    finally:
        for key, change in list(quantizing.items()):
            told = f"; {job.done[change.name]}" if change.name in job.done else job.reason(change)
            for full in change.places:
                plan.reasons[full] += told
            if change.name in job.done:
                del quantizing[key]


def _refuse_sharded(plan: QuantizationPlan) -> None:
    """TypeError for a weight of which each process has a piece: scales would be those of pieces."""
    for change in plan.changes.values():
        if hasattr(change.parameter, "full_tensor"):
            raise TypeError(
                f"{change.name} is a DTensor, which quantize_ does not take; it changed nothing. Quantize the "
                f"model first, then shard it; from_pretrained of transformers does both with "
                f"quantization_config=ao_lab.HfConfig(config) and tp_plan or distributed_config"
            )


def _quantize_all(
    quantizing: dict[int, Change],
    known: Mapping[str, Observer],
    shared: JoinedScales,
    call: Call,
    before: int = 0,
) -> None:
    """Quantize and place each weight; a weight that was placed somewhere is placed everywhere, whatever happens.

    before: how many this call has quantized already.
    """
    done, total = 0, before + len(quantizing)
    placing: tuple[Change, nn.Parameter] | None = None

    def stopped() -> str:
        if placing is not None:
            placing[0].put(placing[1])
        return (
            f"quantize_ stopped with {before + done} of {total} weights quantized; the others are as they were. "
            f"ao_lab.explain(model) lists both, and the same call goes on where this one stopped"
        )

    with noting(stopped):
        for change in quantizing.values():
            outer = shared.of(change)
            placing = change, quantize_parameter(change, change.parameter, call.device, known, outer)
            change.put(placing[1])
            for module in change.layers.values():
                if module._forward_pre_hooks:
                    unwatch(module)
            done += 1
            if call.progress is not None:
                call.progress(change.name, before + done, total)


def quantize_parameter(
    change: Change,
    parameter: torch.Tensor,
    device: Device,
    observers: Mapping[str, Observer],
    outer: torch.Tensor | None = None,
) -> nn.Parameter:
    """The quantized weight of a dense one that belongs where `change` says, by its observer where there is one.

    outer: what it shares with other layers.
    """
    observer = next((observers[name] for name in change.layers if name in observers), None)
    dense = parameter.detach()
    dense = dense if device is None else dense.to(device)
    dense = dense.transpose(-2, -1).contiguous() if change.transposed else dense
    if change.config.sparsity is not None:
        dense = positive_zeros(dense)
    if observer is not None:
        weight: Any = observer.weight(dense, change.recipe, change.axis)
    else:
        static = change.config.input_scales() if change.recipe.activation is not None else None
        weight = quantized_weight(dense, change.recipe, axis=change.axis, input_scales=static, outer=outer)
    if change.config.sparsity is not None:
        weight = _compressed(change, dense, weight)
    return nn.Parameter(weight.transposed() if change.transposed else weight, requires_grad=False)


def _compressed(change: Change, dense: torch.Tensor, weight: QuantizedTensor) -> QuantizedTensor:
    """The quantized weight in 2:4 storage, its mask that of the dense one; ValueError, with the layer's name, where it is not
    2:4."""
    reason = unstorable(dense, change.recipe, change.axis) or not_sparse(dense, change.recipe)
    try:
        if reason is not None:
            raise ValueError(reason)
        return compressed(weight, metadata_of(dense))
    except ValueError as error:
        raise ValueError(f"{change.name}: {error}") from error


def _observers(quantizing: dict[int, Change], call: Call) -> Mapping[str, Observer]:
    """`required_observers`, after the data have run where there is a loop."""
    if call.forward_loop is not None and call.observers is not None:
        raise ValueError("observers have seen their data; leave forward_loop out")
    given, changes = call.observers, quantizing.values()
    if call.forward_loop is None and given is None and not any(c.config.observer() for c in changes):
        return {}
    if call.forward_loop is not None:
        given = calibrated(QuantizationPlan(quantizing), call.model, call.forward_loop)
    return required_observers(QuantizationPlan(quantizing), given)


def _prepare(plan: QuantizationPlan, quantizing: dict[int, Change]) -> None:
    """Watch the layers of step "prepare"."""
    for key, change in plan.changes.items():
        if key not in quantizing:
            prepare(change)
            plan.reasons.update(
                dict.fromkeys(change.layers, "inputs are observed; step='convert' quantizes it")
            )


def keep_report(model: nn.Module, plan: QuantizationPlan) -> None:
    """Keep with the model why each layer is as it is now."""
    known = {layer.name: layer.reason for layer in getattr(model, ATTRIBUTE, Report()).layers}
    quantized = {
        slot.full
        for slot in quantizable_parameters(model)
        if isinstance(held(slot.parameter), QuantizedTensor)
    }
    # What was quantized before is as it is for the reason of that time, whatever the filter says now.
    before = {name for name, reason in plan.reasons.items() if reason == ALREADY} | (plan.refused & quantized)
    reasons = {
        name: known.get(name, reason) if name in before else reason for name, reason in plan.reasons.items()
    }
    for change in plan.changes.values():
        stopped = not change.config.prepares and not isinstance(held(change.parameter), QuantizedTensor)
        for name in change.places if stopped else ():
            reasons[name] = "quantize_ stopped before it; call it again"
    report = described(model, reasons)
    object.__setattr__(model, ATTRIBUTE, report)
    planning = all(slot.parameter.is_meta for slot in quantizable_parameters(model))
    LOG.log(
        logging.DEBUG if planning else logging.INFO,
        "%d of %d weights are quantized now",
        len(quantized),
        len(report.layers),
    )
    for layer in report.layers:
        LOG.debug("%s: %s, %s", layer.name, layer.scheme or "left", layer.reason)


def report_of(model: nn.Module) -> Report:
    """The report that `quantize_` has left."""
    report: Report = getattr(model, ATTRIBUTE)
    return report


def preshuffle(model: nn.Module) -> bool:
    """Make of each quantized weight what `ao_lab.tensor.metadata.for_products` says; whether any is another one now.

    One after the other, in every place that has it. Tables that are looked up in stay, tied ones
    too, as do weights of layers that train.
    """
    places = _products(model)
    # Weights are asked about together, so that the host waits for a GPU once, and are held one at a time.
    wanted = read_preshuffled([each[0][0]._parameters[each[0][1]] for each in places])
    for each in compress(places, wanted):
        weight: Any = each[0][0]._parameters[each[0][1]]
        parameter = nn.Parameter(weight.rearranged(PRESHUFFLED), requires_grad=False)
        for module, name in each:
            module._parameters[name] = parameter
    return any(wanted)


def _products(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """The places of each quantized weight that modules multiply by and none looks up in or trains."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        parameters: dict[str, Any] = module._parameters
        for name, parameter in parameters.items():
            if type(parameter) is QuantizedTensor:
                places.setdefault(id(parameter), []).append((module, name))
    return [
        each
        for each in places.values()
        if not any(isinstance(module, TABLES) or is_in_training(module) for module, _ in each)
    ]


class StreamedWeights:
    """A plan that was made of shapes, and the quantized weight of each dense one that arrives, one after the other."""

    def __init__(
        self,
        plan: QuantizationPlan,
        observers: Mapping[str, Observer],
        device: Device,
        progress: Progress | None,
    ) -> None:
        self.plan, self.observers, self.device, self.progress = plan, observers, device, progress
        self.changes = {name: change for change in plan.changes.values() for name in change.places}
        self.done, self.total = 0, len(plan.changes)
        #: Layers that share an outer scale, and what has arrived of those whose others have not.
        self.groups = {
            name: [one.name for one in group] for name, group in joined(plan.changes.values()).items()
        }
        self.waiting: dict[str, torch.Tensor] = {}

    def arrived(self, name: str, dense: torch.Tensor) -> dict[str, nn.Parameter]:
        """The quantized weights that can be made with this one: itself, or nothing, or all that it shares a scale with."""
        group = self.groups.get(name)
        if group is None:
            return {name: self.parameter(name, dense)}
        # What comes from a file may be a view of it.
        self.waiting[name] = dense.clone() if dense.device.type == "cpu" else dense
        if not all(one in self.waiting for one in group):
            return {}
        weights = {one: self.waiting.pop(one) for one in group}
        outer = largest(weights.values(), self.changes[name].recipe.weight)
        return {one: self.parameter(one, weight, outer) for one, weight in weights.items()}

    def go_on(self, plan: QuantizationPlan) -> None:
        """With the changes of another plan, which are the last."""
        self.changes = {name: change for change in plan.changes.values() for name in change.places}
        self.total = self.done + len(plan.changes)

    def parameter(self, name: str, dense: torch.Tensor, outer: torch.Tensor | None = None) -> nn.Parameter:
        """The quantized weight of a parameter that the plan changes. outer: what it shares with others."""
        change: Change = self.changes[name]
        weight = quantize_parameter(change, dense, self.device, self.observers, outer)
        self.done += 1
        if self.progress is not None:
            self.progress(name, self.done, self.total)
        return weight


def calibrate(
    model: nn.Module,
    config: Config | FqnToConfig,
    forward_loop: ForwardLoop,
    filter_fn: Filter | None = None,
) -> dict[str, Observer]:
    """Run `forward_loop(model)` and return the observers of each layer that needs them, by the weight's full name.

    The model is unchanged afterwards, also after an exception. Pass the result to `quantize_(model, config, filter_fn,
    observers=...)`. The loop decides about gradients, train or eval mode and the number of samples. ValueError if no layer
    needs an observer, TypeError for a forward_loop that is not a function (batches, for instance).
    """
    return calibrated(planned(model, config, filter_fn, watching=True), model, forward_loop)


def calibrated(plan: QuantizationPlan, model: nn.Module, forward_loop: ForwardLoop) -> dict[str, Observer]:
    """`calibrate` of a plan; TypeError, before data runs, for batches where their function belongs."""
    if not callable(forward_loop):
        raise TypeError(
            f"forward_loop is a function that is given the model and runs data through it, got {type(forward_loop).__name__}; "
            "write lambda model: [model(batch) for batch in batches]"
        )
    observers = fresh_observers(plan.changes.values())
    if not observers:
        raise ValueError("forward_loop: this configuration needs no calibration; leave it out")
    observe(watched(plan, observers), lambda: forward_loop(model))
    return observers


def fresh_observers(changes: Iterable[Change]) -> dict[str, Observer]:
    """A new observer for each weight that needs one, under the full names of all its places."""
    result: dict[str, Observer] = {}
    for change in changes:
        observer = change.config.observer() if change.layers else None
        if observer is None:
            continue
        if change.parameter.dim() != 2:
            raise ValueError(
                f"{', '.join(change.places)}: the inputs of batched experts are made inside their module, where they cannot be "
                f"watched; leave them out, or give them a configuration that finds its scales for each input"
            )
        result.update(dict.fromkeys(change.layers, observer))
    return result


def watched(plan: QuantizationPlan, observers: Observers) -> list[Watched]:
    """The layers of a plan that have an observer, and the observer."""
    return [
        (name, module, observers[name])
        for change in plan.changes.values()
        for name, module in change.layers.items()
        if name in observers
    ]


def prepare(change: Change) -> None:
    """Step "prepare": watch the layers of a weight until step "convert" takes the watches away; an earlier one is replaced."""
    for name, observer in fresh_observers([change]).items():
        module = change.layers[name]
        unwatch(module)
        watch(name, module, observer)


def prepared(change: Change) -> dict[str, Observer]:
    """The observers that `prepare` has put before the layers of a weight."""
    return {name: found[0].observer for name, module in change.layers.items() if (found := watches(module))}


def required_observers(
    plan: QuantizationPlan, given: Mapping[str, Observer] | None = None
) -> Mapping[str, Observer]:
    """The observer of each weight that needs one: of those given, or of those that step "prepare" has left with the model.

    By the full names of its layers; ValueError where one is missing, or has not seen enough.
    """
    waiting = [c for c in plan.changes.values() if c.layers and c.config.observer() is not None]
    known = given or {name: watch for change in waiting for name, watch in prepared(change).items()}
    missing = [name for change in waiting for name in change.layers if name not in known]
    if missing:
        raise ValueError(
            f"{shorten(missing)} needs calibration: give act_quant_scale, or forward_loop=, a function that runs data through "
            f"the model, or call quantize_ with step='prepare', run data, and call it again with step='convert'"
        )
    needed = {name: known[name] for change in waiting for name in change.layers}
    _check_seen(needed)
    return needed


def _check_seen(observers: Mapping[str, Observer]) -> None:
    """ValueError where an observer cannot make a weight yet."""
    reasons: dict[str, list[str]] = {}
    for name, observer in observers.items():
        if (reason := observer.unsupported_reason()) is not None:
            reasons.setdefault(reason, []).append(name)
    if reasons:
        told = "; ".join(f"{reason} by {shorten(names)}" for reason, names in reasons.items())
        raise ValueError(
            f"calibration: {told}. Nothing was changed. Run data that reaches these layers (by calling the modules, and "
            f"outside of compiled programs) with the values that they will have, or exclude them with filter_fn"
        )


__all__ = ["calibrate", "quantize_"]
