"""The mean over seeds with its 95% interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

#: 97.5% quantiles of Student's t for 1, 2, ... degrees of freedom.
STUDENT = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half the width of its 95% interval (Student's t)."""

    mean: float
    half: float


def interval(values: Sequence[float]) -> Interval:
    """The mean and its interval; ValueError for one value or more than there are quantiles for."""
    degrees = len(values) - 1
    if not 1 <= degrees <= len(STUDENT):
        raise ValueError(f"an interval takes 2 to {len(STUDENT) + 1} seeds, got {len(values)}")
    return Interval(fmean(values), STUDENT[degrees - 1] * stdev(values) / math.sqrt(len(values)))
