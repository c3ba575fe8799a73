"""Models of a layer's inputs, to measure a kernel on when the inputs themselves may not be stored, and sums they are made of.

Random inputs N(0, 1) overstate errors: real ones have means, outliers, zeros, and covariances of low rank. A reservoir of
tokens (`reference.probe.sampling`) is the best model and the default; where tokens may not leave a machine:

| model | holds of K channels | what it keeps |
|---|---|---|
| `gaussian` | K + K^2 | mean and covariance |
| `elliptical` | K + K^2 + quantiles | and the distances of tokens from the mean: heavy tails |
| `copula` | K^2 + K quantiles | each channel's own distribution, zeros and outliers, and the ranks' correlation |
| `low_rank` | K (rank + 2) | mean, `rank` directions, each channel's variance |

Sums are taken in float64 and merged by the formula of Chan, Golub and LeVeque (1983), so that parts of data, and processes, may
be added in any order. A covariance has directions that nothing was seen along (concatenated embeddings have rank 80 of 448);
samples get a variance of `floor` times the mean one there, and without a floor such a covariance is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import erf, sqrt
from typing import Any, NamedTuple

import numpy as np

from reference.probe.estimates import F64

#: Variance of directions that were not seen, over the mean variance. 1e-6 in float32 sums fails in practice.
FLOOR = 1e-4
#: Points of a distribution that a model stores.
QUANTILES = 129
#: Directions of `low_rank`.
RANK = 256


class Moments(NamedTuple):
    """`tokens` seen, their `mean` (K,), and the sum of centred products (x - mean) (x - mean)^T, (K, K), float64."""

    tokens: int
    mean: Any
    products: Any

    @property
    def covariance(self) -> Any:
        """Over the tokens, not one fewer; zeros where there are none."""
        return self.products / max(self.tokens, 1)


def moments_of(x: Any) -> Moments:
    """Of tokens (n, K), float64 arrays of NumPy or tensors; an empty array gives zeros."""
    mean = x.sum(0) / max(len(x), 1)
    centred = x - mean
    return Moments(len(x), mean, centred.T @ centred)


def merged(a: Moments, b: Moments) -> Moments:
    """The moments of both: S = S_a + S_b + n_a n_b / n (m_a - m_b) (m_a - m_b)^T."""
    if a.mean.shape != b.mean.shape:
        raise ValueError(
            f"moments of one layer have one length, got {tuple(a.mean.shape)} and {tuple(b.mean.shape)}"
        )
    n = a.tokens + b.tokens
    if not n:
        return a
    apart = b.mean - a.mean
    outer = apart[:, None] * apart[None]
    return Moments(
        n, a.mean + apart * (b.tokens / n), a.products + b.products + outer * (a.tokens * b.tokens / n)
    )


@dataclass(frozen=True)
class InputModel:
    """mean (K,), factor (K, r): tokens are mean + factor z + deviation * z', z and z' normal.

    deviation (K,): of each channel by itself, 0 where it has none. radii: quantiles of the root mean square of z over the last
    `live` directions, which tokens are scaled to. marginals (QUANTILES, K): of each channel, which its ranks are turned into.
    """

    mean: F64
    factor: F64
    deviation: F64
    radii: F64 | None = None
    live: int = 0
    marginals: F64 | None = None

    def sample(self, tokens: int, seed: int = 0) -> F64:
        """Tokens (tokens, K), float64; the same for the same seed."""
        rng = np.random.default_rng(seed)
        z = rng.standard_normal((tokens, self.factor.shape[1]))
        if self.radii is not None:
            wanted = np.interp(rng.random((tokens, 1)), _shares(self.radii), self.radii)
            z = z * (wanted / _rms(z[:, z.shape[1] - self.live :]))
        x = z @ self.factor.T
        if self.deviation.any():
            x = x + rng.standard_normal(x.shape) * self.deviation
        if self.marginals is None:
            return np.asarray(x + self.mean)
        ranks = _normal_share(x)
        shares = _shares(self.marginals)
        columns = [np.interp(ranks[:, j], shares, self.marginals[:, j]) for j in range(x.shape[1])]
        return np.stack(columns, 1)


def gaussian(moments: Moments, floor: float = FLOOR) -> InputModel:
    """A normal distribution with these moments; ValueError of fewer than two tokens, and of singular ones without a floor."""
    mean = np.asarray(moments.mean, np.float64)
    return InputModel(mean, factor_of(_covariance(moments), moments.tokens, floor), np.zeros(len(mean)))


def elliptical(x: Any, floor: float = FLOOR) -> InputModel:
    """`gaussian` of tokens (n, K), with their distances from the mean resampled, in units of its deviation along the directions
    whose variance is above the floor."""
    x = tokens_of(x)
    model = gaussian(moments_of(x), floor)
    sizes = np.linalg.norm(model.factor, axis=0)
    live = int((sizes > 1.001 * sizes[0]).sum())
    if not live:
        return model
    z = (x - model.mean) @ (model.factor[:, -live:] / sizes[-live:] ** 2)
    return replace(model, radii=_quantiles(_rms(z)[:, 0]), live=live)


def copula(x: Any, floor: float = FLOOR) -> InputModel:
    """A Gaussian copula of tokens (n, K): normal scores of each channel's ranks with their correlation, and its own quantiles.

    Equal values share the mean of their scores, so a channel that is 0 in most tokens is 0 there.
    """
    x = tokens_of(x)
    scores = np.stack([_scores(column) for column in x.T], 1)
    moments = moments_of(scores)
    covariance = _covariance(moments)
    spread = np.sqrt(np.diag(covariance))
    constant = spread == 0
    spread[constant] = 1
    factor = factor_of(covariance / spread / spread[:, None], len(x), floor)
    length = np.linalg.norm(factor, axis=1, keepdims=True)
    factor = factor / np.where(length == 0, 1, length)
    zeros = np.zeros(x.shape[1])
    return InputModel(zeros, factor, zeros, marginals=np.stack([_quantiles(column) for column in x.T], 1))


class Sketch(NamedTuple):
    """What `low_rank` adds up: `tokens`, sums of x - center and of its square (K,), and at most `2 rank` directions (r, K)
    whose squares stand for the sum of (x - center) (x - center)^T (Frequent Directions: Liberty, 2013)."""

    tokens: int
    center: F64
    total: F64
    squares: F64
    directions: F64


def sketch_of(x: Any, rank: int = RANK, center: Any = None) -> Sketch:
    """Of tokens (n, K). center: what they are taken from; the mean of the first tokens without it."""
    x = tokens_of(x)
    middle = x.mean(0) if center is None else np.asarray(center, np.float64)
    d = x - middle
    return Sketch(len(x), middle, d.sum(0), (d**2).sum(0), shrunk(d, rank))


def joined(a: Sketch, b: Sketch, rank: int = RANK) -> Sketch:
    """The sketch of both, about one center."""
    if a.center.shape != b.center.shape or not np.array_equal(a.center, b.center):
        raise ValueError("sketches are joined about one center; give the first one's center to sketch_of")
    directions = shrunk(np.concatenate([a.directions, b.directions]), rank)
    return Sketch(a.tokens + b.tokens, a.center, a.total + b.total, a.squares + b.squares, directions)


def shrunk(directions: F64, rank: int) -> F64:
    """At most 2 rank directions: where there are more, rank of them, their squares less the first one's that is left out."""
    if len(directions) <= 2 * rank:
        return directions
    # By the smaller of both matrices of products, in a tenth of the time of singular values, of which squares are asked alone.
    wide = directions.shape[1] > len(directions)
    squares, vectors = np.linalg.eigh(directions @ directions.T if wide else directions.T @ directions)
    squares, vectors = squares[::-1], vectors[:, ::-1]
    less = squares[rank] if len(squares) > rank else 0.0
    kept = np.sqrt(np.maximum(squares[:rank] - less, 0))[:, None]
    if not wide:
        return np.asarray(kept * vectors[:, :rank].T)
    size = np.sqrt(np.maximum(squares[:rank], np.finfo(np.float64).tiny))[:, None]
    return np.asarray(kept / size * (vectors[:, :rank].T @ directions))


def low_rank(sketch: Sketch) -> InputModel:
    """A normal distribution of the sketched directions, and for each channel the variance that they lack."""
    if sketch.tokens < 2:
        raise ValueError(f"low_rank takes two tokens at least, got {sketch.tokens}; run more data")
    n = sketch.tokens
    factor = sketch.directions.T / sqrt(n)
    rest = np.maximum(sketch.squares / n - (factor**2).sum(1), 0)
    # About the center, not the mean: the directions hold their difference too.
    return InputModel(sketch.center, factor, np.sqrt(rest))


def factor_of(covariance: Any, tokens: int, floor: float = FLOOR) -> F64:
    """A factor F, F F^T = covariance with eigenvalues of `floor` times their mean at least; ValueError for a singular one with
    floor 0."""
    if tokens < 2:
        raise ValueError(f"a covariance takes two tokens at least, got {tokens}; run more data")
    covariance = np.asarray(covariance, np.float64)
    if not np.isfinite(covariance).all():
        raise ValueError("the covariance holds NaN or infinity; leave out the batch that makes them")
    values, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    size = float(np.maximum(values, 0).mean())
    rank = int((values > 1e-12 * max(values[-1], 0)).sum()) if values[-1] > 0 else 0
    if not floor and rank < len(values):
        raise ValueError(
            f"the covariance of {tokens} tokens is singular, of rank {rank} of {len(values)}; give floor={FLOOR}, more "
            f"tokens, or keep a reservoir"
        )
    return np.asarray(vectors * np.sqrt(np.maximum(values, floor * size)))


def tokens_of(x: Any) -> F64:
    """Tokens (n, K) in float64; ValueError for other shapes, fewer than two, NaN and infinity."""
    array = np.asarray(x, np.float64)
    if array.ndim != 2 or len(array) < 2 or not array.shape[1]:
        raise ValueError(
            f"a model of inputs takes tokens (n, K), two at least, got shape {array.shape}; run more data"
        )
    if not np.isfinite(array).all():
        raise ValueError("inputs are NaN or infinite; leave out the batch that makes them")
    return array


def _covariance(moments: Moments) -> F64:
    return np.asarray(moments.covariance, np.float64)


def _rms(z: F64) -> F64:
    return np.asarray(np.sqrt((z**2).mean(1, keepdims=True)))


def _shares(points: F64) -> F64:
    return np.linspace(0, 1, len(points))


def _quantiles(x: F64) -> F64:
    return np.asarray(np.quantile(x, np.linspace(0, 1, QUANTILES)))


#: 0.5 (1 + erf(x / sqrt 2)) of an array.
_share = np.vectorize(lambda x: 0.5 * (1 + erf(x / sqrt(2))), otypes=[np.float64])
_GRID = np.linspace(-6, 6, 4097)
_SHARES = _share(_GRID)


def _normal_share(x: F64) -> F64:
    return np.asarray(np.interp(x, _GRID, _SHARES))


def _scores(column: F64) -> F64:
    """Normal scores of ranks, those of equal values averaged."""
    _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
    order = np.concatenate([[0], np.cumsum(counts)])
    middle = (order[:-1] + order[1:]) / 2 / len(column)
    return np.asarray(np.interp(middle, _SHARES, _GRID)[inverse.reshape(-1)])


def all_of(parts: Iterable[Moments]) -> Moments:
    """The moments of all parts, in their order; ValueError for none."""
    found = list(parts)
    if not found:
        raise ValueError("there are no moments to merge; run data first")
    whole = found[0]
    for part in found[1:]:
        whole = merged(whole, part)
    return whole


__all__ = [
    "InputModel",
    "Moments",
    "Sketch",
    "all_of",
    "copula",
    "elliptical",
    "gaussian",
    "joined",
    "low_rank",
    "merged",
    "moments_of",
    "sketch_of",
]
