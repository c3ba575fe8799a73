"""Batches of calibration as calls of a model: their arguments, the input among these, and what is said of one that fails."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

#: Values of a batch that an error describes.
MOST_TOLD = 8

Call = tuple[tuple[Any, ...], dict[str, Any]]


def calls_of(calibration: Iterable[Any]) -> Iterator[Call]:
    """The arguments of a call for each batch."""
    if isinstance(calibration, (torch.Tensor, Mapping, str)) or not isinstance(calibration, Iterable):
        raise TypeError(
            f"calibration is an iterable of batches, such as a list or a DataLoader, got {type(calibration).__name__}; put a "
            f"single batch into a list"
        )
    for batch in calibration:
        if isinstance(batch, torch.Tensor):
            yield (batch,), {}
        elif isinstance(batch, Mapping):
            yield (), dict(batch)
        elif isinstance(batch, (tuple, list)):
            yield tuple(batch), {}
        else:
            raise TypeError(
                f"a batch of calibration is a tensor, a tuple of arguments or a mapping of keywords, got {type(batch).__name__}"
            )


def described(value: Any) -> str:
    """Dtypes and shapes of a batch, or of one of its values."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{where}"
    if not isinstance(value, (Mapping, tuple, list)):
        return type(value).__name__
    values = list(value.items()) if isinstance(value, Mapping) else [("", one) for one in value]
    told = [(f"{key}: " if key else "") + described(one) for key, one in values[:MOST_TOLD]]
    return ", ".join([*told, *(["..."] if len(values) > MOST_TOLD else [])])


def taken(model: nn.Module) -> str:
    """What a model takes, as far as it says: arguments of its forward, dtype and device of its weights."""
    try:
        arguments = ", ".join(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # a forward that is no Python function
        arguments = "..."
    weights = {f"{str(p.dtype).removeprefix('torch.')} on {p.device}" for p in model.parameters()}
    return f"{type(model).__name__} takes ({arguments}), its weights are {' and '.join(sorted(weights)) or 'none'}"


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> torch.Tensor:
    """The first tensor among the arguments."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise ValueError(f"{name or 'the model'} was called without a tensor; batches hold tensors")


def first_tensor(output: Any, name: str) -> torch.Tensor:
    """What a block hands on: its output, or the first of several."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, torch.Tensor):
        raise ValueError(
            f"{name} returns {type(output).__name__}; a walk needs a tensor, or a tuple with one in front"
        )
    return first


__all__ = ["Call", "calls_of", "described", "first_tensor", "input_of", "taken"]
