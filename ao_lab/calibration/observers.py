"""Observers of the inputs of layers while data runs through the model, before weights are quantized.

An `Observer` belongs to one weight: it sees the inputs of the layers that have it, and quantizes the weight at the end.
`InputScales` is the one for static scales; methods that choose codes from data (GPTQ, AWQ) are others, which a configuration
names in `Config.observer`.

A `Statistic` is what `InputScales` stores: a few running values, never the data. Its `sample` is a small tensor whose
scales, by `reference.choose_scales`, are those to be used. For `MinMax` that is exact: the scales, and zero points, of
everything seen, put together as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

import reference
from ao_lab.config.observer import Observer
from ao_lab.config.recipe import Recipe
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from ao_lab.tensor.values.weight_scales import quantized_weight
from reference import Scales, Scheme
from reference.arrays.errors import choice


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
        found = (torch.searchsorted(running, ends, right=True) - MIDDLE).to(torch.int32)
        values = found.abs().to(torch.int16).view(torch.bfloat16)
        return torch.where(found < 0, -values, values)


STATISTICS: dict[str, Callable[[], Statistic]] = {
    "minmax": MinMax,
    "absmax": AbsMax,
    "moving_average": MovingAverage,
    "percentile": Percentile,
}


def statistic_of(wanted: Any) -> Callable[[], Statistic]:
    """What makes a new statistic: of a name, or itself; ValueError or TypeError for anything else."""
    if isinstance(wanted, str):
        return STATISTICS[choice(wanted, tuple(STATISTICS), "statistic")]
    if not callable(wanted):
        raise TypeError(
            f"statistic is a name or a function that makes a new one for each layer, got {type(wanted).__name__}"
        )
    return wanted  # type: ignore[no-any-return]


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


__all__ = [
    "STATISTICS",
    "AbsMax",
    "InputScales",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "Statistic",
    "statistic_of",
]
