"""The one cache of calls: what a call like one before it needs, found by one key, with all checks behind it.

A key says everything that the checks and the launches of a call depend on: function, record, the plain arguments with their
types, and of every operand its presence, dtype, shape and device (and strides, where kernels read by them). What is left to see
is where the tensors lie, which `call.Call` does. Operands that are no plain tensors have a key of their own and find nothing.
The oldest entry goes first, so that a program which sees ever new shapes pays for each of them, and for no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from fast.device import PLAIN
from reference import Quantized, Scales

#: For each key the call, and the record whose id the key has: as long as it is stored here no other record gets that id.
CALLS: dict[Any, tuple[Callable[..., Any], Any]] = {}
MOST = 4096
PARTS = ("scale", "outer", "zero")
TENSORS = ("codes", *PARTS)
# Arguments of these types are what they are equal to, and stay so.
VALUES = frozenset((str, int, float, bool, tuple, torch.dtype, type(None)))


def key_of(name: str, record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> Any:
    """The key of a call. record: a scheme or format, by name or itself; hashing one would read all its fields."""
    named = record if record.__class__ is str else id(record)
    return (name, named, values, *map(type, values), *map(_operand, operands))


def _operand(tensor: Any) -> Any:
    """A tensor as keys have it; an object that no other key has where it is no plain tensor."""
    if tensor.__class__ in PLAIN:
        return tensor.dtype, tensor.shape, tensor.device
    return None if tensor is None else object()


def find(key: Any) -> Callable[..., Any] | None:
    """The call with this key, or None."""
    try:
        found = CALLS.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None
    return None if found is None else found[0]


def remember(key: Any, call: Callable[..., Any], record: Any) -> None:
    """Answer calls with this key by this one; not where an argument is no plain value."""
    if key is None or not all(type(value) in VALUES for value in key[2]):
        return
    while len(CALLS) >= MOST:
        CALLS.pop(_oldest(), None)
    CALLS[key] = (call, record)


def _oldest() -> Any:
    """The key that was put in first; None where another thread is changing the cache."""
    try:
        return next(iter(CALLS), None)
    except RuntimeError:
        return None


def settings(q: Quantized) -> tuple[Any, ...]:
    """All else that a `Quantized` says, except for its scheme."""
    return q.shape, q.axis, q.packed, q.tiled


def scale_parts(scales: Any) -> tuple[Any, Any, Any]:
    """Scale, outer scale and zero point of scales as callers give them."""
    return (scales.scale, scales.outer, scales.zero) if isinstance(scales, Scales) else (scales, None, None)


def maker(template: Any, places: Mapping[str, int]) -> Callable[[Sequence[Any]], Any]:
    """What makes a result of tensors: the template with the tensor at its place for every name in it.

    template: a name, None, a tuple of templates, or `Scales` or a `Quantized` of names and None.
    """
    if template is None:
        return lambda tensors: None
    if isinstance(template, str):
        return itemgetter(places[template])
    if isinstance(template, Quantized):
        return _quantized_maker(template, places)
    if isinstance(template, Scales):
        parts = maker(scale_parts(template), places)
        return lambda tensors: Scales(*parts(tensors))
    makers = [maker(part, places) for part in template]
    if len(makers) == 2:
        # Most tuples, without the frame of a comprehension.
        first, second = makers
        return lambda tensors: (first(tensors), second(tensors))
    return lambda tensors: tuple([make(tensors) for make in makers])


def _quantized_maker(template: Quantized, places: Mapping[str, int]) -> Callable[[Sequence[Any]], Quantized]:
    """`maker` of a `Quantized`, past the checks of its constructor."""
    values = {**vars(template), **dict.fromkeys(TENSORS)}
    parts = [(part, places[name]) for part in TENSORS if (name := getattr(template, part)) is not None]

    def make(tensors: Sequence[Any]) -> Quantized:
        result = Quantized.from_fields(values)
        stored = result.__dict__
        for part, at in parts:
            stored[part] = tensors[at]
        return result

    return make
