"""What the functions of this folder take: NumPy arrays, checked, in float64; and float64 results in a stated dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from reference.arrays.namespace import FLOAT_DTYPES, Array, DTypeLike, dtype_name, float_input, namespace_of
from reference.arrays.softfloat import float32_bits
from reference.formats.encode import to_dtype_bits

Matrix = npt.NDArray[np.float64]
#: The largest float32.
LARGEST = float(np.finfo(np.float32).max)


def float_array(x: Any, what: str, name: str) -> Any:
    """x if it is a NumPy array of floats, as a plain array; TypeError that names the argument otherwise."""
    if not isinstance(x, (np.ndarray, np.generic)):
        raise TypeError(
            f"{what} takes {name} as a NumPy array, got {type(x).__name__}; give numpy.asarray of it"
        )
    return float_input(x, f"{what}: {name}")[1]


def weight_matrix(w: Any, what: str, name: str = "w") -> Any:
    """A finite float matrix (N, K) as it is; TypeError for other arrays, ValueError for other shapes, NaN and infinity."""
    w = float_array(w, what, name)
    if w.ndim != 2:
        raise ValueError(
            f"{what} takes {name} as a matrix (outputs, inputs), got shape {w.shape}; reshape it"
        )
    check_finite(w, what, name)
    return w


def input_values(values: Any, size: int, what: str, name: str) -> Matrix:
    """A vector (size,) of non-negative finite numbers in float64; ValueError or TypeError that names the argument."""
    values = float_array(values, what, name)
    if values.shape != (size,):
        raise ValueError(
            f"{what} takes {name} of shape ({size},), one for each input, got {values.shape}; use the statistics of this layer"
        )
    check_finite(values, what, name)
    wide: Matrix = values.astype(np.float64)
    if (wide < 0).any():
        raise ValueError(f"{what} takes {name} of magnitudes, got negative ones; take their absolute values")
    return wide


def second_moments(hessian: Any, size: int, what: str) -> Matrix:
    """A finite (size, size) matrix in float64 with a non-negative diagonal; ValueError or TypeError otherwise."""
    hessian = float_array(hessian, what, "the hessian")
    if hessian.shape != (size, size):
        raise ValueError(
            f"{what} takes a hessian of shape ({size}, {size}), inputs by inputs, got {hessian.shape}; "
            f"use the statistics of this layer"
        )
    check_finite(hessian, what, "the hessian")
    wide: Matrix = hessian.astype(np.float64)
    if (np.diag(wide) < 0).any():
        raise ValueError(
            f"{what}: the diagonal of a hessian is a sum of squares, got negative elements; sum x x^T again"
        )
    return wide


def check_finite(x: Any, what: str, name: str) -> None:
    """ValueError for NaN and infinities."""
    wrong = int((~np.isfinite(x.astype(np.float64))).sum())
    if wrong:
        raise ValueError(
            f"{what} takes finite numbers, got {wrong} of NaN or infinity in {name}; replace them or leave this layer out"
        )


def rounded(values: Matrix, dtype: DTypeLike) -> Any:
    """float64 rounded to float32 and then to `dtype`; finite values out of range become the largest finite one.

    float64 stays as it is.
    """
    name = dtype_name(dtype, FLOAT_DTYPES, "dtype")
    if name == "float64":
        return values
    ns = namespace_of(values)
    with np.errstate(all="ignore"):
        bounded = np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), values)
        short = bounded.astype(np.float32)
    return to_dtype_bits(ns, float32_bits(ns, short, "float32"), name, saturate=True)


def tree_sum(x: Array, axis: int = -1) -> Array:
    """The sum along one axis, which goes away: adjacent pairs, in a tree filled up with zeros to a power of two.

    x: a NumPy array or a tensor on any device, of any float dtype, to which every addition is rounded. +0 along an empty axis.
    """
    ns = namespace_of(x)
    x = ns.moveaxis(x, axis, 0)
    if not len(x):
        return ns.full(tuple(x.shape[1:]), 0, ns.dtype_name(x), x)
    while len(x) > 1:
        even = len(x) // 2 * 2
        sums = x[0:even:2] + x[1:even:2]
        # An odd one out meets the zero that would stand there.
        x = ns.concatenate([sums, x[-1:] + 0], 0) if len(x) > even else sums
    return x[0]


__all__ = [
    "LARGEST",
    "Matrix",
    "check_finite",
    "float_array",
    "input_values",
    "rounded",
    "second_moments",
    "tree_sum",
    "weight_matrix",
]
