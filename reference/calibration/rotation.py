"""Rotations, and the gains of norms folded into the weights behind them.

(x R) (w R)^T = x w^T for every orthogonal R. A Hadamard matrix spreads each channel over all that it mixes, so inputs and
weights lose their outliers (Ashkboos et al., QuaRot, arXiv 2404.00456, section 3). A rotation moves through a norm only when
that has no gain of its own: `fold_gain` moves it into the weights first (Ashkboos et al., SliceGPT, arXiv 2401.15024, section
3.1).

The matrix of a block of b channels is the one of `reference.layers.hadamard`, so inputs may be rotated online by its kernels
while their weights were rotated here: R = diag(signs) H / sqrt(b). For b = m 2^k with m no power of two, H is the Kronecker
product of a constructed matrix of order m (`reference.calibration.hadamard_matrices`) and Sylvester's of order 2^k.

Everything is float64, and rounded once at the end. Sums have an order: first the m parts of a block, one after the other, then
the butterfly of `reference.layers.hadamard`, distances 1, 2, 4, ...; products with a matrix that is given have none.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, DTypeLike, Namespace, namespace_of
from reference.calibration.hadamard_matrices import hadamard_matrix, split_length
from reference.calibration.inputs import Matrix, float_array, rounded
from reference.layers.hadamard import signs
from reference.quantize.blocks import normalize_axis

#: Elements that are mixed at a time.
CHUNK = 1 << 22
#: How far lengths and products of a given rotation may be off: it was made in float32, perhaps.
ORTHOGONAL = 1e-4


def fold_gain(gain: Any, w: Any, *, dtype: DTypeLike | None = None) -> Any:
    """w * gain along the last axis, so that the norm before keeps no gain: (N, K), rounded once.

    gain: (K,) floats, as the norm multiplies them (1 + g where a norm stores g). w: (..., K) float32, bfloat16, float16 or
    float64, NumPy. dtype: of the result, w's by default; the product of two 16-bit floats needs float32 to be exact. Finite
    products stay finite. Raises TypeError for other arrays, ValueError where the shapes do not fit.
    """
    gain, w = float_array(gain, "fold_gain", "gain"), float_array(w, "fold_gain", "w")
    check_gain(gain.shape, w.shape)
    product = w.astype(np.float64) * gain.astype(np.float64)
    return rounded(product, w.dtype if dtype is None else dtype)


def rotate(
    w: Any, rotation: Any, *, axis: int = -1, inverse: bool = False, dtype: DTypeLike | None = None
) -> Any:
    """w R along an axis, block by block, or w R^T with `inverse`: w's shape, rounded once.

    w: float32, bfloat16, float16 or float64 of at least one axis, NumPy. rotation: a block size b that divides the axis, for
    the Hadamard rotation of this module (the axis' length rotates all of it), or an orthogonal (b, b) float matrix R. Inputs
    and weights that contract over an axis are both rotated along it; what produces rotated channels is rotated along its output
    axis. dtype: of the result, w's by default. Finite values stay finite; NaN and infinities spread over their block.

    Raises TypeError for other arrays; ValueError for a block that does not divide the axis, an order without a Hadamard matrix,
    and a matrix that is not orthogonal.
    """
    w = float_array(w, "rotate", "w")
    if not w.ndim:
        raise ValueError("rotate takes an array with an axis, got a single number; reshape it")
    axis = normalize_axis(axis, w.shape)
    block, matrix = block_of(rotation, w.shape[axis])
    moved = np.moveaxis(w, axis, -1)
    flat = moved.reshape((-1, block))
    rotated = np.empty(flat.shape)
    step = max(CHUNK // block, 1)
    for start in range(0, len(flat), step):
        rows = flat[start : start + step].astype(np.float64)
        rotated[start : start + step] = (
            mixed(rows, inverse) if matrix is None else rows @ (matrix.T if inverse else matrix)
        )
    turned = np.moveaxis(rotated.reshape(moved.shape), -1, axis)
    return rounded(np.ascontiguousarray(turned), w.dtype if dtype is None else dtype)


def rotation_matrix(block: int) -> Matrix:
    """The (block, block) float64 matrix R that `rotate(w, block)` multiplies by; ValueError where there is none."""
    return np.asarray(rotate(np.eye(block), block))


def mixed(rows: Array, inverse: bool) -> Array:
    """float64 rows (n, b) times R, or times its transpose: NumPy arrays, or tensors on any device."""
    ns, block = namespace_of(rows), rows.shape[1]
    order, base = split_length(block)
    sign = ns.constant(np.asarray(signs(block), np.float64), rows)
    parts = (rows if inverse else rows * sign).reshape((-1, order, base))
    if order > 1:
        matrix = np.asarray(hadamard_matrix(order), np.float64)
        parts = _mix_parts(parts, ns.constant(matrix.T if inverse else matrix, rows))
    turned = _butterflies(ns, parts).reshape((-1, block)) * (1 / sqrt(block))
    return turned * sign if inverse else turned


def _mix_parts(parts: Array, matrix: Array) -> Array:
    """Sum over j of matrix[j, i] parts[:, j], in the order of j.

    Products by 1 and -1 are exact, so a library that fuses them with the sums changes nothing.
    """
    total = matrix[0][:, None] * parts[:, :1]
    for j in range(1, len(matrix)):
        total += matrix[j][:, None] * parts[:, j : j + 1]
    return total


def _butterflies(ns: Namespace, parts: Array) -> Array:
    """Sums and differences of elements of the last axis at distances 1, 2, 4, ..."""
    shape, distance = parts.shape, 1
    while distance < shape[-1]:
        pairs = parts.reshape((-1, 2, distance))
        left, right = pairs[:, 0], pairs[:, 1]
        parts = ns.stack([left + right, left - right], 1)
        distance *= 2
    return parts.reshape(shape)


def block_of(rotation: Any, length: int) -> tuple[int, Any]:
    """(block, matrix in float64 or None) of a rotation; ValueError or TypeError where it is none for an axis of this length."""
    matrix = None
    if isinstance(rotation, (bool, np.bool_)):
        raise TypeError(f"a rotation is a block size or a matrix, got {rotation!r}")
    if hasattr(rotation, "__index__") and not np.ndim(rotation):
        block = int(rotation)
    else:
        matrix = float_array(rotation, "rotate", "rotation").astype(np.float64)
        block = matrix.shape[0] if matrix.ndim else 0
        check_orthogonal(matrix)
    if block < 1 or length % block:
        raise ValueError(
            f"rotate mixes blocks that divide the axis, got {block} for a length of {length}; choose a divisor"
        )
    if matrix is None:
        split_length(block)
    return block, matrix


def check_orthogonal(matrix: Any) -> None:
    """ValueError unless a matrix is square and keeps lengths: its columns', and those of two fixed vectors there and back."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.size:
        raise ValueError(f"a rotation is a square matrix, got shape {matrix.shape}; give (b, b)")
    size = len(matrix)
    probes = np.stack([np.cos(np.arange(size)), np.sin(np.arange(size) ** 2 % 7.0)], axis=1)
    back = matrix.T @ (matrix @ probes)
    off = max(abs((matrix**2).sum(axis=0) - 1).max(), abs(back - probes).max())
    if not off <= ORTHOGONAL:
        raise ValueError(
            f"a rotation is orthogonal, R^T R = I, got a matrix that is off by {off:.2g}; use Q of its QR decomposition"
        )


def check_gain(gain: tuple[int, ...], w: tuple[int, ...]) -> None:
    """ValueError unless a gain of this shape has one element for each input of w."""
    if len(gain) != 1 or not w or w[-1] != gain[0]:
        raise ValueError(
            f"fold_gain takes a gain (K,) and weights (..., K), got {gain} and {w}; the gain belongs to the norm before w"
        )


__all__ = ["fold_gain", "rotate", "rotation_matrix"]
