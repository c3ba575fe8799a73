"""Calibration: observers that see the inputs of layers while data runs through the model.

Two ways, which give the same scales. `quantize_(model, config, forward_loop=...)` (or `calibrate` and then `quantize_(...,
observers=...)`) watches layers while `forward_loop(model)` runs, and never longer, whatever it raises. With torchao's steps
the caller runs the data between two calls: `quantize_` with step="prepare", any forwards, `quantize_` with step="convert";
between them each layer has a `Watch` among its forward hooks, and nothing else of the model is changed.

Watched are calls of the layer's module. Where a model multiplies with a layer's weight without calling the module, or runs a
program compiled before, nothing is seen; that is an error at the end, by the layer's name. Weights that layers share have one
observer, which sees the inputs of all. Inside autocast the input is seen as the product takes it, cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ao_lab.calibration.observers import Observer
from ao_lab.config.base import Config
from ao_lab.config.fqn import FqnToConfig
from ao_lab.quantization.plan import Change, Filter, Plan, planned

ForwardLoop = Callable[[nn.Module], Any]
Observers = Mapping[str, Observer]


@dataclass
class Watch:
    """A forward hook that shows a layer's input to an observer."""

    name: str
    observer: Observer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the module runs."""
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, torch.Tensor):
            self.observer.observe(self.name, module, as_multiplied(x))


def as_multiplied(x: torch.Tensor) -> torch.Tensor:
    """An input as the product takes it: inside autocast in the dtype of the moment."""
    kind = x.device.type
    cast = torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.detach().to(torch.get_autocast_dtype(kind)) if cast else x.detach()


def calibrate(
    model: nn.Module,
    config: Config | FqnToConfig,
    forward_loop: ForwardLoop,
    filter_fn: Filter | None = None,
) -> dict[str, Observer]:
    """Run `forward_loop(model)` and return what watched each layer that needs it, by the weight's full name.

    The model is as before, also after an exception. `quantize_(model, config, filter_fn, observers=...)` takes the result.
    Gradients, train or eval mode and the number of samples are the loop's affair. ValueError where nothing needs to be watched.
    """
    return calibrated(planned(model, config, filter_fn), model, forward_loop)


def calibrated(plan: Plan, model: nn.Module, forward_loop: ForwardLoop) -> dict[str, Observer]:
    """`calibrate` of a plan."""
    observers = fresh_observers(plan.changes.values())
    if not observers:
        raise ValueError("forward_loop: this configuration needs no calibration; leave it out")
    with watching(plan, observers):
        forward_loop(model)
    return observers


def fresh_observers(changes: Any) -> dict[str, Observer]:
    """A new observer for each weight that needs one, under the full names of all its places."""
    made: dict[str, Observer] = {}
    for change in changes:
        observer = change.config.observer() if change.layers else None
        if observer is None:
            continue
        if change.parameter.dim() != 2:
            raise ValueError(
                f"{', '.join(change.places)}: the inputs of batched experts are made inside their module, where they cannot be "
                f"watched; leave them out, or give them a configuration that finds its scales for each input"
            )
        made.update(dict.fromkeys(change.layers, observer))
    return made


@contextmanager
def watching(plan: Plan, observers: Observers) -> Iterator[None]:
    """Observers see the inputs of their layers inside."""
    handles: list[Any] = []
    try:
        for change in plan.changes.values():
            handles += [watch(name, module, observers[name]) for name, module in watched(change, observers)]
        yield
    finally:
        for handle in handles:
            handle.remove()


def watched(change: Change, observers: Observers) -> list[tuple[str, nn.Module]]:
    """The layers of a weight that have an observer."""
    return [(name, module) for name, module in change.layers.items() if name in observers]


def watch(name: str, module: nn.Module, observer: Observer) -> Any:
    """Show a module's inputs to an observer from now on; the handle removes it."""
    return module.register_forward_pre_hook(Watch(name, observer), with_kwargs=True)


def prepare(change: Change) -> None:
    """Step "prepare": watch the layers of a weight until step "convert" takes the watches away; an earlier one is replaced."""
    for name, observer in fresh_observers([change]).items():
        module = change.layers[name]
        unwatch(module)
        watch(name, module, observer)


def prepared(change: Change) -> dict[str, Observer]:
    """The observers that `prepare` has put before the layers of a weight."""
    return {name: found[0].observer for name, module in change.layers.items() if (found := watches(module))}


def watches(module: nn.Module) -> list[Watch]:
    """The watches among a module's hooks."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Watch)]


def unwatch(module: nn.Module) -> None:
    """Take the watches off a module."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Watch):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


__all__ = ["Watch", "calibrate", "calibrated", "fresh_observers", "prepare", "prepared", "unwatch"]
