"""What a quantized operand says of itself, step by step: numbers that show a fault before a loss does."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import fast
from reference import Quantized

LOST = "share of nonzero that became zero"
SATURATED = "share at the largest magnitude"
SQNR = "signal to quantization noise"
AMAX_STEP = "change of the largest magnitude a step"
SCALE_STEP = "change of the scale a step"
BAD = "share of blocks with NaN"
UNITS = {LOST: "%", SATURATED: "%", SQNR: "dB", AMAX_STEP: "log2", SCALE_STEP: "log2", BAD: "%"}


@dataclass
class Counters:
    """Counters of every operand that was seen, by its place, a value a step; NaN where there is nothing to compare with."""

    values: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def see(self, place: str, x: Tensor, q: Quantized) -> None:
        """Count one operand: x as it was, q as the product gets it."""
        made, found = counted(x, q), self.values[place]
        for name, value in made.items():
            found[name].append(value)
        amax, scale = log2(x.abs().max()), log2(decoded_scales(q).max())
        before = self.last.get(place, (math.nan, math.nan))
        found[AMAX_STEP].append(abs(amax - before[0]))
        found[SCALE_STEP].append(abs(scale - before[1]))
        self.last[place] = amax, scale

    def means(self, place: str) -> dict[str, float]:
        """Each counter's mean over the steps that have it; NaN where none does."""
        return {name: mean(values) for name, values in self.values[place].items()}


def counted(x: Tensor, q: Quantized) -> dict[str, float]:
    """Shares in percent and the ratio in decibels, of one operand."""
    wide, y = x.float(), fast.dequantize(q, torch.float32)
    nonzero, noise = wide != 0, (wide - y).square().sum()
    lost = ((y == 0) & nonzero).sum() / nonzero.sum().clamp(min=1)
    # The largest code's magnitude in each block: its decoded value over its scale is the format's largest.
    top = (y.abs() >= largest(q) * (1 - 1e-6)) & nonzero
    return {
        LOST: 100 * float(lost),
        SATURATED: 100 * float(top.float().mean()),
        SQNR: 10 * math.log10(max(float(wide.square().sum() / noise), 1e-30)) if noise > 0 else math.inf,
        BAD: 100 * float(decoded_scales(q).isnan().float().mean()),
    }


def decoded_scales(q: Quantized) -> Tensor:
    """The scales as float32."""
    if q.scale.dtype == torch.float32:
        return q.scale
    if q.scheme.scale.storage == "float8_e8m0fnu":
        return torch.where(q.scale == 255, math.nan, torch.exp2(q.scale.to(torch.float32) - 127))
    return fast.decode(q.scale, q.scheme.scale.storage)


def largest(q: Quantized) -> Tensor:
    """The largest magnitude that each element could have, (rows, columns) or something that broadcasts to it."""
    scales, top = decoded_scales(q), float(q.scheme.format.max)
    rows, columns = q.shape
    if scales.dim() == 0:
        return scales * top
    across, along = rows // scales.shape[0], columns // scales.shape[1]
    return scales.repeat_interleave(across, 0).repeat_interleave(along, 1) * top


def log2(x: Tensor) -> float:
    """log2, NaN of zero."""
    value = float(x)
    return math.log2(value) if value > 0 else math.nan


def mean(values: Iterable[float]) -> float:
    """The mean of what is not NaN."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


__all__ = ["AMAX_STEP", "BAD", "LOST", "SATURATED", "SCALE_STEP", "SQNR", "UNITS", "Counters", "counted"]
