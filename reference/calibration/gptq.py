"""GPTQ: codes for given scales, each column's error made up for in those that follow.

For weights w (N, K), inputs with Hessian H and a change D = Q - W, the output error is tr(D H D^T). With H = R R^T, R upper
triangular (`reference.calibration.hessian`), columns go from left to right:

    t_j = w_j + sum over i < j of (w_i - q_i) R_ij / R_jj,        q_j = the nearest value to t_j,

the least squares answer of the columns that are free to the changes of those before: the values of the sweep over a factor of
H^-1, without an inverse. The error of a row is the sum of (t_j - q_j)^2 R_jj^2, and w is only read.

* **Scales first**: they are chosen and rounded for storage before the sweep, so each method that chooses scales works here, and
  codes are those of `quantize` for the float32 nearest to t_j. Where no code saturates, the error of a row is at most a quarter
  of the sum of (s_j R_jj)^2 for steps s_j (Babai's bound).
* **Order**: "stored"; "activation": falling H_jj, of two alike the lower index; "groups": blocks that share a scale by their
  largest H_jj, and inside by H_jj, so that a block's columns stay together. Scales and codes stay in their places in each.
* **Dead channels** keep the nearest rounding of their weights: nothing is known of them, and none of them moves another one.
* **Blocks**: of 128 columns; what all earlier columns do to a block is one matrix product.
* **Cross term**: where H is that of inputs x_q of a quantized prefix and C = mean of (x - x_q) x_q^T, the weights that are
  rounded are W + W C H^-1, which is the least squares answer to W x by x_q.

Everything runs in float64 on NumPy arrays. Sums of linear algebra have no stated order, so results may differ between libraries
where t_j lies within rounding of the middle of two values.

Source: Frantar et al., "GPTQ" (arXiv 2210.17323), algorithm 1; Chen et al. (arXiv 2507.18553) for the factor and the bound;
Arai and Ichikawa, "Quantization Error Propagation" (arXiv 2504.09629), for the cross term, there with a share of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import Namespace, choice, namespace_of
from reference.calibration.hessian import TriangularFactor, checked_hessian, triangular_factor
from reference.calibration.inputs import LARGEST, Matrix
from reference.calibration.nearest import Nearest, by_columns, checked_weights
from reference.calibration.search import search_scales
from reference.quantize.blocks import Blocks
from reference.quantize.quantize import quantize
from reference.quantize.scales import check_scales
from reference.quantize.stored import Quantized, Scales
from reference.schemes.schemes import Scheme, flat_size, scheme_of

Order = npt.NDArray[np.intp]
ORDERS = ("stored", "activation", "groups")
#: Columns of a block: enough for a matrix product, few enough that what is done column by column stays small.
BLOCK = 128


class GPTQResult(NamedTuple):
    """What `gptq` gives.

    quantized: codes and exactly the scales that were chosen. loss: float64 (N,), the output error of each row by the damped
    Hessian, counted from w (with a cross term, from w with it). damping, floor, dead: those of the `TriangularFactor`.
    """

    quantized: Quantized
    loss: Matrix
    damping: float
    floor: float
    dead: npt.NDArray[np.bool_]


def gptq(
    w: Any,
    hessian: Any,
    scheme: str | Scheme,
    *,
    scales: Scales | None = None,
    order: str = "stored",
    damping: float = 0.01,
    cross: Any = None,
    packed: bool = False,
) -> GPTQResult:
    """Codes of w by the rule of this module.

    w: finite float32, bfloat16, float16 or float64 (N, K), a NumPy array; K is the contraction axis. hessian: float32 or
    float64 (K, K), the mean of x x^T over inputs; symmetric, only its lower triangle is read. scheme: a name of `SCHEMES` or a
    record. scales: what `quantize(w, scheme, scales=...)` takes; None, or an outer scale alone: `search_scales` weighted by
    the diagonal of the Hessian. order: "stored", "activation" or "groups". damping: a share of the mean diagonal, 0 or more.
    cross: None, or C, float32 or float64 (K, K). packed: as in `quantize`.

    `quantize(dequantize(quantized), scheme, scales=quantized.scales)` has the same codes where each value of the scheme is
    nearest to itself.

    Raises TypeError for other dtypes or arrays of another library; ValueError for other shapes, weights that are not finite,
    scales that do not fit, a scheme that rounds stochastically, order "groups" where blocks of the flattened matrix do not end
    with rows, and for a Hessian as `triangular_factor` does.
    """
    record = scheme_of(scheme)
    w, _, wide = checked_weights(w, record, "gptq")
    h = checked_hessian(hessian, wide.shape[1])
    blocks = Blocks.of(wide.shape, record.scale, -1)
    columns = column_order(np.diag(h), order, blocks)
    factor = triangular_factor(h, damping=damping, order=columns)
    if cross is not None:
        wide += cross_term(wide, factor, columns, cross)
        w = wide
    scales = scales_of(w, record, scales, np.diag(h))
    swept = Sweep.of(wide, factor.factor, columns).run(column_rule(record, scales, blocks))
    quantized = quantize(swept.targets, record, scales=scales, packed=packed)
    return GPTQResult(quantized, swept.loss, factor.damping, factor.floor, factor.dead)


def scales_of(w: Any, scheme: Scheme, scales: Scales | None, diagonal: Matrix) -> Scales:
    """The scales that are given, or those of a search, around an outer scale that is given alone."""
    if scales is None or (isinstance(scales, Scales) and scales.scale is None):
        return search_scales(
            w, scheme, weights=diagonal.copy(), outer=None if scales is None else scales.outer
        )
    return scales if isinstance(scales, Scales) else Scales(scales)


def column_order(diagonal: Matrix, order: str, blocks: Blocks) -> Order:
    """The columns in the order of the sweep, (K,)."""
    choice(order, ORDERS, "order")
    if order == "stored":
        return np.arange(len(diagonal))
    falling = np.argsort(-diagonal, kind="stable")
    if order == "activation":
        return falling
    width = group_width(blocks)
    groups = np.arange(len(diagonal)) // width
    largest = np.zeros(groups[-1] + 1)
    np.maximum.at(largest, groups, diagonal)
    rank = np.empty(len(largest), np.intp)
    rank[np.argsort(-largest, kind="stable")] = np.arange(len(largest))
    return falling[np.argsort(rank[groups[falling]], kind="stable")]


def group_width(blocks: Blocks) -> int:
    """Columns that share a scale; ValueError where blocks of the flattened matrix do not end with rows."""
    k = blocks.shape[-1]
    if flat := flat_size(blocks.block):
        if k % flat:
            raise ValueError(
                f"order 'groups' keeps the columns of a block together, and blocks of {flat} of the flattened matrix do not "
                f"end with rows of {k}; use order 'stored' or 'activation'"
            )
        return flat
    width = blocks.block[1] if isinstance(blocks.block, tuple) else blocks.block
    return k if width in (-1, "tensor") else int(width)


def cross_term(wide: Matrix, factor: TriangularFactor, order: Order, cross: Any) -> Matrix:
    """W C H^-1, (N, K), by the factor of H in its order."""
    k = wide.shape[1]
    if not isinstance(cross, np.ndarray) or cross.dtype not in (np.float32, np.float64):
        kind = getattr(cross, "dtype", type(cross).__name__)
        raise TypeError(
            f"the cross term is a NumPy array of float32 or float64, got {kind}; convert it first"
        )
    if cross.shape != (k, k) or not np.isfinite(cross).all():
        raise ValueError(
            f"the cross term is finite, of shape ({k}, {k}), the mean of (x - x_q) x_q^T; got shape {cross.shape}"
        )
    moved = (wide @ cross.astype(np.float64))[:, order].T
    upper = factor.factor
    shift = np.empty_like(wide)
    shift[:, order] = np.linalg.solve(upper.T, np.linalg.solve(upper, moved)).T
    return shift


#: The rounding of columns, and for each column the row of its scales.
ColumnRule = tuple[Namespace, Nearest, Order]


class Swept(NamedTuple):
    """What a sweep gives: float32 `targets` (N, K) in their places, whose codes are the result; `loss` (N,); `change` (K, N),
    w - q in the order of the sweep.
    """

    targets: npt.NDArray[np.float32]
    loss: Matrix
    change: Matrix


@dataclass(frozen=True)
class Sweep:
    """Weights and factor in the order of the sweep: what does not depend on scales.

    weights: (K, N), a row for each column of the matrix. ratios: (K, K), R_ij / R_jj above the diagonal. diagonal: R_jj.
    """

    weights: Matrix
    ratios: Matrix
    diagonal: Matrix
    order: Order

    @classmethod
    def of(cls, wide: Matrix, upper: Matrix, order: Order) -> Sweep:
        diagonal = np.diag(upper).copy()
        return cls(np.ascontiguousarray(wide.T[order]), upper / diagonal, diagonal, order)

    def run(self, rule: ColumnRule) -> Swept:
        """All columns, block by block."""
        k, rows = self.weights.shape
        targets, errors = np.empty((rows, k), np.float32), np.empty((k, rows))
        change = np.empty((k, rows))
        for start in range(0, k, BLOCK):
            part = slice(start, min(start + BLOCK, k))
            moved = self.weights[part] + self.ratios[:start, part].T @ change[:start]
            rounded = self._block(part, moved, rule, change[part])
            errors[part] = (moved - (self.weights[part] - change[part])) * self.diagonal[part, None]
            targets[:, self.order[part]] = rounded.T
        return Swept(targets, (errors**2).sum(axis=0), change)

    def _block(self, part: slice, moved: Matrix, rule: ColumnRule, change: Matrix) -> npt.NDArray[np.float32]:
        """The columns of a block: `moved` becomes t, `change` w - q; the float32 of t."""
        ns, nearest, groups = rule
        inside = np.ascontiguousarray(self.ratios[part, part].T)
        rounded = np.empty(moved.shape, np.float32)
        for j in range(len(moved)):
            if j:
                moved[j] += inside[j, :j] @ change[:j]
            rounded[j] = np.clip(moved[j], -LARGEST, LARGEST)
            value = nearest.take(groups[self.order[part.start + j]]).values(ns, rounded[j])
            np.subtract(self.weights[part.start + j], value, out=change[j])
        return rounded


def column_rule(scheme: Scheme, scales: Scales, blocks: Blocks) -> ColumnRule:
    """The rounding of columns under these scales; ValueError where they do not fit."""
    ns = namespace_of(np.empty(0))
    stored = check_scales(ns, scales, scheme, blocks)
    if stored is None:
        raise ValueError(f"scheme {scheme.name} needs its scales; see choose_scales")
    return ns, *by_columns(Nearest.of(ns, stored, blocks, scheme), blocks)


__all__ = ["GPTQResult", "gptq"]
