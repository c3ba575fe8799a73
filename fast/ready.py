"""Calls like ones that were made before, with all their checks behind them.

A key says everything that the checks and the plan of a call depend on: the scheme, and of each tensor its dtype, shape and
device. What is left to see is where the tensors lie, which `kernels.replay` does. Whatever is unusual (tensors that are not
contiguous or not aligned, subclasses, arguments that are no plain values) finds nothing here and goes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch

from fast.device import PLAIN
from reference import Quantized, Scales, Scheme

#: For each key what launches, what makes the result of the launched tensors, and an object whose id the key may have.
READY: dict[Any, tuple[Callable[..., Any], Callable[[list[Any]], Any], Any]] = {}
# A program that sees ever new shapes starts afresh now and then.
MOST = 4096
PARTS = ("scale", "outer", "zero")
TENSORS = ("codes", *PARTS)
# All else that a `Quantized` says, except for its scheme.
_settings = attrgetter(*(f.name for f in fields(Quantized) if f.name not in (*TENSORS, "scheme")))


def answer(key: Any, *tensors: torch.Tensor | None) -> Any:
    """What the call with this key gives for these tensors, or None where it has to go the ordinary way."""
    try:
        found = READY.get(key)
    except TypeError:  # an argument that cannot be hashed
        return None
    if found is None:
        return None
    replay, finish, _ = found
    made = replay(*tensors)
    return None if made is None else finish(made)


def is_new(key: Any) -> bool:
    """Whether a call with this key could be remembered, and is not."""
    try:
        return key not in READY
    except TypeError:
        return False


def remember(key: Any, replay: Any, finish: Callable[[list[Any]], Any], kept: Any) -> None:
    """Answer calls with this key by a replay."""
    if len(READY) >= MOST:
        READY.clear()
    READY[key] = (replay, finish, kept)


def named(scheme: Any) -> Any:
    """A name, or a number that is the record's as long as the record is kept: hashing a record reads all its fields."""
    return scheme if scheme.__class__ is str else id(scheme)


def part(tensor: Any) -> Any:
    """A tensor as keys have it; an object that no other key has where it is not an ordinary tensor."""
    if tensor is None:
        return None
    return (tensor.dtype, tensor.shape, tensor.device) if tensor.__class__ in PLAIN else object()


def parts_of(scales: Any) -> tuple[Any, Any, Any]:
    """Scale, outer scale and zero point of scales as callers give them."""
    return (scales.scale, scales.outer, scales.zero) if isinstance(scales, Scales) else (scales, None, None)


def quantize_key(
    x: torch.Tensor, scheme: str | Scheme, axis: int, scales: Any, packed: bool, tiled: bool = False
) -> Any:
    """The key of `quantize`; axis with its type, since True is no axis."""
    key = ("quantize", named(scheme), x.dtype, x.shape, x.device, axis, axis.__class__, packed, tiled)
    return key if scales is None else (*key, *map(part, parts_of(scales)))


def quantized(
    x: torch.Tensor, scheme: str | Scheme, axis: int, scales: Any, packed: bool, tiled: bool = False
) -> Any:
    """`quantize` of tensors like ones seen before, or None."""
    key = quantize_key(x, scheme, axis, scales, packed, tiled)
    return answer(key, x) if scales is None else answer(key, x, *parts_of(scales))


def like(q: Quantized, names: Sequence[str]) -> Callable[[list[Any]], Quantized]:
    """What makes a `Quantized` like q, out of tensors of these names."""
    values = {**vars(q), **dict.fromkeys(TENSORS)}
    places = [(name, names.index(name)) for name in TENSORS if getattr(q, name) is not None]

    def finish(made: list[Any]) -> Quantized:
        return Quantized.of(values, {name: made[at] for name, at in places})

    return finish


def dequantize_key(q: Quantized, dtype: Any) -> Any:
    """The key of `dequantize`."""
    parts = (part(q.codes), part(q.scale), part(q.outer), part(q.zero))
    return ("dequantize", id(q.scheme), dtype, _settings(q), q.axis.__class__, parts)


def dequantized(q: Quantized, dtype: Any) -> Any:
    """`dequantize` of tensors like ones seen before, or None."""
    return answer(dequantize_key(q, dtype), q.codes, q.scale, q.outer, q.zero)


def fake_key(x: torch.Tensor, scheme: str | Scheme, axis: int) -> Any:
    """The key of `fake_quantize`, with scales from x."""
    return ("fake", named(scheme), part(x), axis, axis.__class__)


def faked(x: torch.Tensor, scheme: str | Scheme, axis: int) -> Any:
    """`fake_quantize` of a tensor like one seen before, or None."""
    return answer(fake_key(x, scheme, axis), x)


def gradient_key(g: torch.Tensor, x: torch.Tensor, scheme: str | Scheme, axis: int) -> Any:
    """The key of `fake_quantize_vjp`, with scales from x."""
    return ("gradient", named(scheme), part(g), part(x), axis, axis.__class__)
