"""`Estimate`: a number with its interval; intervals by the delta method, order statistics and the bootstrap.

All of it is NumPy in float64. Samples are tokens (rows of a layer's input), taken to be independent; intervals hold 95 %.
"""

from __future__ import annotations

from math import inf, nan, sqrt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
#: Standard errors on either side of an interval that holds 95 %.
WIDTH = 1.959963984540054
#: Resamples of a bootstrap.
RESAMPLES = 200


class Estimate(NamedTuple):
    """`value`, its standard error (NaN where none is known), an interval of 95 %, and how many samples it is of."""

    value: float
    error: float = nan
    low: float = nan
    high: float = nan
    samples: int = 0

    def __str__(self) -> str:
        return (
            f"{self.value:.4g}"
            if self.error != self.error
            else f"{self.value:.4g} ± {WIDTH * self.error:.1g}"
        )


def normal(value: float, error: float, samples: int, least: float = -inf) -> Estimate:
    """An estimate with a symmetric interval, cut off at `least`."""
    return Estimate(value, error, max(value - WIDTH * error, least), value + WIDTH * error, samples)


def mean(x: Any) -> Estimate:
    """The mean of samples (n,), its standard error sd / sqrt(n); infinite with one sample."""
    x = vector(x, "mean")
    error = float(x.std(ddof=1)) / sqrt(len(x)) if len(x) > 1 else inf
    return normal(float(x.mean()), error, len(x))


def ratio_of_sums(a: Any, c: Any) -> Estimate:
    """sqrt(sum a / sum c) of samples (n,) that are sums of squares.

    Delta method: SE(rho^2) = sd(a - rho^2 c) / (mean(c) sqrt n), SE(rho) = SE(rho^2) / (2 rho). 0 where all a are 0; infinite
    where all c are 0 and some a is not.
    """
    a, c = vector(a, "ratio_of_sums"), vector(c, "ratio_of_sums")
    if a.shape != c.shape:
        raise ValueError(
            f"ratio_of_sums takes as many numerators as denominators, got {a.shape} and {c.shape}"
        )
    n, top, below = len(a), float(a.sum()), float(c.sum())
    if top == 0 or below == 0:
        value = 0.0 if top == 0 else inf
        return Estimate(value, 0.0 if top == 0 else nan, value, value, n)
    square = top / below
    spread = float((a - square * c).std(ddof=1)) if n > 1 else inf
    error = spread * n / (below * sqrt(n)) / (2 * sqrt(square))
    return normal(sqrt(square), error, n, 0.0)


def quantile(x: Any, share: float = 0.5) -> Estimate:
    """A quantile of samples (n,) with the interval of order statistics: ranks n q -+ 1.96 sqrt(n q (1 - q))."""
    x = np.sort(vector(x, "quantile"))
    n, spread = len(x), WIDTH * sqrt(len(x) * share * (1 - share))
    low, high = (int(np.clip(round(n * share + side * spread), 0, n - 1)) for side in (-1, 1))
    value = float(np.quantile(x, share)) if np.isfinite(x[high]) else float(x[min(int(n * share), n - 1)])
    return Estimate(value, float(x[high] - x[low]) / (2 * WIDTH), float(x[low]), float(x[high]), n)


def resampled(n: int, seed: int = 0, resamples: int = RESAMPLES) -> F64:
    """How often a bootstrap takes each of n samples, (resamples, n): rows of multinomial counts."""
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), resamples)
    return counts.astype(np.float64)


def bootstrapped(value: float, values: F64, samples: int) -> Estimate:
    """An estimate with the 2.5 and 97.5 % quantiles of its values over resamples."""
    low, high = np.quantile(values, (0.025, 0.975))
    return Estimate(value, float(values.std(ddof=1)), float(low), float(high), samples)


def vector(x: Any, what: str) -> F64:
    """Samples (n,), n >= 1, as float64; ValueError for other shapes, none, and NaN."""
    array = np.asarray(x, np.float64)
    if array.ndim != 1 or not array.size:
        raise ValueError(
            f"{what} takes samples (n,), at least one, got shape {array.shape}; flatten them, or run more data"
        )
    if np.isnan(array).any():
        raise ValueError(
            f"{what}: {int(np.isnan(array).sum())} of {array.size} samples are NaN; leave that batch out"
        )
    return array


__all__ = [
    "Estimate",
    "bootstrapped",
    "mean",
    "normal",
    "quantile",
    "ratio_of_sums",
    "resampled",
    "vector",
]
