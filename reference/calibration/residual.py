"""What stands beside a quantized weight to make up for its error: a change of the bias, and a product of two thin matrices.

* `correct_bias`: a change of the weights from W to Q moves outputs by (Q - W) x, on average by (Q - W) mean(x). Adding
  (W - Q) mean(x) to the bias takes that away, and lowers the mean squared error of an output by the square of what it moved on
  average (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv 1906.04721, section
  4.2).
* `low_rank_residual`: a product of two thin matrices in 16 bits, the best one for the outputs, as follows.

With D = w - q the error of the weight and H the mean of x x^T, tr((D - A B) H (D - A B)^T) over A (N, r) and B (r, K) is least
for A the first r left singular vectors of D R, R R^T = H, and B = A^T D: by Eckart and Young A B R is the truncated singular
value decomposition of D R. So A are eigenvectors of D H D^T and no inverse of R is needed; what is left is the sum of the other
eigenvalues. (SVDQuant, Li et al., arXiv 2411.05007, section 4.2, decomposes the weight before it is quantized, without H; LQER,
Zhang et al., arXiv 2402.02446, equation 9, the error with the diagonal of H alone.)

Float64 inside; A is rounded to its dtype first, and B answers it by least squares. Sums of linear algebra have no stated order.
Of each column of A the element of largest magnitude, the first of equals, is positive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reference.arrays.namespace import DTypeLike
from reference.calibration.inputs import (
    Matrix,
    check_finite,
    float_array,
    rounded,
    second_moments,
    weight_matrix,
)
from reference.quantize.quantize import dequantize
from reference.quantize.stored import Quantized


def correct_bias(w: Any, quantized: Quantized, mean: Any) -> Matrix:
    """(W - Q) mean, what is to be added to the bias: float64 (N,).

    w: finite float32, bfloat16, float16 or float64 (N, K), a NumPy array. quantized: the `Quantized` of such a matrix.
    mean: the mean of the layer's inputs, finite floats (K,) of either sign.

    Raises TypeError for other arrays, dtypes and what is not `Quantized`, ValueError for shapes that do not fit and values that
    are not finite.
    """
    w = weight_matrix(w, "correct_bias")
    mean = float_array(mean, "correct_bias", "the mean")
    if mean.shape != w.shape[1:]:
        raise ValueError(
            f"correct_bias takes the mean of inputs, shape {w.shape[1:]}, got shape {mean.shape}; use the statistics of this "
            f"layer"
        )
    check_finite(mean, "correct_bias", "the mean")
    check_quantized_like(quantized, w.shape, "correct_bias")
    change = w.astype(np.float64) - dequantize(quantized).astype(np.float64)
    bias: Matrix = change @ mean.astype(np.float64)
    return bias


class LowRank(NamedTuple):
    """left (N, r) and right (r, K): the weight is about the quantized one + left @ right."""

    left: Any
    right: Any


def low_rank_residual(
    w: Any, quantized: Quantized, hessian: Any, rank: int, *, dtype: DTypeLike | None = None
) -> LowRank:
    """Two factors of the error of a quantized weight that leave the least output error.

    w: finite float32, bfloat16, float16 or float64 (N, K), NumPy. quantized: w in any scheme, all of whose values are finite.
    hessian: (K, K) mean of x x^T. rank: 0 to min(N, K). dtype: of the factors, w's by default. Raises TypeError for other
    arrays, ValueError for shapes that do not fit, a rank out of range, NaN and infinities.
    """
    w = weight_matrix(w, "low_rank_residual")
    check_quantized_like(quantized, w.shape, "low_rank_residual")
    check_rank(rank, w.shape)
    h = second_moments(hessian, w.shape[1], "low_rank_residual")
    values = np.asarray(dequantize(quantized), np.float64)
    check_finite(values, "low_rank_residual", "the values of quantized")
    d = w.astype(np.float64) - values
    dtype = w.dtype if dtype is None else dtype
    left = rounded(_directions(d, h, rank), dtype)
    return LowRank(left, rounded(_answer(left.astype(np.float64), d), dtype))


def _directions(d: Matrix, h: Matrix, rank: int) -> Matrix:
    """The first left singular vectors of D R (N, rank), signs fixed."""
    costs = d @ (h + h.T) / 2 @ d.T
    vectors = np.linalg.eigh((costs + costs.T) / 2)[1][:, ::-1][:, :rank]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return vectors * np.where(largest < 0, -1.0, 1.0)


def _answer(left: Matrix, d: Matrix) -> Matrix:
    """The B of least squares for A = left."""
    if not left.shape[1]:
        return np.zeros((0, d.shape[1]))
    return np.asarray(np.linalg.solve(left.T @ left, left.T @ d), np.float64)


def check_quantized_like(quantized: Any, shape: tuple[int, ...], what: str) -> None:
    """TypeError or ValueError unless quantized is a stored tensor of this shape."""
    if not isinstance(quantized, Quantized):
        raise TypeError(
            f"{what} takes a Quantized, as quantize or gptq return it, got {type(quantized).__name__}"
        )
    if quantized.shape != tuple(shape):
        raise ValueError(
            f"{what} takes w and its quantized form, got shapes {tuple(shape)} and {quantized.shape}"
        )


def check_rank(rank: int, shape: tuple[int, ...]) -> None:
    """ValueError unless a matrix of this shape has factors of this rank."""
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= min(shape):
        raise ValueError(
            f"rank is an integer from 0 to {min(shape)} for shape {tuple(shape)}, got {rank!r}; 32 is usual"
        )


__all__ = ["LowRank", "correct_bias", "low_rank_residual"]
