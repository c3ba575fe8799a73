"""Examples of inputs from which a program of dynamic shapes can be made.

torch.export takes an axis of size 1 for one that is broadcast: a program that was asked to have any size along it computes
wrongly, or fails, with another one (torch 2.13, a language model with one text as its example). Such an axis is
repeated to 2. The values of an example decide nothing but what the model asks of them itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ao_lab.transforms.plan import noting


class Example(NamedTuple):
    """The inputs of one call, and along which axes of them the caller's were repeated."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    repeated: tuple[str, ...] = ()

    @contextmanager
    def named(self) -> Iterator[None]:
        """An error inside says what was repeated, and the way out."""
        if not self.repeated:
            yield
            return
        told = (
            f"the example has size 1 along axes that dynamic_shapes names, where it was repeated to 2: "
            f"{', '.join(self.repeated)}. Give an example of size 2 or more there, or leave the axis out of dynamic_shapes"
        )
        with noting(lambda: told):
            yield


def example_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> Example:
    """The caller's inputs, tensors that have size 1 along a dynamic axis repeated there; as they are where none has.

    dynamic_shapes: as for `torch.export.export`, by the names of the inputs of `model.forward`, or in their order.
    """
    if dynamic_shapes is None:
        return Example(tuple(args), dict(kwargs))
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    names = list(bound.arguments)
    by_name = isinstance(dynamic_shapes, Mapping)
    shapes = dynamic_shapes if by_name else dict(zip(names, dynamic_shapes, strict=False))
    told: list[str] = []
    for name in names:
        bound.arguments[name] = _repeated(bound.arguments[name], shapes.get(name), name, told.append)
    return Example(bound.args, bound.kwargs, tuple(told)) if told else Example(tuple(args), dict(kwargs))


def _repeated(value: Any, shape: Any, where: str, tell: Callable[[str], None]) -> Any:
    """An input, or a tuple, list or dict of some, by what dynamic_shapes says of it; what does not fit stays for torch's
    errors."""
    if isinstance(value, torch.Tensor):
        for axis in _dynamic_axes(shape):
            if 0 <= axis < value.dim() and value.shape[axis] == 1:
                value = torch.cat([value, value], axis)
                tell(f"{where}, axis {axis}")
        return value
    if type(value) is dict and isinstance(shape, Mapping):
        return {key: _repeated(one, shape.get(key), f"{where}[{key!r}]", tell) for key, one in value.items()}
    if type(value) in (list, tuple) and isinstance(shape, list | tuple) and len(value) == len(shape):
        pairs = enumerate(zip(value, shape, strict=True))
        return type(value)(_repeated(one, part, f"{where}[{i}]", tell) for i, (one, part) in pairs)
    return value


def _dynamic_axes(shape: Any) -> list[int]:
    """The axes that what is said of a tensor leaves open."""
    sizes = (
        shape
        if isinstance(shape, Mapping)
        else dict(enumerate(shape))
        if isinstance(shape, list | tuple)
        else {}
    )
    fixed = (None, torch.export.Dim.STATIC)
    return [axis for axis, size in sizes.items() if not (isinstance(size, int) or size in fixed)]


__all__ = ["Example", "example_of"]
