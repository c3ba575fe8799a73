"""Estimators of what a layer's error is and costs.

y (n, N): the exact outputs of n tokens; e (n, N): what the low-precision layer gave, minus y; g (n, N): the gradient of what
is looked at (a logit, a loss) at the outputs. All are NumPy arrays and taken to float64; e may not be NaN.

| name | formula | interval |
|---|---|---|
| `norm_ratio` | sqrt(sum \\|e_b\\|^2 / sum \\|y_b\\|^2) | delta method |
| `median_ratio` | median \\|e / y\\| | order statistics |
| `worst_channel` | max_j \\|e_j\\| / \\|y_j\\| | bootstrap over tokens |
| `bias` | max_j \\|mean e_j\\| / sd(y_j) | normal, of that channel |
| `mere` | mean \\|e / y\\| | none: see there |
| `output_variance` | mean_b (g_b . e_b)^2 | normal |
| `gradient_ratio` | \\|dg\\|^2 / tr Cov(minibatch gradient) | over batches |

The first-order change of a logit through one layer is g . e, so sums of `output_variance` over layers predict the variance of
the logit where layers err independently; `loss_change` says what that is in log loss.
"""

from __future__ import annotations

from math import inf, nan, sqrt
from typing import Any, NamedTuple

import numpy as np

from reference.probe.estimates import (
    F64,
    Estimate,
    bootstrapped,
    mean,
    normal,
    quantile,
    ratio_of_sums,
    resampled,
    vector,
)


def norm_ratio(e: Any, y: Any) -> Estimate:
    """The error's norm over the output's, over all tokens: the first number, since large outputs count as they do later."""
    e, y = pair(e, y, "norm_ratio")
    return ratio_of_sums((e**2).sum(1), (y**2).sum(1))


def median_ratio(e: Any, y: Any) -> Estimate:
    """The median of |e / y| over elements, with e / 0 infinite and 0 / 0 left out: the robust twin of `mere`.

    Its interval takes elements for independent; those of one token are not quite.
    """
    ratios = elementwise(*pair(e, y, "median_ratio"))
    return quantile(ratios) if ratios.size else Estimate(0.0, 0.0, 0.0, 0.0, 0)


def mere(e: Any, y: Any) -> Estimate:
    """The mean of |e / y| over elements (the mean element-wise relative error of arXiv 2605.10886), without an interval.

    It has no finite expectation wherever the density f of outputs is positive and continuous around 0 and errors do not vanish
    there. Proof: take c, delta > 0 with f(y) >= c for |y| <= delta, and s > 0 below E[|e| given y] there (rounding errors of
    the other terms of the sum do not shrink with their sum). Then E|e / y| >= 2 c s * integral of dy / y from t to delta =
    2 c s log(delta / t) for every t > 0, which grows without bound as t goes to 0. So a mean over n elements grows like log
    n: its smallest |y| is about 1 / (2 c n). The same holds for its error: samples of one distribution differ by any factor,
    and no number of samples mends that. Outputs that keep away from 0 have a finite one; the mean of a layer's outputs over
    their deviation then decides more than its precision does. Outputs that are 0 are left out.
    """
    e, y = pair(e, y, "mere")
    ratios = elementwise(e, y)
    finite = ratios[np.isfinite(ratios)]
    return Estimate(float(finite.mean()) if finite.size else nan, samples=int(finite.size))


def worst_channel(e: Any, y: Any, seed: int = 0) -> Estimate:
    """The largest ratio of norms of one output channel, over tokens: a broken column of scales shows here.

    Channels whose outputs are all 0 are left out. Bootstrap over tokens.
    """
    e, y = pair(e, y, "worst_channel")
    squares, sizes = e**2, y**2
    live = sizes.sum(0) > 0
    if not live.any():
        return Estimate(inf if e.any() else 0.0, samples=len(e))
    squares, sizes = squares[:, live], sizes[:, live]
    value = sqrt(float((squares.sum(0) / sizes.sum(0)).max()))
    counts = resampled(len(e), seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = (counts @ squares) / (counts @ sizes)
    return bootstrapped(value, np.sqrt(np.nanmax(ratios, 1)), len(e))


def bias(e: Any, y: Any) -> Estimate:
    """The largest mean error of a channel, in standard deviations of its outputs; sums that truncate have one.

    Unlike noise it does not average out over tokens. The interval is of the channel that was found: among N channels the
    largest of N means without any bias lies at sqrt(2 log N) standard errors.
    """
    e, y = pair(e, y, "bias")
    deviation = y.std(0)
    live = deviation > 0
    if len(e) < 2 or not live.any():
        return Estimate(nan, samples=len(e))
    means = np.abs(e.mean(0))[live] / deviation[live]
    at = int(means.argmax())
    error = float(e[:, live][:, at].std(ddof=1)) / sqrt(len(e)) / float(deviation[live][at])
    return normal(float(means[at]), error, len(e), 0.0)


def deviations(e: Any, g: Any) -> F64:
    """g_b . e_b of each token, (n,): the first-order change of what g is the gradient of."""
    e, g = pair(e, g, "deviations")
    return np.asarray(np.einsum("bj,bj->b", e, g))


def output_variance(e: Any, g: Any) -> Estimate:
    """The mean of (g_b . e_b)^2: what a layer adds to the variance of a logit whose gradient at the outputs is g."""
    return mean(deviations(e, g) ** 2)


def gradient_ratio(changes: Any, halves: Any) -> Estimate:
    """|dg|^2 / tr Cov(minibatch gradient), over minibatches.

    changes (batches, P): what low precision changes of a gradient, P its elements; halves (batches, 2, P): the gradient of
    either half of the batch, each a mean over its own examples. |g1 - g2|^2 / 4 has the expectation tr Cov(g) of the whole
    batch. A ratio q makes a step as noisy as a batch smaller by the share q / (1 + q). One batch gives no interval.
    """
    changes, halves = np.asarray(changes, np.float64), np.asarray(halves, np.float64)
    if halves.ndim != 3 or halves.shape[1] != 2 or changes.shape != (halves.shape[0], halves.shape[2]):
        raise ValueError(
            f"gradient_ratio takes changes (batches, P) and halves (batches, 2, P), got {changes.shape} and {halves.shape}"
        )
    return ratio_of_squares((changes**2).sum(1), ((halves[:, 0] - halves[:, 1]) ** 2).sum(1) / 4)


def ratio_of_squares(changes: Any, noise: Any) -> Estimate:
    """sum of |dg|^2 over sum of tr Cov, of samples (batches,); see `gradient_ratio`."""
    changes, noise = vector(changes, "gradient_ratio"), vector(noise, "gradient_ratio")
    if not noise.sum():
        return Estimate(inf if changes.any() else 0.0, samples=len(changes))
    root = ratio_of_sums(changes, noise)
    error = 2 * root.value * root.error
    return normal(root.value**2, error, len(changes), 0.0)


class LossChange(NamedTuple):
    """What a change of logits adds to a mean log loss: `shift`, of first order, 0 at an optimum and a change of calibration
    else; `spread`, of second order, never negative."""

    shift: float
    spread: float


def loss_change(logits: Any, labels: Any, change: Any) -> LossChange:
    """E[(p - y) d] and E[p (1 - p) d^2] / 2 of binary logits (n,), labels 0 or 1 (n,), and the change d (n,) of the logits."""
    z, y, d = (vector(one, "loss_change") for one in (logits, labels, change))
    p = np.exp(-np.logaddexp(0.0, -z))
    return LossChange(float(((p - y) * d).mean()), float((p * (1 - p) * d**2).mean()) / 2)


def tolerated_deviation(relative: float, loss: float, variance: float) -> float:
    """The deviation of a logit that adds the share `relative` to a log loss: sqrt(2 relative loss / E[p (1 - p)])."""
    if not (relative > 0 and loss > 0 and variance > 0):
        raise ValueError(
            f"tolerated_deviation takes a positive share, loss and E[p (1 - p)], got {relative}, {loss}, {variance}"
        )
    return sqrt(2 * relative * loss / variance)


def elementwise(e: F64, y: F64) -> F64:
    """|e / y| of all elements that are not 0 / 0, flat."""
    some = (y != 0) | (e != 0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.abs(e[some]) / np.abs(y[some]))


def pair(e: Any, y: Any, what: str) -> tuple[F64, F64]:
    """Two matrices (n, N) of one shape in float64; ValueError for other shapes, no tokens, NaN and infinity."""
    one, two = np.asarray(e, np.float64), np.asarray(y, np.float64)
    if one.ndim != 2 or one.shape != two.shape or not one.size:
        raise ValueError(
            f"{what} takes two matrices (tokens, channels) of one shape, got {one.shape} and {two.shape}"
        )
    wrong = sum(int((~np.isfinite(x)).sum()) for x in (one, two))
    if wrong:
        raise ValueError(
            f"{what}: {wrong} elements of {one.shape} are NaN or infinite; leave out the batch that makes them"
        )
    return one, two


__all__ = [
    "LossChange",
    "bias",
    "deviations",
    "gradient_ratio",
    "loss_change",
    "median_ratio",
    "mere",
    "norm_ratio",
    "output_variance",
    "ratio_of_squares",
    "tolerated_deviation",
    "worst_channel",
]
