"""Means over paired seeds, with intervals, and the part of the PTQ loss that QAT recovers.

Of each seed there are three losses on the same text: of the model trained in full precision (base), of that model quantized
(ptq), and of the model trained for quantization from the same start, on the same text, for as many steps, then quantized
(qat). All differences are taken seed by seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

#: A loss of fewer than this many of its standard deviations over seeds has no percentage: it would be a ratio of noise.
DEVIATIONS = 10
#: 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half the width of its 95% interval (Student's t)."""

    mean: float
    half: float


@dataclass(frozen=True)
class Recovery:
    """The loss of PTQ and of QAT in bits per byte over float32, and the recovered percentage.

    deviations: the loss to recover, in its standard deviations over seeds. recovered: mean over seeds of
    100 (ptq - qat) / (ptq - base); None where `deviations` is under DEVIATIONS, or nothing was lost.
    """

    ptq: Interval
    qat: Interval
    deviations: float
    recovered: Interval | None


def interval(values: Sequence[float]) -> Interval:
    """The mean and its interval; ValueError for one value or more than there are quantiles for."""
    degrees = len(values) - 1
    if not 1 <= degrees <= len(STUDENT):
        raise ValueError(f"an interval takes 2 to {len(STUDENT) + 1} seeds, got {len(values)}")
    return Interval(fmean(values), STUDENT[degrees - 1] * stdev(values) / math.sqrt(len(values)))


def deviations_of(values: Sequence[float]) -> float:
    """The mean in standard deviations; infinite where all values are the same, except of zeros."""
    mean, spread = fmean(values), stdev(values)
    if spread:
        return mean / spread
    return math.copysign(math.inf, mean) if mean else 0.0


def recovery(base: Sequence[float], ptq: Sequence[float], qat: Sequence[float]) -> Recovery:
    """Of the losses of each seed, in the same order."""
    lost = [after - before for after, before in zip(ptq, base, strict=True)]
    remaining = [after - before for after, before in zip(qat, base, strict=True)]
    deviations = deviations_of(lost)
    recovered = None
    if deviations >= DEVIATIONS:
        recovered = interval(
            [100 * (whole - rest) / whole for whole, rest in zip(lost, remaining, strict=True)]
        )
    return Recovery(interval(lost), interval(remaining), deviations, recovered)


__all__ = ["DEVIATIONS", "Interval", "Recovery", "deviations_of", "interval", "recovery"]
