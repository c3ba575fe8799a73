"""`linear`: inputs times the transpose of a stored weight, as a layer computes it; and how far a kernel may be from it.

`matmul` has the tiers, `error_bound` the notation of the proof. Kernels that keep the weight's codes compute, for a row n of
the weight with blocks b along K,

    y[n] = sum over b of s[n, b] (sum of c x  -  z[n, b] sum of x)  + bias,

or, where zero points are values, s (sum of c x) + z (sum of x). So c x and z x are terms of their own, and what the bound of
a product calls |c - z| is |c| + |z| here, at most |c - z| + 2 |c|.

Kernels also take codes of 4 bits with up to 24 added, and take the 24 off again block by block: (c + 24) x and (24 + z) x are
the terms of a block then, at most |c - z| + 2 |c| + 48 of it, in sums of B products instead of K. These sums precede a
block's scale: where they may overflow, nothing is promised, however small the scale.

float32 sums in any order: a term passes at most K roundings, two for each factor of a scale (one in the value of T, one in the
kernel), and four under a zero point (the product with z, the difference, and these two in the value). Values that have no
factors in T (a codebook, a value for zero, blocks of the flattened weight) have three in the kernel at most.

Sums on tensor cores: additions of 16 products cut where float32 would round. A product, and the accumulator, loses less than
2**-24 of the largest magnitude (at least 24 fraction bits are kept for 16-bit operands), the delivered sum less than 2**-23:
K (1 + 3 / 16) times 2**-24 S in all. Counting every addition twice covers both ways.

What is added to codes of 4 bits is summed in parts of 32 products, spread over eight instructions so that only every fourth
product of one is not zero: a sum then loses 32 (1 + 3 / 4) = 56 units of 2**-24. 24 x passes one such sum, (24 + z) x two and a
product between them: 24 * 56 + 24 * 113 units of a part's sum of |x|, which is 48 with 85 roundings (PARTED and ZERO).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from reference.arrays.namespace import Array, DTypeLike, as_array, dtype_name, namespace_of
from reference.matmul.error_bound import UNDERFLOW, UPWARD, float32_error, of_library, rounding_error
from reference.matmul.exact import F64, RESULTS
from reference.matmul.matmul import bias_of, matmul, operands_of
from reference.matmul.operands import Operand, host_array, operand_of
from reference.quantize.quantize import Quantized, dequantize, unpacked, with_plain_scales


def linear(
    x: Array | Quantized,
    w: Quantized,
    bias: Array | None = None,
    *,
    accumulation: str = "exact",
    out_dtype: DTypeLike | None = None,
    **options: Any,
) -> Array:
    """x (..., K) times the transpose of w (N, K), plus bias (N): (..., N) in `out_dtype`.

    w: a matrix whose blocks lie along K (axis 1), packed or not. accumulation and options: see `matmul`. ``exact`` is the
    product of the dequantized float32 weight, rounded once. out_dtype: by default x's where `matmul` has that, else float32.
    Raises ValueError for a weight of other axes, inputs of another length and a bias of another shape, TypeError for a
    weight that is no `Quantized`; else as `matmul` does.
    """
    x = x if isinstance(x, Quantized) else as_array(x)
    bias = None if bias is None else as_array(bias)
    check_linear(x, w, bias)
    out_dtype = result_dtype(x) if out_dtype is None else out_dtype
    vector = len(x.shape) == 1 and not isinstance(x, Quantized)
    rows: Any = x
    rows = rows[None] if vector else rows
    result = matmul(rows, transposed(w), accumulation=accumulation, out_dtype=out_dtype, bias=bias, **options)
    return result[0] if vector else result


def result_dtype(x: Array | Quantized) -> str:
    """The dtype of a result whose dtype is not given."""
    own = "" if isinstance(x, Quantized) else namespace_of(x).dtype_name(x)
    return own if own in RESULTS else "float32"


def check_linear(x: Any, w: Any, bias: Any) -> None:
    """Raise as `linear` does where shapes do not go together."""
    if not isinstance(w, Quantized):
        raise TypeError(f"linear takes a Quantized weight, got {type(w).__name__}; quantize it first")
    if len(w.shape) != 2 or w.axis != 1:
        raise ValueError(
            f"linear takes a weight (N, K) with blocks along axis 1, got shape {tuple(w.shape)}, axis {w.axis}; "
            f"quantize(weight, scheme, axis=-1) of a matrix"
        )
    shape = tuple(x.shape)
    if not shape or shape[-1] != w.shape[1]:
        raise ValueError(
            f"linear of inputs {shape} and a weight {tuple(w.shape)}: the last axes must be the same"
        )
    if bias is not None and tuple(bias.shape) != (w.shape[0],):
        raise ValueError(f"linear: bias has shape {tuple(bias.shape)}, the weight asks for {(w.shape[0],)}")


def transposed(w: Quantized) -> Any:
    """The weight (N, K) as `matmul` takes it, (K, N): a `Quantized`, or float32 values where blocks are flattened."""
    q = unpacked(with_plain_scales(w))
    if q.scheme.scale.flat_size:
        return _swapped(dequantize(q))
    parts: dict[str, Any] = {name: _swapped(getattr(q, name)) for name in ("codes", "scale", "zero")}
    return replace(q, **parts, shape=q.shape[::-1], axis=0)


def _swapped(part: Any) -> Any:
    return part if part is None or len(part.shape) < 2 else part.swapaxes(0, 1)


#: Roundings under a zero point, and of the factors of a value that T does not have; what codes of 4 bits have too much, twice.
ZERO, FACTORS, ADDED = 4, 6, 48.0
#: The fewest roundings of what codes of 4 bits have too much, besides ZERO.
PARTED = 81
#: Half of what float32 holds.
LIMIT = 2.0**127


def linear_error_bound(
    x: Array, w: Quantized, bias: Array | None = None, *, out_dtype: DTypeLike | None = None
) -> Array:
    """The largest |got - T| of each element of `linear` (..., N), never too small, float64 in the library of x.

    T is the real number sum of x times the dequantized weight, plus bias. Covers kernels that multiply decoded elements
    by float32 sums in any order, tensor cores included, and round once to `out_dtype` (by default as `linear` does). In JAX
    float32, rounded up. Infinite where overflow cannot be excluded or T is not finite. Errors are those of `linear`.
    """
    x = as_array(x)
    check_linear(x, w, bias)
    name = dtype_name(result_dtype(x) if out_dtype is None else out_dtype, tuple(RESULTS), "out_dtype")
    rows: Any = x[None] if len(x.shape) == 1 else x
    left, right = operands_of(rows, transposed(w))
    added = bias_of(bias, left, right)
    with np.errstate(over="ignore", invalid="ignore"):
        truth = _result(left, right, added)
        error = float32_error(left, _terms(right, w), added, _roundings(left, right, w))
        error = error + _underflow(left, right, w) + _added(left, w)
        if name != "float32":
            error = error + rounding_error(truth + error, name)
        certain = np.isfinite(truth) & np.isfinite(error) & ~_overflows(left, w)
        bound = np.where(certain, error * UPWARD, np.inf)
    return of_library(bound[0] if len(x.shape) == 1 else bound, x)


def _result(left: Operand, right: Operand, bias: F64 | None) -> F64:
    """|T| from above: the product in float64, and what its own sums may lose, at most K + 2 roundings of 2**-53."""
    bias = np.zeros(()) if bias is None else bias
    total = np.abs(left.values) @ np.abs(right.values) + np.abs(bias)
    return np.asarray(np.abs(left.values @ right.values + bias) + (left.k + 2) * 2.0**-52 * total)


def _roundings(left: Operand, right: Operand, w: Quantized) -> int:
    """Roundings of a term besides those of factors that T has."""
    return 2 * left.k + ZERO * (w.zero is not None) + FACTORS * (right.scale is None)


def _terms(right: Operand, w: Quantized) -> Operand:
    """The weight with magnitudes that are at least those of all terms: |c - z| + 2 |c|."""
    if w.zero is None:
        return right
    plain = operand_of(transposed(replace(w, zero=_nothing(w))), -2, "w")
    return replace(right, codes=(np.abs(right.codes) + 2 * np.abs(plain.codes)) * UPWARD)


def _added(left: Operand, w: Quantized) -> F64 | float:
    """Error of the sums of a block where 4-bit codes have something added: as if all codes were ADDED (or seven times that,
    where zero points are values)."""
    if not _has_additions(w):
        return 0.0
    ones = np.ones(unpacked(w).codes.shape, np.uint8)
    constant = replace(w, codes=namespace_of(w.codes).constant(ones, w.codes), zero=_nothing(w), packed=False)
    scales = operand_of(transposed(constant), -2, "w")
    scales = replace(scales, codes=ADDED * np.abs(scales.codes))
    block = w.scheme.scale.flat_size or w.scheme.scale.block
    size = left.k if isinstance(block, str) else (block[1] if isinstance(block, tuple) else block)
    return float32_error(left, scales, None, max(2 * (left.k if size == -1 else size), PARTED) + ZERO)


def _overflows(left: Operand, w: Quantized) -> np.ndarray:
    """Rows of x (M, 1) with which the sums of codes, and of what is added to them, may leave float32 before any scale."""
    most = float(np.max(np.abs(w.scheme.format.values[np.isfinite(w.scheme.format.values)])))
    most += ADDED * _has_additions(w)
    return np.asarray(most * np.sum(np.abs(left.values), -1, keepdims=True) >= LIMIT)


def _has_additions(w: Quantized) -> bool:
    """Whether kernels may add something to codes."""
    return w.scheme.format.kind == "int" and w.scheme.format.bits == 4


def _nothing(w: Quantized) -> Array | None:
    """Zero points of 0 in place of a weight's own."""
    if w.zero is None:
        return None
    return namespace_of(w.zero).constant(np.zeros_like(host_array(w.zero, "w")), w.zero)


def _underflow(left: Operand, right: Operand, w: Quantized) -> float:
    """What terms may lose below the smallest float32 where factors are not known: a code is 1/r of its value at least."""
    if right.scale is not None:
        return 0.0
    codes = np.abs(w.scheme.format.values)
    growth = float(np.max(np.abs(right.values), initial=0.0)) / float(codes[codes > 0].min())
    return (
        4 * left.k * max(1.0, growth) * max(1.0, float(np.max(np.abs(left.values), initial=0.0))) * UNDERFLOW
    )
