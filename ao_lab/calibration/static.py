"""Configurations with one scale for all inputs of a layer, given or found by calibration; see `ao_lab.config.base`.

Without act_quant_scale the scale of each layer comes from its inputs: `quantize_(..., forward_loop=...)`, or torchao's
step="prepare", data, step="convert" (`ao_lab.transforms.hooks`). `statistic` says what is kept of the inputs: "minmax"
(exact, as if all were one tensor), "absmax", "moving_average", "percentile", or a function that makes an
`ao_lab.calibration.static.Statistic`.

Observers of the inputs of layers while data runs through the model, before weights are quantized.

An `Observer` belongs to one weight: it sees the inputs of the layers that have it, and quantizes the weight at the end.
`InputScales` is the one for static scales; methods that choose codes from data (GPTQ, AWQ) are others, which a configuration
names in `Config.observer`.

A `Statistic` is what `InputScales` stores: a few running values, never the data. Its `sample` is a small tensor whose
scales, by `reference.choose_scales`, are those to be used. For `MinMax` that is exact: the scales, and zero points, of
everything seen, put together as one tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn

import reference
from ao_lab.config.base import Config, Observer, operands, static_scales
from ao_lab.config.classes import NO_LAYOUT, float8_scheme
from ao_lab.config.compressed_tensors import OWN
from ao_lab.config.granularity import PER_ROW, PerTensor, block_of, is_asymmetric
from ao_lab.config.recipe import Recipe, integer_scheme
from ao_lab.tensor.chunked import quantized_weight
from ao_lab.tensor.quantized_tensor import QuantizedTensor
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


#: Torchao's: watch inputs; take the scales that were found.
STEPS = ("prepare", "convert")


@dataclass(frozen=True)
class StaticConfig(Config, registered=False):
    """What both have: a scale, or how it is found."""

    statistic: Any = field(default="minmax", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        statistic_of(self.statistic)
        if (scheme := self.recipe().activation) is None or scheme.scale.block != "tensor" or scheme.outer:
            raise ValueError(
                f"{type(self).__name__}: a static scale is one number for all inputs, not {scheme and scheme.name}; tokens, "
                f"channels and blocks of inputs to come have no scales yet: use PerTensor, or a Dynamic configuration"
            )
        if (step := getattr(self, "step", None)) is not None:
            choice(step, STEPS, f"{type(self).__name__}: step")
        scale, zero = self.given
        if scale is not None and self.prepares:
            raise ValueError('step="prepare" finds act_quant_scale; leave one of the two out')
        if (scheme.zero is not None and scale is not None) != (zero is not None):
            raise ValueError(
                "act_quant_zero_point belongs to act_quant_scale of act_mapping_type ASYMMETRIC, and to it alone"
            )
        self.input_scales()

    @property
    def given(self) -> tuple[Any, Any]:
        """The scale and the zero point that the caller has given, or None."""
        return getattr(self, "act_quant_scale"), getattr(self, "act_quant_zero_point", None)  # noqa: B009  (of subclasses)

    def input_scales(self) -> Scales | None:
        """The given scale, and zero point; None where they are to be found."""
        scale, zero = self.given
        return None if scale is None else static_scales(scale, zero)

    def for_layout(self, layout: str) -> Self:
        """See `Config.for_layout`; a given scale becomes what readers in bfloat16 still have, ValueError for a zero point."""
        result = super().for_layout(layout)
        scale, zero = self.given
        if layout == OWN or scale is None:
            return result
        if zero is not None:
            raise ValueError(
                f"{type(self).__name__}: readers of compressed-tensors add act_quant_zero_point before they round; give a "
                f"symmetric act_quant_scale, or use layout='ao_lab'"
            )
        rounded = torch.as_tensor(scale).detach().to(torch.bfloat16).to(torch.float32)
        changed: Any = {"act_quant_scale": rounded}
        return replace(result, **changed)

    def observer(self) -> Observer | None:
        """What finds the scale; None where it is given."""
        scheme = self.recipe().activation
        if self.given[0] is not None or scheme is None:
            return None
        return InputScales(scheme, statistic_of(self.statistic)())


@dataclass(frozen=True)
class Int8StaticActivationInt8WeightConfig(StaticConfig):
    """8-bit integers for weight and input; one scale for all inputs, known beforehand. A single granularity is the weight's."""

    act_quant_scale: Any = None
    act_quant_zero_point: Any = None
    granularity: Any = PER_ROW
    act_mapping_type: Any = "SYMMETRIC"
    set_inductor_config: bool = True
    version: int = 1
    reduce_range: bool | None = False
    step: Any = field(default=None, kw_only=True)
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"reduce_range": (False, None)}

    def _weight(self) -> Scheme:
        return integer_scheme(8, block_of(operands(self.granularity)[1]), asymmetric=False)

    def _activation(self) -> Scheme:
        return integer_scheme(8, block_of(_of_input(self.granularity)), is_asymmetric(self.act_mapping_type))


@dataclass(frozen=True)
class Float8StaticActivationFloat8WeightConfig(StaticConfig):
    """Float8 for weight and input; one scale for all inputs, known beforehand. A single granularity is the weight's."""

    step: Any = None
    act_quant_scale: Any = None
    activation_dtype: Any = "float8_e4m3fn"
    weight_dtype: Any = "float8_e4m3fn"
    granularity: Any = None
    mm_config: Any = None
    kernel_preference: Any = "auto"
    set_inductor_config: bool = True
    quantize_and_dequantize_output: bool = False
    output_act_quant_scale: Any = None
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NO_LAYOUT,
        "mm_config": (None,),
        "quantize_and_dequantize_output": (False,),
        "output_act_quant_scale": (None,),
    }

    def _weight(self) -> Scheme:
        return float8_scheme(self.weight_dtype, operands(self.granularity or PerTensor())[1])

    def _activation(self) -> Scheme:
        return float8_scheme(self.activation_dtype, _of_input(self.granularity))


def _of_input(granularity: Any) -> Any:
    """The input's granularity where a pair names it; a single one is the weight's."""
    return operands(granularity)[0] if isinstance(granularity, (list, tuple)) else PerTensor()


__all__ = [
    "STATISTICS",
    "AbsMax",
    "Float8StaticActivationFloat8WeightConfig",
    "InputScales",
    "Int8StaticActivationInt8WeightConfig",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "statistic_of",
]
