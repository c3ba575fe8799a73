"""A model as it was, after a step on a sample: what a forward and a backward leave in it is put back.

Buffers and tensors that modules hold (running statistics, codebooks of moving averages, caches), their other plain values,
lists and dictionaries, whether they train, gradients, and the states of random generators. Parameters are not copied, which
would take a model's memory again: a step that writes to one is told of.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

#: Attributes that every module has, hooks among them.
OF_MODULES = frozenset(vars(nn.Module()))
PLAIN = (int, float, str, bytes, bool, type(None))
Undo = Callable[[], None]


@contextmanager
def untouched(model: nn.Module, given: Any = None) -> Iterator[None]:
    """Everything of a model that the module text names, of tensors among `given`, and of generators, as before afterwards.

    A UserWarning names parameters that were written to.
    """
    undo: list[Undo] = [
        *_gradients(model, given),
        *(one for module in model.modules() for one in _module(module)),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),  # noqa: NPY002  (the state that others draw from)
    ]
    versions = {name: _version(parameter) for name, parameter in model.named_parameters()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for one in undo:
                one()
        _tell_of_written(model, versions)


def _gradients(model: nn.Module, given: Any) -> Iterator[Undo]:
    """Take gradients away, and what optimizers do while these come into being."""
    for parameter in model.parameters():
        yield partial(setattr, parameter, "grad", parameter.grad)
        parameter.grad = None
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            yield partial(hooks.update, dict(hooks))
            hooks.clear()
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, tuple) else [given]
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_leaf and value.requires_grad:
            yield partial(setattr, value, "grad", value.grad)


def _module(module: nn.Module) -> Iterator[Undo]:
    """Of one module, without those inside it. What modules of torch itself hold but tensors is torch's affair."""
    yield partial(setattr, module, "training", module.training)
    yield from _entries(module._buffers, only_tensors=False)
    of_torch = type(module).__module__.partition(".")[0] == "torch"
    yield from _entries(vars(module), only_tensors=of_torch)


def _entries(holder: dict[str, Any], *, only_tensors: bool) -> Iterator[Undo]:
    """The values of a module's dictionary, and that others are gone."""
    kept = {
        key: value for key, value in holder.items() if key not in OF_MODULES and _is_kept(value, only_tensors)
    }
    for value in kept.values():
        yield from _content(value)
    yield partial(_put_back, holder, kept, set(holder), only_tensors)


def _is_kept(value: Any, only_tensors: bool) -> bool:
    if isinstance(value, (torch.Tensor, type(None))):
        return True
    return not only_tensors and isinstance(value, (*PLAIN, list, dict, torch.Generator))


def _put_back(holder: dict[str, Any], kept: dict[str, Any], names: set[str], only_tensors: bool) -> None:
    for key in [key for key in holder if key not in names and _is_kept(holder[key], only_tensors)]:
        del holder[key]
    for key, value in kept.items():
        now = holder.get(key)
        if now is not value and (
            not only_tensors or isinstance(value, torch.Tensor) or isinstance(now, torch.Tensor)
        ):
            holder[key] = value


def _content(value: Any, depth: int = 2) -> Iterator[Undo]:
    """What is inside of a tensor, a generator, a list or a dictionary."""
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            yield partial(_copy_back, value, value.detach().clone())
    elif isinstance(value, torch.Generator):
        yield partial(_draw_from, value, value.get_state())
    elif isinstance(value, list) and depth:
        yield partial(value.__setitem__, slice(None), list(value))
        for one in value:
            yield from _content(one, depth - 1)
    elif isinstance(value, dict) and depth:
        yield partial(_fill, value, dict(value))
        for one in value.values():
            yield from _content(one, depth - 1)


def _fill(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    if len(value) != len(before) or any(value.get(key, value) is not one for key, one in before.items()):
        value.clear()
        value.update(before)


def _draw_from(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _copy_back(value: torch.Tensor, before: torch.Tensor) -> None:
    """In place, where values differ: operations of torch write to running statistics without counting it."""
    if value.shape != before.shape:
        value.data = before
    elif type(value) is not torch.Tensor or not torch.equal(value, before):
        value.copy_(before)


def _version(value: torch.Tensor) -> int | None:
    return None if value.is_inference() else value._version


def _tell_of_written(model: nn.Module, versions: dict[str, int | None]) -> None:
    now = dict(model.named_parameters())
    written = [
        name for name, version in versions.items() if name not in now or _version(now[name]) != version
    ]
    if written:
        warnings.warn(
            f"the step on sample_input wrote to {len(written)} parameters, which tune does not put back: "
            f"{', '.join(written[:3])}; hold what a forward writes in buffers, or give a sample_input that updates nothing",
            UserWarning,
            stacklevel=2,
        )


__all__ = ["untouched"]
