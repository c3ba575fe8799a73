"""SparseGPT: N:M pruning that makes up for each dropped weight in those that follow it.

For outputs w x with H the sum of x x^T over tokens, a change D of the weights costs tr(D H D^T). Let U be the upper triangular
factor with U^T U = H^-1, and go through the columns in order. Column j gets its final value q_j: 0 where the mask drops it,
else w_j itself or the nearest value that storage can hold. With e = (w_j - q_j) / U_jj, columns i > j become w_i - e U_ji, the
least squares answer to that change; the cost grows by the sum of e**2.

* **Mask**: a group of M is decided when its first column is reached, from weights already updated by the columns before it:
  the N largest |w_j| / U_jj, which is the root of the cost of dropping one alone. Ties keep the lower index.
* **Blocks**: inside a block of columns updates are made at once, columns behind the block get those of the whole block as one
  product. It is the same mathematics; `block` is a multiple of M, so that no group is decided before its weights are final.
* **Storage**: the survivor is rounded to float32 and w's dtype (saturating), and with a `scheme` to its nearest value by scales
  that are chosen once, from the w that is given. So the errors of storage are made up for, too.
* **Dead channels**: H_jj = 0 means that channel j was 0 in all inputs. Its weights become 0 and H_jj = 1.
* **Damping**: damping * mean(H_jj), with the dead ones at 1, is added to the diagonal before it is factored.
* **Failure**: where the damped H has no Cholesky factor, damping rises by 0.01 up to 1; then 1e-6, 1e-5, ... 1e-1 of the
  largest H_jj are added as well. Each try starts from the diagonal as it was, and the result says what was used.

Everything runs in float64 on NumPy arrays. Sums of linear algebra have no stated order, so this is the one rule here whose
result may differ in its last bits between libraries, and its mask where two scores nearly tie.

Source: Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot" (arXiv 2301.00774),
section 3, algorithm 1; dead channels, damping and the order of masks as in the authors' code, which keeps the name N of N:M
for what is pruned. Here N are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import namespace_of
from reference.arrays.softfloat import float32_bits
from reference.calibration.hessian import attempts, checked_hessian, not_positive_definite, upper_factor
from reference.calibration.inputs import LARGEST, Matrix
from reference.formats.encode import to_dtype_bits
from reference.quantize.fake_quantize import fake_quantize
from reference.quantize.scales import choose_scales
from reference.quantize.stored import Scales
from reference.schemes.schemes import Scheme, scheme_of
from reference.sparsity.prune import check_groups, float_weights, parse_pattern

#: Column of weights (rows,) and its index to the column that is stored.
Store = Callable[[Matrix, int], Matrix]


class InverseFactor(NamedTuple):
    """`upper` (K, K) float64 with upper^T upper = H^-1, the damping and the floor that it took, and `dead` (K,) bool."""

    upper: Matrix
    damping: float
    floor: float
    dead: npt.NDArray[np.bool_]


class SparseGPTResult(NamedTuple):
    """What `sparsegpt` made.

    weights: of the shape and dtype of w, zeros (+0) where the mask drops them. mask: bool, N kept of every M. loss: the sum of
    all e**2, tr(D H D^T) with the damped H, D counted from w without its dead channels. damping, floor: what the Cholesky
    factor took, floor as a share of the largest H_jj, 0 where none was needed. dead: bool (K,). scales: what
    `quantize(weights, scheme, scales=...)` needs for the same values, None without a scheme.
    """

    weights: Any
    mask: npt.NDArray[np.bool_]
    loss: float
    damping: float
    floor: float
    dead: npt.NDArray[np.bool_]
    scales: Scales | None


def sparsegpt(
    w: Any,
    hessian: Any,
    *,
    pattern: str = "2:4",
    block: int = 128,
    damping: float = 0.01,
    scheme: str | Scheme | None = None,
) -> SparseGPTResult:
    """Prune and update w by the rule of this module.

    w: finite float32, bfloat16 or float16 of shape (outputs, K), a NumPy array; K is the contraction axis. hessian: float32 or
    float64 (K, K), the sum of x x^T over inputs, in any scale; it is symmetric, and only its lower triangle is read. pattern:
    "N:M", N kept. block: a multiple of M. damping: 0 to 1. scheme: None, or a name of `SCHEMES` or a record whose blocks lie
    along K, or span rows too, or the tensor. Zeros of the mask stay 0 in `weights`; a scheme with zero points may store
    them as another value.

    Raises TypeError for other dtypes or arrays of another library; ValueError for other shapes, K % M != 0, block % M != 0,
    damping out of range, weights or a hessian that are not finite, a negative diagonal, a hessian of zeros (nothing was
    seen: prune by magnitude), one that no damping makes positive definite, and schemes of flat blocks or with quantized
    scales.
    """
    kept, group = parse_pattern(pattern)
    w, wide = _checked_weights(w, group, pattern)
    check_block(block, group, pattern)
    factor = inverse_factor(hessian, damping=damping, size=wide.shape[1])
    scales = None if scheme is None else choose_scales(w, scheme_of(scheme))
    store = _rounding(w, scheme, scales)
    wide[:, factor.dead] = 0
    mask = np.zeros(wide.shape, bool)
    loss = _sweep(wide, mask, factor.upper, (kept, group), block, store)
    return SparseGPTResult(_as_dtype(wide, w), mask, loss, *factor[1:], scales)


def inverse_factor(hessian: Any, *, damping: float = 0.01, size: int | None = None) -> InverseFactor:
    """The factor U of H^-1 = U^T U by this module's rules of dead channels, damping and failure.

    hessian: float32 or float64 (K, K), NumPy. size: the K that it should have. Errors as in `sparsegpt`. U is the inverse of
    the R of `reference.calibration.hessian`: no product of an inverse.
    """
    if isinstance(damping, bool) or not 0 <= damping <= 1:
        raise ValueError(f"damping is a share of the mean diagonal, 0 to 1, got {damping!r}; 0.01 is usual")
    h = checked_hessian(hessian, size)
    dead = np.diag(h) == 0
    h[dead, dead] = 1
    diagonal = np.diag(h).copy()
    for share, floor in attempts(damping):
        upper = upper_factor(h, diagonal + share * diagonal.mean() + floor * diagonal.max())
        if upper is not None:
            return InverseFactor(np.triu(np.linalg.inv(upper)), share, floor, dead)
    raise not_positive_definite()


def _sweep(
    wide: Matrix, mask: Any, upper: Matrix, pattern: tuple[int, int], block: int, store: Store
) -> float:
    """Prune `wide` in place and fill `mask`; the sum of all e**2."""
    loss = 0.0
    for start in range(0, wide.shape[1], block):
        stop = min(start + block, wide.shape[1])
        errors = _sweep_block(wide, mask, upper, pattern, (start, stop), store)
        wide[:, stop:] -= errors @ upper[start:stop, stop:]
        loss += float((errors**2).sum())
    return loss


def _sweep_block(
    wide: Matrix, mask: Any, upper: Matrix, pattern: tuple[int, int], columns: tuple[int, int], store: Store
) -> Matrix:
    """The columns of a block, updated among themselves; the errors e, (rows, columns of the block)."""
    kept, group = pattern
    start, stop = columns
    errors = np.zeros((len(wide), stop - start))
    diagonal = np.diag(upper)
    for j in range(start, stop):
        if j % group == 0:
            scores = np.abs(wide[:, j : j + group]) / diagonal[j : j + group]
            mask[:, j : j + group] = _largest(scores, kept)
        final = np.where(mask[:, j], store(wide[:, j], j), 0.0)
        errors[:, j - start] = (wide[:, j] - final) / diagonal[j]
        wide[:, j + 1 : stop] -= np.outer(errors[:, j - start], upper[j, j + 1 : stop])
        wide[:, j] = final
    return errors


def _largest(scores: Matrix, kept: int) -> npt.NDArray[np.bool_]:
    """Bool of scores (rows, M): the `kept` largest of each row, ties to the lower index."""
    order = np.argsort(-scores, axis=1, kind="stable")
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, order[:, :kept], True, axis=1)
    return mask


def _as_dtype(column: Matrix, w: Any) -> Any:
    """float64 rounded to float32 and then to the dtype of w; what is out of range is its largest finite value."""
    ns = namespace_of(w)
    short = np.clip(column, -LARGEST, LARGEST).astype(np.float32)
    return to_dtype_bits(ns, float32_bits(ns, short, "float32"), ns.dtype_name(w), saturate=True)


def _rounding(w: Any, scheme: str | Scheme | None, scales: Scales | None) -> Store:
    """What stores a column: rounding to w's dtype and, with a scheme, to its values by these scales."""
    if scheme is None:
        return lambda column, _: np.asarray(_as_dtype(column, w), np.float64)
    record, width = _by_columns(scheme_of(scheme))

    def store(column: Matrix, j: int) -> Matrix:
        short = _as_dtype(column[:, None], w)
        part = _scales_of(scales, slice(j // width, j // width + 1) if width else slice(None))
        return np.asarray(fake_quantize(short, record, scales=part), np.float64)[:, 0]

    return store


def _by_columns(scheme: Scheme) -> tuple[Scheme, int]:
    """The record of one column by itself, and how many columns of the matrix share a scale (0: all)."""
    block = scheme.scale.block
    double = scheme.outer is not None and scheme.outer.statistic != "absmax_elements"
    if double or (isinstance(block, str) and block != "tensor"):
        raise ValueError(
            f"sparsegpt stores one column after the other, and {scheme.name} has flat blocks or quantized scales; "
            f"choose a scheme whose blocks lie along K"
        )
    if block in (-1, "tensor"):
        return scheme, 0
    narrow = (block[0], 1) if isinstance(block, tuple) else 1
    width = block[1] if isinstance(block, tuple) else int(block)
    return replace(scheme, scale=replace(scheme.scale, block=narrow)), width


def _scales_of(scales: Scales | None, columns: slice) -> Scales:
    """The scales of some columns of blocks; scales of the whole tensor stay."""
    if scales is None:
        return Scales()
    scale, zero = (
        part if part is None or part.ndim < 2 else part[:, columns] for part in (scales.scale, scales.zero)
    )
    return Scales(scale, scales.outer, zero)


def _checked_weights(w: Any, group: int, pattern: str) -> tuple[Any, Matrix]:
    """(w, a copy in float64), or the errors of `sparsegpt`."""
    if not isinstance(w, np.ndarray):
        raise TypeError(f"sparsegpt takes NumPy arrays, got {type(w).__name__}; give numpy.asarray of it")
    _, w, _ = float_weights(w, "sparsegpt")
    if w.ndim != 2:
        raise ValueError(
            f"sparsegpt takes a matrix (outputs, inputs), got shape {w.shape}; give them one by one"
        )
    check_groups(w.shape, group, pattern)
    wide = w.astype(np.float64)
    wrong = int((~np.isfinite(wide)).sum())
    if wrong:
        raise ValueError(
            f"sparsegpt takes finite weights, got {wrong} of NaN or infinity, which updates would spread; replace them"
        )
    return w, wide


def check_block(block: int, group: int, pattern: str) -> None:
    """ValueError unless a block is whole groups."""
    if isinstance(block, bool) or not isinstance(block, int) or block < 1 or block % group:
        raise ValueError(
            f"block is a positive multiple of the {group} of {pattern!r}, got {block!r}; 128 is usual, "
            f"or {max(-(-128 // group) * group, group)} here"
        )
