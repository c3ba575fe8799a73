"""`linear_sparse`: inputs times the transpose of a compressed 2:4 weight, with scales of rows; and how far a kernel may be from
it.

For x (..., K) and w = decompress(values, metadata) (N, K), with every operation rounded to float32 (nearest even),

    y = round(((S * x_scale) * scale) + bias),    S = sum of the products, exact and then rounded once,

and `round` to the output's dtype: one rounding from float32. Sums of int8 are exact in int32. With T the real number of that
formula without any rounding, u = 2**-24 and gamma as in `error_bound`, a kernel's S is within E of the exact sum:

* int8: E = 0 until S is rounded to float32, which is one more factor 1 + d below.
* bfloat16, float16, float8: the tensor core cuts what it adds (`error_bound`, "Truncating tensor core"), F = 13 fraction bits
  for float8 and 24 for 16 bits, in chains over K or, where float8 is not summed `fast`, over 128 elements. An instruction adds
  the 32 (16) kept products of 64 (32) elements, half as many products and steps as the dense one: half of its E, and the
  float32 additions of at most PARTS parts of K and of the chains. That a sparse instruction cuts as the dense one does is an
  assumption that a test on a GPU tries to break.

Then |got - T| <= E s + gamma(4) (|T| + E s + |bias|) + 4 * 2**-150 max(1, |scale|), s = |x_scale scale|, plus half a unit of
the output's dtype: three or four roundings follow, and what underflows in the first product is scaled by the second.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.arrays.namespace import Array, DTypeLike, as_array, dtype_name, namespace_of
from reference.matmul.error_bound import (
    UNDERFLOW,
    UPWARD,
    float32_error,
    gamma,
    matmul_error_bound,
    of_library,
    rounding_error,
)
from reference.matmul.exact import F64, RESULTS, exact_matmul, round_result
from reference.matmul.operands import from_host, operand_of, to_host
from reference.matmul.tensor_core_model import add_float32, multiply_float32
from reference.sparsity.compress import decompress

#: Dtypes of values and x that are multiplied.
PAIRS = (
    ("bfloat16", "bfloat16"), ("float16", "float16"), ("int8", "int8"),
    ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"),
    ("float8_e5m2", "float8_e4m3fn"), ("float8_e5m2", "float8_e5m2"),
)  # fmt: skip
#: Most parts of K that a kernel adds, and elements of a chain where sums are not fast.
PARTS, CHAIN = 8, 128


def linear_sparse(
    x: Array,
    values: Array,
    metadata: Array,
    bias: Array | None = None,
    *,
    x_scale: Array | None = None,
    scale: Array | None = None,
    out_dtype: DTypeLike | None = None,
) -> Array:
    """(x @ decompress(values, metadata).T) * x_scale * scale + bias: (..., N), in the library of x.

    x: (..., K). values (N, K/2) and metadata uint8 (N, ceil(K/8)): what `compress` made of the weight (N, K). Both are
    bfloat16, float16 or int8, or each is float8_e4m3fn or float8_e5m2. x_scale: float32, one for each row of x (..., 1), or one
    of any shape with one element; scale: the same of the weight, (N, 1). bias: (N), float32, bfloat16 or float16. out_dtype:
    float32, bfloat16, float16, or int32 for sums of int8 alone; by default x's where it is one of these, else float32.

    Roundings: see the module. NaN and infinity follow IEEE 754; a sum of zeros is +0. Runs on the host in NumPy.
    Raises TypeError for other dtypes, ValueError for shapes that do not go together, an unknown out_dtype, int32 with scales or
    a bias, and int32 sums that do not fit.
    """
    x, values, metadata = as_array(x), as_array(values), as_array(metadata)
    name = check(x, values, metadata, bias, x_scale, scale, out_dtype)
    rows, columns = _operands(x, values, metadata)
    sums = exact_matmul(rows, columns)
    shape = (*x.shape[:-1], values.shape[0])
    if name == "int32":
        if np.any((sums < -(2.0**31)) | (sums >= 2.0**31)):
            raise ValueError("linear_sparse: a sum does not fit int32; use out_dtype='float32'")
        return from_host(sums.reshape(shape), "int32", x)
    total = round_result(sums, "float32")
    for factor in (_scale_of(x_scale, -1), _scale_of(scale, 0)):
        total = total if factor is None else multiply_float32(total, factor)
    total = total if bias is None else add_float32(total, to_host(bias, "bias")[0])
    return from_host(round_result(total, name).reshape(shape), name, x)


def linear_sparse_error_bound(
    x: Array,
    values: Array,
    metadata: Array,
    bias: Array | None = None,
    *,
    x_scale: Array | None = None,
    scale: Array | None = None,
    out_dtype: DTypeLike | None = None,
    fast_sums: bool = True,
) -> Array:
    """The largest |got - T| of each element of a kernel's `linear_sparse` (..., N), never too small under the module's
    assumption.

    T is the real number that no rounding entered; to compare with `linear_sparse` itself, which is within the bound too, allow
    it twice. fast_sums: whether float8 is summed in one chain over K. The result is float64 (in JAX float32, rounded up);
    infinite where overflow cannot be excluded or T is not finite. Errors are those of `linear_sparse`.
    """
    x, values, metadata = as_array(x), as_array(values), as_array(metadata)
    name = check(x, values, metadata, bias, x_scale, scale, out_dtype)
    rows, columns = _operands(x, values, metadata)
    added = 0.0 if bias is None else np.abs(to_host(bias, "bias")[0])
    first, second = (_scale_of(one, axis) for one, axis in ((x_scale, -1), (scale, 0)))
    factors = [np.abs(one) if one is not None else np.ones(()) for one in (first, second)]
    with np.errstate(over="ignore", invalid="ignore"):
        sums = exact_matmul(rows, columns)
        error = _sums_error(rows, columns, x, values, fast_sums) * factors[0] * factors[1]
        truth = (np.abs(sums) * factors[0] * factors[1] + added) * UPWARD
        if name != "int32":
            error = error + gamma(4) * (truth + error) + 4 * UNDERFLOW * np.maximum(1.0, factors[1])
            error = error + (0.0 if name == "float32" else rounding_error(truth + error, name))
        largest = np.maximum(np.abs(sums), np.abs(sums) * factors[0])
        certain = np.isfinite(truth) & np.isfinite(error) & (largest < 2.0**127) & (truth < 2.0**127)
        bound = np.where(certain, error * UPWARD, np.inf)
    return of_library(bound.reshape(*x.shape[:-1], values.shape[0]), x)


def _sums_error(rows: F64, columns: F64, x: Array, values: Array, fast_sums: bool) -> F64:
    """E of the module."""
    kinds = [namespace_of(one).dtype_name(one) for one in (x, values)]
    if kinds[0] == "int8":
        return np.zeros((rows.shape[0], columns.shape[1]))
    wide = not kinds[0].startswith("float8")
    core: dict[str, Any] = {"k_step": 16, "frac_bits": 24} if wide else {"k_step": 32, "frac_bits": 13}
    promote = None if wide or fast_sums else CHAIN
    # Whole chains, so that half of the products and of the steps of the dense instruction are those of the sparse one.
    more = -rows.shape[1] % CHAIN
    left, right = (
        x.astype(np.float32)
        for x in (np.pad(rows, ((0, 0), (0, more))), np.pad(columns, ((0, more), (0, 0))))
    )
    bound = matmul_error_bound(
        left, right, accumulation="hopper_fp8", promote=promote, operand_formats=(kinds[0], kinds[1]), **core
    )
    added = PARTS + (1 if promote is None else left.shape[1] // CHAIN)
    return np.asarray(bound) / 2 + float32_error(
        operand_of(left, -1, "x"), operand_of(right, -2, "w"), None, added
    )


def _operands(x: Array, values: Array, metadata: Array) -> tuple[F64, F64]:
    """Rows of x (M, K) and the dense weight's transpose (K, N), on the host."""
    rows, weight = to_host(x, "x")[0], to_host(decompress(values, metadata), "values")[0]
    return np.ascontiguousarray(rows.reshape(-1, x.shape[-1])), np.ascontiguousarray(weight.T)


def _scale_of(scale: Array | None, axis: int) -> F64 | None:
    """A scale that broadcasts to (M, N): of rows of x (axis -1) or of the weight (0)."""
    if scale is None:
        return None
    host = to_host(scale, "scale")[0].reshape(-1)
    return host.reshape(-1, 1) if axis == -1 else host.reshape(1, -1)


def check(
    x: Any, values: Any, metadata: Any, bias: Any, x_scale: Any, scale: Any, out_dtype: DTypeLike | None
) -> str:
    """The output's dtype by name; raises as `linear_sparse` does. metadata is canonical, which `decompress` checks."""
    kinds = tuple(namespace_of(one).dtype_name(one) for one in (values, x))
    if kinds not in PAIRS:
        raise TypeError(
            f"linear_sparse multiplies bfloat16, float16 or int8 by the same and float8 by float8, got x {kinds[1]} and values "
            f"{kinds[0]}; view codes as their dtype, or use linear of the decompressed weight"
        )
    if len(values.shape) != 2 or not x.shape or x.shape[-1] != 2 * values.shape[1]:
        raise ValueError(
            f"linear_sparse takes x (..., K) and values (N, K/2), got {tuple(x.shape)} and {tuple(values.shape)}"
        )
    own = kinds[1] if kinds[1] in RESULTS else "float32"
    name = dtype_name(own if out_dtype is None else out_dtype, (*RESULTS, "int32"), "out_dtype")
    _check_scale(x_scale, (*x.shape[:-1], 1), "x_scale")
    _check_scale(scale, (values.shape[0], 1), "scale")
    if bias is not None and tuple(bias.shape) != (values.shape[0],):
        raise ValueError(
            f"linear_sparse: bias has shape {tuple(bias.shape)}, the weight asks for {(values.shape[0],)}"
        )
    if bias is not None and namespace_of(bias).dtype_name(bias) not in RESULTS:
        raise TypeError(
            f"linear_sparse takes a bias of float32, bfloat16 or float16, got {namespace_of(bias).dtype_name(bias)}"
        )
    if name == "int32" and (kinds[1] != "int8" or any(one is not None for one in (bias, x_scale, scale))):
        raise ValueError(
            "linear_sparse: out_dtype int32 is for int8 without scales and bias; use out_dtype='float32'"
        )
    return name


def _check_scale(scale: Any, shape: tuple[int, ...], what: str) -> None:
    if scale is None:
        return
    given = namespace_of(scale).dtype_name(scale)
    if given != "float32":
        raise TypeError(f"linear_sparse takes {what} in float32, got {given}; cast it")
    size = 1
    for length in scale.shape:
        size *= length
    if tuple(scale.shape) != tuple(shape) and size != 1:
        raise ValueError(
            f"linear_sparse: {what} has shape {tuple(scale.shape)}; give {tuple(shape)}, or one element"
        )


__all__ = ["PAIRS", "check", "linear_sparse", "linear_sparse_error_bound"]
