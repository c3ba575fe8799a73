"""Smoothing: one factor for each input channel, multiplied into the weights and divided out of the inputs.

(x / s) (w s)^T = x w^T for every s > 0, so the layer stays the same function and quantizes differently: what is hard to store
in the inputs moves into the weights (SmoothQuant), or channels that matter get finer steps (AWQ). The factors are folded into
what produces the inputs, a norm's gain or the rows of a weight before.

* `smoothing_factors`: s = max|x|^a / max|w|^(1-a) (Xiao et al., SmoothQuant, arXiv 2211.10438, equation 4).
* `awq_factors`: s = mean|x|^r / sqrt(max min) with r from a grid, judged by the layer's output error (Lin et al., AWQ,
  arXiv 2306.00978, section 3.2). That error is tr(D H D^T), H the mean of x x^T: the inputs themselves are not needed again.

Channels whose inputs or weights are all zero keep factor 1: nothing is known of them. Factors lie between 2^-16 and 2^16, so
that neither weights nor gains leave the range of their dtype. They are rounded to float32, and held in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reference.arrays.namespace import Array, namespace_of
from reference.calibration.inputs import Matrix, input_values, rounded, second_moments, weight_matrix
from reference.calibration.search import search_scales
from reference.quantize.fake_quantize import fake_quantize
from reference.schemes.schemes import Scheme, scheme_of

#: Factors beyond would be folded into gains and weights that a 16-bit float no longer holds.
LEAST_FACTOR, LARGEST_FACTOR = 2.0**-16, 2.0**16
#: Rows of a weight whose errors are multiplied at a time.
ROWS = 2048


class AWQFactors(NamedTuple):
    """factors (K,) float64, errors (R,) float64 of every ratio in order, and the ratio of the least error (the first of
    equals).
    """

    factors: Any
    errors: Any
    ratio: float


def smoothing_factors(x_absmax: Any, w_absmax: Any, alpha: float = 0.5) -> Matrix:
    """max|x|^alpha / max|w|^(1 - alpha), (K,) float64: weights are multiplied by it and inputs divided.

    x_absmax, w_absmax: (K,) floats, NumPy: the largest magnitude of each channel over all tokens and over the rows of all
    weights that read it. alpha: 0 to 1, how much of the range moves into the weights. Rounding, bounds and channels of zeros as
    this module states. Raises TypeError for other arrays, ValueError for other shapes, negative, NaN or infinite values, and
    alpha out of range.
    """
    size = np.shape(x_absmax)[0] if np.ndim(x_absmax) else 0
    x = input_values(x_absmax, size, "smoothing_factors", "x_absmax")
    w = input_values(w_absmax, size, "smoothing_factors", "w_absmax")
    check_alpha(alpha)
    return np.asarray(balanced(x, w, alpha))


def awq_factors(
    ws: Sequence[Any] | Any,
    hessian: Any,
    x_mean: Any,
    scheme: str | Scheme,
    *,
    ratios: int = 20,
    search: bool = False,
) -> AWQFactors:
    """Factors mean|x|^r, normalised, for the r of 0, 1/R, ... (R-1)/R with the least output error of the weights in a scheme.

    ws: weights (N, K) that read the same inputs, a list of finite float32, bfloat16 or float16 NumPy matrices (or one).
    hessian: (K, K) mean of x x^T. x_mean: (K,) mean of |x|. ratios: R, at least 1; the first ratio is 0, rounding without
    factors, so the result is never worse by these statistics. search: scales by `search_scales`, weighted by the smoothed
    inputs' mean squares.

    The error of a ratio is the sum over weights of tr(D H D^T) with D = q / s - w in float64, q the value that the scheme
    stores for w s, a product rounded to w's dtype. A ratio that a scheme stores as NaN has an infinite error; where all have,
    factors are 1. Sums over K have no stated order, so errors may differ in their last bits between libraries. Raises TypeError
    and ValueError as `fake_quantize` does, and for no weights, weights of different K, statistics of another shape or not
    finite.
    """
    matrices, size = weights_of(ws)
    scheme = scheme_of(scheme)
    h = second_moments(hessian, size, "awq_factors")
    x = input_values(x_mean, size, "awq_factors", "x_mean")
    check_ratios(ratios)
    live = (x > 0) & np.any([(w != 0).any(axis=0) for w in matrices], axis=0)
    table = [power_factors(x, live, step / ratios) for step in range(ratios)]
    errors = np.asarray([sum(_error(w, h, s, scheme, search) for w in matrices) for s in table])
    best = int(np.argmin(errors))
    return AWQFactors(table[best], errors, best / ratios)


def balanced(x: Array, w: Array, alpha: float) -> Array:
    """The factors of `smoothing_factors` for checked float64 vectors of any library."""
    ns, live = namespace_of(x), (x > 0) & (w > 0)
    x, w = ns.where(live, x, 1.0), ns.where(live, w, 1.0)
    return bounded(x**alpha / w ** (1.0 - alpha), live)


def power_factors(x: Array, live: Array, ratio: float) -> Array:
    """x^ratio / sqrt(max min) over live channels (K,), and 1 elsewhere; float64 vectors of any library."""
    ns = namespace_of(x)
    if ratio == 0 or not bool(live.any()):
        return ns.full(tuple(x.shape), 1, "float64", x)
    powers = ns.where(live, x, 1.0) ** ratio
    middle = ns.xp.sqrt(powers[live].max()) * ns.xp.sqrt(powers[live].min())
    return bounded(powers / middle, live)


def bounded(factors: Array, live: Array) -> Array:
    """Factors within their bounds, rounded to float32; 1 where a channel is not live."""
    ns = namespace_of(factors)
    short = ns.astype(ns.xp.clip(factors, LEAST_FACTOR, LARGEST_FACTOR), "float32")
    return ns.where(live, ns.astype(short, "float64"), 1.0)


def _error(w: Any, h: Matrix, factors: Matrix, scheme: Scheme, search: bool) -> float:
    """tr(D H D^T) of one weight; infinite where the scheme stores no number."""
    smoothed = rounded(w.astype(np.float64) * factors, w.dtype)
    scales = search_scales(smoothed, scheme, weights=np.diag(h) / factors**2) if search else None
    values = fake_quantize(smoothed, scheme, scales=scales).astype(np.float64)
    error = 0.0
    for start in range(0, len(w), ROWS):
        rows = slice(start, start + ROWS)
        d = values[rows] / factors - w[rows].astype(np.float64)
        if not np.isfinite(d).all():
            return float("inf")
        error += float(((d @ h) * d).sum())
    return error


def weights_of(ws: Any) -> tuple[list[Any], int]:
    """The weights as checked matrices, and their K."""
    weights = list(ws) if isinstance(ws, (list, tuple)) else [ws]
    if not weights:
        raise ValueError("awq_factors takes the weights that read these inputs, got none; give at least one")
    matrices = [weight_matrix(w, "awq_factors", "ws") for w in weights]
    sizes = {w.shape[1] for w in matrices}
    if len(sizes) > 1:
        raise ValueError(
            f"awq_factors takes weights that read the same inputs, got {sorted(sizes)} of them; call it for each"
        )
    return matrices, sizes.pop()


def check_alpha(alpha: float) -> None:
    """ValueError unless alpha is a share."""
    if isinstance(alpha, bool) or not 0 <= alpha <= 1:
        raise ValueError(
            f"alpha is 0 to 1, the share of the range that weights take, got {alpha!r}; 0.5 is usual"
        )


def check_ratios(ratios: int) -> None:
    """ValueError unless there is a ratio to try."""
    if isinstance(ratios, bool) or not isinstance(ratios, int) or ratios < 1:
        raise ValueError(
            f"ratios is how many are tried, an integer of at least 1, got {ratios!r}; 20 is usual"
        )


__all__ = ["AWQFactors", "awq_factors", "smoothing_factors"]
