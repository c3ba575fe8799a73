"""Second moments of a layer's inputs, and the triangular factor that GPTQ sweeps over.

For inputs x the Hessian of a layer's squared output error is H = mean of x x^T: a change D of its weights costs
tr(D H D^T) = mean of ||D x||^2. With J the reversal of rows and columns and J H J = L L^T, the upper triangular R = J L J has
H = R R^T: one Cholesky factorization, no inverse.

* **Dead channels**: H_jj = 0 means that channel j was 0 in all inputs.
* **Damping**: damping * mean(H_jj) is added to the diagonal before it is factored; `triangular_factor` takes the mean over live
  channels and gives dead ones this alone (the mean itself where nothing is added), so that none of them moves another one.
* **Failure**: where the damped H has no Cholesky factor, damping rises by 0.01 up to 1; then 1e-6, 1e-5, ... 1e-1 of the
  largest H_jj are added as well. Each try starts from the diagonal as it was, and the result says what was used.

Everything runs in float64 on NumPy arrays. Sums of linear algebra have no stated order, so results may differ in their last
bits between libraries.

Source: Frantar et al., "GPTQ" (arXiv 2210.17323), section 3, step 3, for damping; the factor itself instead of that of the
inverse: Chen et al., "The Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm" (arXiv 2507.18553).
"""

from __future__ import annotations

from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import check_plain, float_input
from reference.calibration.inputs import LARGEST, Matrix

DAMPING_STEP = 0.01
FLOORS = tuple(10.0**power for power in range(-6, 0))


class SecondMoment(NamedTuple):
    """`value` (K, K) float64, the mean of x x^T over `count` inputs; zeros where count is 0."""

    value: Matrix
    count: int  # type: ignore[assignment]  # not the count of a tuple


class TriangularFactor(NamedTuple):
    """`factor` (K, K) float64, upper triangular, factor factor^T the damped Hessian in the order that was asked for.

    dead: bool (K,), in the order of the Hessian. damping, floor: what the factorization took, floor as a share of the largest
    H_jj, 0 where none was needed.
    """

    factor: Matrix
    dead: npt.NDArray[np.bool_]
    damping: float
    floor: float


def second_moment(x: Any, mask: Any = None) -> SecondMoment:
    """The mean of x x^T over inputs.

    x: finite float32, bfloat16, float16 or float64 of shape (..., K), a NumPy array. mask: None, or bool of shape (...): True
    counts; padding that is False changes no bit of the result. Products and sums run in float64, the result is symmetric.

    Raises TypeError for other dtypes or arrays of another library, ValueError for shapes that do not fit and for NaN or
    infinity in an input that counts.
    """
    if not isinstance(x, np.ndarray):
        raise TypeError(f"second_moment takes NumPy arrays, got {type(x).__name__}; give numpy.asarray of it")
    _, x, _ = float_input(x, "second_moment")
    if x.ndim < 1 or not x.shape[-1]:
        raise ValueError(f"second_moment takes inputs (..., K) with K >= 1, got shape {x.shape}")
    rows = x.reshape(-1, x.shape[-1])
    if mask is not None:
        rows = rows[_checked_mask(mask, x.shape[:-1])]
    wide = rows.astype(np.float64)
    wrong = int((~np.isfinite(wide)).sum())
    if wrong:
        raise ValueError(
            f"second_moment takes finite inputs, got {wrong} of NaN or infinity among {wide.shape}; mask those inputs"
        )
    return SecondMoment(wide.T @ wide / max(len(wide), 1), len(wide))


def triangular_factor(hessian: Any, *, damping: float = 0.01, order: Any = None) -> TriangularFactor:
    """The factor R of the damped Hessian by this module's rules.

    hessian: float32 or float64 (K, K), NumPy, in any scale; it is symmetric, and only its lower triangle is read. damping: a
    finite share of the mean diagonal, 0 or more. order: None, or integers (K,), a permutation: R is the factor of
    H[order][:, order].

    Raises TypeError for other dtypes or arrays of another library; ValueError for other shapes, a damping out of range, an
    order that is no permutation, a hessian that is not finite, has a negative diagonal or is all zeros (nothing was seen), and
    one that no damping makes positive definite.
    """
    check_damping(damping)
    h = checked_hessian(hessian)
    diagonal = np.diag(h).copy()
    dead = diagonal == 0
    live = diagonal[~dead]
    if order is not None:
        order = _checked_order(order, len(h))
        h = (np.tril(h) + np.tril(h, -1).T)[np.ix_(order, order)]
        diagonal = diagonal[order]
    quiet = diagonal == 0
    for share, floor in attempts(damping):
        added = share * live.mean() + floor * live.max()
        upper = upper_factor(h, diagonal + np.where(quiet & (added == 0), live.mean(), added))
        if upper is not None:
            return TriangularFactor(upper, dead, share, floor)
    raise not_positive_definite()


def upper_factor(h: Matrix, diagonal: Matrix) -> Matrix | None:
    """Upper triangular R, R R^T = h with this diagonal, which is written into h; None where there is none.

    Only the lower triangle is read.
    """
    np.fill_diagonal(h, diagonal)
    try:
        lower = np.linalg.cholesky(np.tril(h)[::-1, ::-1].T)
    except np.linalg.LinAlgError:
        return None
    return np.ascontiguousarray(lower[::-1, ::-1], np.float64)


def attempts(damping: float) -> list[tuple[float, float]]:
    """(damping, floor) of each try, in order; no step is the sum of steps before it."""
    if damping >= 1:
        return [(damping, floor) for floor in (0.0, *FLOORS)]
    steps = int((1 - damping) / DAMPING_STEP) + 1
    raised = [min(damping + DAMPING_STEP * step, 1.0) for step in range(steps)]
    if raised[-1] < 1:
        raised.append(1.0)
    return [(share, 0.0) for share in raised] + [(1.0, floor) for floor in FLOORS]


def check_damping(damping: Any) -> None:
    """ValueError unless damping is a share of the mean diagonal."""
    if isinstance(damping, (bool, str)) or not (isfinite(damping) and damping >= 0):
        raise ValueError(
            f"damping is a finite share of the mean diagonal, 0 or more, got {damping!r}; 0.01 is usual"
        )


def checked_hessian(hessian: Any, size: int | None = None) -> Matrix:
    """A copy in float64; the errors of `triangular_factor`. size: the K that it should have."""
    check_plain(hessian)
    if not isinstance(hessian, np.ndarray) or hessian.dtype not in (np.float32, np.float64):
        kind = getattr(hessian, "dtype", type(hessian).__name__)
        raise TypeError(f"the hessian is a NumPy array of float32 or float64, got {kind}; convert it first")
    wanted = hessian.shape[-1] if size is None and hessian.ndim else size
    if hessian.shape != (wanted, wanted):
        raise ValueError(f"the hessian is ({wanted}, {wanted}), inputs by inputs, got shape {hessian.shape}")
    h = hessian.astype(np.float64)
    if not h.size:
        raise ValueError("a hessian of no inputs; give at least one column")
    most, least = float(np.abs(h).max()), float(np.diag(h).min())
    complaint = complaint_of(most, least)
    if complaint:
        raise ValueError(complaint)
    return h


def complaint_of(most: float, least: float) -> str:
    """What is wrong with the values of a Hessian, by its largest magnitude (or NaN) and its least diagonal element."""
    if not most <= LARGEST:  # a NaN is not, either
        return "the hessian is finite and within float32, got NaN or larger; sum x x^T without infinities"
    if least < 0:
        return "the diagonal of a hessian is a sum of squares, got negative elements; sum x x^T again"
    zeros = "a hessian of zeros: no input was seen; run calibration data, or round to nearest and prune by magnitude"
    return "" if most else zeros


def not_positive_definite() -> ValueError:
    """The error of a Hessian for which all tries failed."""
    return ValueError(
        f"the hessian is not positive definite with damping 1 and {FLOORS[-1]} of its largest diagonal element added; "
        f"it is no sum of x x^T: sum it again, in float32 or wider"
    )


def _checked_mask(mask: Any, shape: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """The mask, flat."""
    check_plain(mask)
    if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_ or mask.shape != shape:
        kind = f"{getattr(mask, 'dtype', type(mask).__name__)} of shape {getattr(mask, 'shape', ())}"
        raise ValueError(f"mask is a NumPy array of bool of shape {shape}, True for what counts; got {kind}")
    return mask.reshape(-1)


def _checked_order(order: Any, size: int) -> npt.NDArray[np.intp]:
    array = np.asarray(order)
    if array.shape != (size,) or array.dtype.kind not in "iu" or (np.sort(array) != np.arange(size)).any():
        raise ValueError(
            f"order is a permutation of 0 to {size - 1}, one integer a column, got {array.dtype} of shape {array.shape}; "
            f"numpy.argsort gives one"
        )
    return array.astype(np.intp)


__all__ = ["SecondMoment", "TriangularFactor", "second_moment", "triangular_factor"]
