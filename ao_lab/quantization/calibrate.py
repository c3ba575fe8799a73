"""Calibration of a model: observers that see the inputs of layers while data runs through it.

Two ways, which give the same scales. `quantize_(model, config, forward_loop=...)` (or `calibrate` and then `quantize_(...,
observers=...)`) watches layers while `forward_loop(model)` runs, and never longer, whatever it raises. With torchao's steps
the caller runs the data between two calls: `quantize_` with step="prepare", any forwards, `quantize_` with step="convert";
between them each layer has a `Watch` among its forward hooks, and nothing else of the model is changed.

Which observer a weight needs is what its configuration says (`Config.observer`); `ao_lab.calibration` has the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from ao_lab.config.base import Config, FqnToConfig, Observer
from ao_lab.quantization.plan import Change, QuantizationPlan, planned
from ao_lab.transforms.data import Watched, observe, unwatch, watch, watches
from ao_lab.transforms.layers import shorten
from ao_lab.transforms.select import Filter

ForwardLoop = Callable[[nn.Module], Any]
Observers = Mapping[str, Observer]


def calibrate(
    model: nn.Module,
    config: Config | FqnToConfig,
    forward_loop: ForwardLoop,
    filter_fn: Filter | None = None,
) -> dict[str, Observer]:
    """Run `forward_loop(model)` and return what watched each layer that needs it, by the weight's full name.

    The model is as before, also after an exception. `quantize_(model, config, filter_fn, observers=...)` takes the result.
    Gradients, train or eval mode and the number of samples are the loop's affair. ValueError where nothing needs to be watched,
    TypeError for a forward_loop that is no function (batches, for instance).
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
            f"outside of compiled programs) with the values that they will have, or leave them out by filter_fn"
        )


__all__ = ["calibrate"]
