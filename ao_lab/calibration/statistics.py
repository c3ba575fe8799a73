"""What methods of calibration keep of a layer's inputs: sums of squares by channel, or the Hessian. Never the inputs.

Both take a layer's calls in their order, one update each, so how a calibration set is cut into batches is part of the result.

`Statistics` keeps one for every layer of a block, and layers with the same input (queries, keys and values; gate and up) share
one: a Hessian is 64 MiB at 4096 channels in float32, twice that in float64, which is what sums are kept in here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from fast.quantize.least_error import tree_sum

#: Tokens of one piece, a power of two: a subtree of the sum of all, so that pieces change no bit.
PIECE = 4096


class Statistic(Protocol):
    """Running sums over the inputs of one or more layers."""

    def update(self, x: torch.Tensor) -> None:
        """Take in an input, (..., channels)."""

    def is_usable(self) -> bool:
        """Whether all sums are finite, and within float32."""


@dataclass
class SquareSums:
    """`reference.square_sums` of all inputs, bit for bit, in float32 operations of torch on the inputs' device."""

    value: torch.Tensor | None = None

    def update(self, x: torch.Tensor) -> None:
        """Add the squares of one call."""
        total = square_sums(x)
        self.value = total if self.value is None else self.value + total.to(self.value.device)

    def is_usable(self) -> bool:
        """None overflowed."""
        return self.value is None or bool(self.value.isfinite().all())


@dataclass
class Hessian:
    """The sum of x x^T over all tokens, (channels, channels) in float64: no TF32, no order that matters to a float32."""

    value: torch.Tensor | None = None

    def update(self, x: torch.Tensor) -> None:
        """Add the products of one call."""
        channels = x.shape[-1]
        if self.value is None:
            self.value = torch.zeros(channels, channels, dtype=torch.float64, device=x.device)
        for piece in torch.split(x.reshape(-1, channels), PIECE):
            wide = piece.to(self.value.device, torch.float64)
            self.value.addmm_(wide.mT, wide)

    def is_usable(self) -> bool:
        """By the diagonal, which holds the largest of such a sum, and NaN of every channel that has any."""
        return self.value is None or bool((self.value.diagonal() <= torch.finfo(torch.float32).max).all())


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """`reference.square_sums(x)` by torch's float32 operations, which round as it does."""
    rows = x.reshape(-1, x.shape[-1])
    sums = [tree_sum(piece.to(torch.float32).square(), 0) for piece in torch.split(rows, PIECE)]
    return tree_sum(torch.stack(sums), 0)


class Seen:
    """A tensor as it was: held, so that no other takes its place in memory, with a count of what was written to it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.tensor, self.place = x, place_of(x)

    def is_still(self, x: torch.Tensor) -> bool:
        """Whether x is a view of the same values, and nothing has written to them since."""
        return self.place is not None and place_of(x) == self.place


def place_of(x: torch.Tensor) -> tuple[Any, ...] | None:
    """Memory, shape and version; None of inference tensors, which count no writes."""
    if x.is_inference():
        return None
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x.device, x._version


@dataclass
class Shared:
    """A statistic, the layers that share it by name with the calls of each, and the input of the last update."""

    statistic: Statistic
    calls: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    tokens: int = 0
    last: Seen | None = None


@dataclass
class Statistics:
    """A statistic of each layer's inputs. An observer for `ao_lab.transforms.hooks.watching`, the same for all layers.

    A layer whose first input is the very tensor that another layer's statistic has just taken in, as its first, shares it from
    then on. Where such a layer later sees something else, that is an error: their sums could not be told apart any more.
    """

    make: Callable[[], Statistic]
    layers: dict[str, Shared] = field(default_factory=dict)
    #: Whose inputs were seen last.
    current: Shared | None = None

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Take in an input of the layer that has this name."""
        if not x.numel():
            return
        if name not in self.layers:
            self.layers[name] = self._first(x)
        shared = self.layers[name]
        calls = shared.calls[name] = shared.calls.get(name, 0) + 1
        if calls == shared.updates and shared.last is not None and shared.last.is_still(x):
            return
        if next(iter(shared.calls)) != name:
            raise ValueError(
                f"{name} had the input of {next(iter(shared.calls))} at first and has another one now, so that they have no "
                f"statistic in common; calibrate them in calls of their own, by filter_fn"
            )
        shared.statistic.update(x)
        shared.updates, shared.tokens = shared.updates + 1, shared.tokens + x.numel() // x.shape[-1]
        shared.last, self.current = Seen(x), shared

    def _first(self, x: torch.Tensor) -> Shared:
        """The statistic of a layer that is seen for the first time, with this input."""
        shared = self.current
        if shared is not None and shared.updates == 1 and shared.last is not None and shared.last.is_still(x):
            return shared
        return Shared(self.make())

    def unusable(self) -> list[str]:
        """Names of layers whose statistic holds NaN, or more than float32 does."""
        distinct = {id(shared): shared for shared in self.layers.values()}.values()
        return [name for shared in distinct if not shared.statistic.is_usable() for name in shared.calls]

    def forget_inputs(self) -> None:
        """Let go of the last inputs, after data has run."""
        for shared in self.layers.values():
            shared.last = None
        self.current = None


__all__ = ["Hessian", "Seen", "Shared", "SquareSums", "Statistic", "Statistics", "place_of", "square_sums"]
