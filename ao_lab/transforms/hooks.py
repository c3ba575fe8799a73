"""Forward hooks that show the inputs of layers to observers while data runs through a model.

Watched are calls of the layer's module. Where a model multiplies with a layer's weight without calling the module, or runs a
program compiled before, nothing is seen; that is an error at the end, by the layer's name. Weights that layers share have one
observer, which sees the inputs of all. Inside autocast the input is seen as the product takes it, cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


class Observes(Protocol):
    """What a hook shows inputs to: an `Observer`, or a statistic that makes no weight itself."""

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Take in the input of a layer, as its product sees it."""


@dataclass
class Watch:
    """A forward hook that shows a layer's input to an observer."""

    name: str
    observer: Any

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


@contextmanager
def watching(layers: Iterable[tuple[str, nn.Module, Observes]]) -> Iterator[None]:
    """Observers see the inputs of their layers inside."""
    handles: list[Any] = []
    try:
        for name, module, observer in layers:
            handles.append(watch(name, module, observer))
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch(name: str, module: nn.Module, observer: Observes) -> Any:
    """Show a module's inputs to an observer from now on; the handle removes it."""
    return module.register_forward_pre_hook(Watch(name, observer), with_kwargs=True)


def watches(module: nn.Module) -> list[Watch]:
    """The watches among a module's hooks."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Watch)]


def unwatch(module: nn.Module) -> None:
    """Take the watches off a module."""
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, Watch):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)


__all__ = ["Observes", "Watch", "unwatch", "watch", "watches", "watching"]
