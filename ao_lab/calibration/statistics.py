"""What calibration keeps of a layer's inputs, a few running values: ranges, sums of squares by channel, or the Hessian.

A range (`Statistic`) is what static scales are made of: its `sample` is a small tensor whose scales, by
`reference.choose_scales`, are those to be used. For `MinMax` that is exact: the scales, and zero points, of everything seen,
put together as one tensor.

Sums (`Sums`) are what methods of calibration read. They take a layer's calls in their order, one update each, so how a
calibration set is cut into batches is part of the result. `Statistics` keeps one for every layer of a block, and layers with
the same input (queries, keys and values; gate and up) share one: a Hessian is 64 MiB at 4096 channels in float32, twice that
in float64, which is what sums are kept in here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

import reference
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.transforms.data import Seen
from reference import Scales, Scheme
from reference.calibration.inputs import tree_sum

#: Tokens of one piece, a power of two: a subtree of the sum of all, so that pieces change no bit.
PIECE = 4096


class Statistic(Protocol):
    """Values that are updated while data runs."""

    def update(self, x: torch.Tensor) -> None:
        """Take in a tensor that is not empty."""

    def sample(self) -> torch.Tensor:
        """Values whose range is that of what was seen, on its device; called only after an update."""


@dataclass
class MinMax:
    """The least and the greatest value seen."""

    low: torch.Tensor | None = None
    high: torch.Tensor | None = None

    def update(self, x: torch.Tensor) -> None:
        """Widen the range."""
        low, high = torch.aminmax(x)
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        else:
            self.low = torch.minimum(self.low, low.to(self.low.device))
            self.high = torch.maximum(self.high, high.to(self.high.device))

    def sample(self) -> torch.Tensor:
        """Both ends."""
        return _both(self.low, self.high)


class AbsMax(MinMax):
    """The largest magnitude seen: a range that is the same on both sides of zero, whatever the scheme."""

    def sample(self) -> torch.Tensor:
        """The largest magnitude with both signs."""
        most = super().sample().abs().amax()
        return torch.stack([-most, most])


@dataclass
class MovingAverage:
    """The ends of the range, each moved by `constant` of the way to that of the next tensor (torch.ao's rule), in float32."""

    constant: float = 0.01
    low: torch.Tensor | None = None
    high: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.constant <= 1:
            raise ValueError(f"the constant of a moving average lies in (0, 1], got {self.constant}")

    def update(self, x: torch.Tensor) -> None:
        """Move both ends."""
        low, high = (end.to(torch.float32) for end in torch.aminmax(x))
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        else:
            self.low = self.low + self.constant * (low.to(self.low.device) - self.low)
            self.high = self.high + self.constant * (high.to(self.high.device) - self.high)

    def sample(self) -> torch.Tensor:
        """Both ends."""
        return _both(self.low, self.high)


#: Values of bfloat16 in order: magnitude with sign.
BINS = 65536
#: The place that both zeros share.
MIDDLE = 32768
#: The magnitude of infinity.
INFINITE = 0x7F80


@dataclass
class Percentile:
    """The range that holds `percent` of all values, equally many outside at either end.

    Values are counted as bfloat16 (others are rounded to it): 65,536 counters, exact for bfloat16. Of n values
    floor(n * (100 - percent) / 200) are dropped at each end; the next ones are the range.
    """

    percent: float = 99.99
    counts: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise ValueError(f"a percentile lies in (0, 100], got {self.percent}")

    def update(self, x: torch.Tensor) -> None:
        """Count. Finite values that bfloat16 rounds to infinity are its largest ones."""
        rounded, largest = x.to(torch.bfloat16), torch.finfo(torch.bfloat16).max
        if x.dtype in (torch.float32, torch.float64):
            rounded = torch.where(x.isfinite(), rounded.clamp(-largest, largest), rounded)
        bits = rounded.view(torch.int16).reshape(-1).to(torch.int32)
        magnitude = bits & 0x7FFF
        counts = torch.bincount(torch.where(bits < 0, -magnitude, magnitude) + MIDDLE, minlength=BINS)
        self.counts = counts if self.counts is None else self.counts + counts.to(self.counts.device)

    def sample(self) -> torch.Tensor:
        """Both ends, in bfloat16; NaN where NaN or infinity was seen, however rare."""
        if self.counts is None:
            raise ValueError("nothing was seen")
        running = self.counts.cumsum(0)
        total = int(running[-1])
        dropped = int(total * (100 - self.percent) / 200)
        if bool((self.counts[: MIDDLE - INFINITE + 1].sum() + self.counts[MIDDLE + INFINITE :].sum()) > 0):
            return torch.full((2,), torch.nan, dtype=torch.bfloat16, device=running.device)
        ends = torch.tensor([dropped, total - 1 - dropped], device=running.device)
        ends_of_range = (torch.searchsorted(running, ends, right=True) - MIDDLE).to(torch.int32)
        values = ends_of_range.abs().to(torch.int16).view(torch.bfloat16)
        return torch.where(ends_of_range < 0, -values, values)


#: By the names that configurations take, `ao_lab.calibration.static.NAMES`.
STATISTICS: dict[str, Callable[[], Statistic]] = {
    "minmax": MinMax,
    "absmax": AbsMax,
    "moving_average": MovingAverage,
    "percentile": Percentile,
}


@dataclass
class InputScales:
    """Static scales of a layer's input, for a scheme with one scale for all inputs."""

    scheme: Scheme
    statistic: Statistic = field(default_factory=MinMax)
    #: Tensors seen, without empty ones.
    seen: int = 0
    #: The dtype of the last one: schemes that compute in the input's dtype have scales in it.
    dtype: torch.dtype | None = None

    def observe(self, name: str, module: nn.Module, x: torch.Tensor) -> None:
        """Take in an input."""
        if x.numel():
            self.statistic.update(x.detach())
            self.seen += 1
            self.dtype = x.dtype

    def unsupported_reason(self) -> str | None:
        """No input, NaN or infinity among them, or a range of zero, from which no scale follows."""
        if not self.seen:
            return "no input was seen"
        sample = self.statistic.sample()
        if not bool(sample.isfinite().all()):
            return "NaN or infinity was seen"
        return None if bool(sample.any()) else "no range but that of zeros was seen (their amax is 0)"

    def scales(self) -> Scales:
        """The scale, and zero point, of what was seen."""
        if not self.seen:
            raise ValueError("no input was seen, so that there are no scales; run data through the layer")
        with torch.inference_mode(False):
            sample = self.statistic.sample().cpu().clone()
            sample = sample.to(self.dtype) if self.scheme.scale.compute == "input" else sample
            return reference.choose_scales(sample, self.scheme)

    def weight(self, dense: torch.Tensor, recipe: Recipe, axis: int) -> QuantizedTensor:
        """The weight, rounded to nearest, with the input's scales."""
        return quantized_weight(dense, recipe, axis=axis, input_scales=self.scales())


def _both(low: torch.Tensor | None, high: torch.Tensor | None) -> torch.Tensor:
    if low is None or high is None:
        raise ValueError("nothing was seen")
    return torch.stack([low, high])


@dataclass
class Sums(ABC):
    """Running sums over the inputs of one or more layers."""

    value: torch.Tensor | None = None

    @abstractmethod
    def update(self, x: torch.Tensor) -> None:
        """Take in an input, (..., channels)."""

    @abstractmethod
    def is_usable(self) -> bool:
        """Whether all sums are finite, and within float32."""


class SquareSums(Sums):
    """`reference.square_sums` of all inputs, bit for bit, in float32 operations of torch on the inputs' device."""

    def update(self, x: torch.Tensor) -> None:
        """Add the squares of one call."""
        total = square_sums(x)
        self.value = total if self.value is None else self.value + total.to(self.value.device)

    def is_usable(self) -> bool:
        """None overflowed."""
        return self.value is None or bool(self.value.isfinite().all())


class Hessian(Sums):
    """The sum of x x^T over all tokens, (channels, channels) in float64: no TF32, no order that matters to a float32."""

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
    return tree_sum(torch.stack(sums), 0)  # type: ignore[no-any-return]


@dataclass
class Shared:
    """A statistic, the layers that share it by name with the calls of each, and the input of the last update."""

    statistic: Sums
    calls: dict[str, int] = field(default_factory=dict)
    updates: int = 0
    tokens: int = 0
    last: Seen | None = None


@dataclass
class Statistics:
    """A statistic of each layer's inputs. An observer for `ao_lab.transforms.data.observe`, the same for all layers.

    A layer whose first input is the very tensor that another layer's statistic has just taken in, as its first, shares it from
    then on. Where such a layer later sees something else, that is an error: their sums could not be told apart any more.
    """

    make: Callable[[], Sums]
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
                f"statistic in common; calibrate them in separate calls, with filter_fn"
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


__all__ = ["AbsMax", "MinMax", "MovingAverage", "Percentile"]
