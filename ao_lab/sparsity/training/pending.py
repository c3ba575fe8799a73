"""Steps of optimizers that `step_sparsity_` has not been told of.

A hook of torch's that runs before the step of every optimizer, of eager and compiled models and under FSDP2 alike: a weight
whose last step was not counted is not stepped again. That is an error before the optimizer changes anything. What writes to
weights without a `torch.optim.Optimizer`, or in a compiled `optimizer.step`, is not seen.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ao_lab.sparsity.training.counts import counted_in_graph

#: Of a layer: whether an optimizer has stepped its weight since its steps were last counted.
PENDING = "sparse_pending"
_watched: WeakSet[nn.Module] = WeakSet()
_hooks: list[Any] = []


def watch(layer: nn.Module) -> None:
    """Look at a layer's weight from now on; the hook is set with the first one."""
    settle(layer)
    _watched.add(layer)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def settle(layer: nn.Module) -> None:
    """The layer's steps have been counted."""
    setattr(layer, PENDING, False)


def forget(layer: nn.Module) -> None:
    """Look at the layer no more."""
    _watched.discard(layer)
    layer.__dict__.pop(PENDING, None)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """RuntimeError where a weight that is about to be stepped has a step that was not counted."""
    if torch.compiler.is_compiling() or not _watched:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    # Of layers whose steps a CUDA graph counts, replays say nothing here.
    layers = [
        layer
        for layer in _watched
        if id(layer.weight) in held and _has_gradient(layer) and not counted_in_graph(layer.sparse_step)  # type: ignore[arg-type]
    ]
    if any(getattr(layer, PENDING) for layer in layers):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called twice without ao_lab.step_sparsity_(model), so that masks of sparse "
            f"layers would be old and pruned weights move; call it after each optimizer.step()"
        )
    for layer in layers:
        setattr(layer, PENDING, True)


def _has_gradient(layer: nn.Module) -> bool:
    weight: Any = layer.weight
    return weight.grad is not None


__all__ = ["PENDING", "forget", "settle", "watch"]
