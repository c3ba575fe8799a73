"""Calls like ones that were made before, with all their checks behind them.

A key says everything that the checks and the plan of a call depend on: the record, the arguments that are no tensors with
their types, and of each tensor its dtype, shape and device. What is left to see is where the tensors lie, which
`kernels.replay` does. Whatever is unusual (tensors that are not contiguous or not aligned, subclasses, arguments that are no
plain values) finds nothing here and goes the ordinary way; so does everything that a compiler traces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch

from fast.device import PLAIN
from reference import Quantized, Scales

#: For each key what launches, what makes the result of the launched tensors, and an object whose id the key may have.
READY: dict[Any, tuple[Callable[..., Any], Callable[[list[Any]], Any], Any]] = {}
# A program that sees ever new shapes starts afresh now and then.
MOST = 4096
PARTS = ("scale", "outer", "zero")
TENSORS = ("codes", *PARTS)
# Arguments of these types are what they are equal to, and stay so.
VALUES = frozenset((str, int, float, bool, tuple, torch.dtype, type(None)))
#: All else that a `Quantized` says, except for its scheme.
settings = attrgetter(*(f.name for f in fields(Quantized) if f.name not in (*TENSORS, "scheme")))
_compiling = torch.compiler.is_compiling


def call(name: str, record: Any, values: tuple[Any, ...], *tensors: Any) -> tuple[Any, Any]:
    """The key of a call, and what it gives; None for a key that cannot be, and for a result that is not known.

    record: a scheme or format, by name or itself. Kernels get the tensors in this order, see `replay.remember`.
    """
    if _compiling():
        return None, None
    # A record is its id, as long as it is kept: hashing one reads all its fields.
    key = (
        name,
        record if record.__class__ is str else id(record),
        values,
        *map(type, values),
        *map(part, tensors),
    )
    try:
        found = READY.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None, None
    if found is None:
        return key, None
    replay, finish, _ = found
    made = replay(*tensors)
    return key, None if made is None else finish(made)


def part(tensor: Any) -> Any:
    """A tensor as keys have it; an object that no other key has where it is not an ordinary tensor."""
    if tensor.__class__ in PLAIN:
        return tensor.dtype, tensor.shape, tensor.device
    return None if tensor is None else object()


def parts_of(scales: Any) -> tuple[Any, Any, Any]:
    """Scale, outer scale and zero point of scales as callers give them."""
    return (scales.scale, scales.outer, scales.zero) if isinstance(scales, Scales) else (scales, None, None)


def inputs(x: Any, scales: Any, words: Any) -> tuple[Any, ...]:
    """The tensors of a call: fewer where neither scales nor random words are given."""
    return (x,) if scales is None and words is None else (x, *parts_of(scales), words)


def is_new(key: Any) -> bool:
    """Whether a call with this key could be remembered, and is not."""
    return key is not None and key not in READY and all(type(value) in VALUES for value in key[2])


def remember(key: Any, replay: Any, finish: Callable[[list[Any]], Any], kept: Any) -> None:
    """Answer calls with this key by a replay."""
    if len(READY) >= MOST:
        READY.clear()
    READY[key] = (replay, finish, kept)


def like(
    q: Quantized, names: Sequence[str], renamed: Mapping[str, str] | None = None
) -> Callable[[list[Any]], Quantized]:
    """What makes a `Quantized` like q, out of tensors of these names; renamed: a part and the name of its tensor."""
    values = {**vars(q), **dict.fromkeys(TENSORS)}
    named = {name: name for name in TENSORS if getattr(q, name) is not None} | dict(renamed or {})
    places = [(name, names.index(tensor)) for name, tensor in named.items()]

    def finish(made: list[Any]) -> Quantized:
        result = Quantized.from_fields(values)
        kept = result.__dict__
        for name, at in places:
            kept[name] = made[at]
        return result

    return finish
