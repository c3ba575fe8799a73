"""`linear_sparse_int4`: inputs times a weight of 4-bit integers of which 2:4 storage keeps half.

The weight (N, K) is stored in three arrays, or four, in the order of `reference.compress` and `reference.pack`:

* `codes` (N, K/4) uint8: two's complement of the K/2 kept elements of a row, two a byte, the first in the low half. A byte is a
  group of four columns.
* `metadata` (N, K/8) uint8: 4 bits a group, the two indices of its kept columns, as `compress` writes them.
* `scale` (N, K/g) float32 or bfloat16, g = 32, 64, 128 or 256 columns of the dense weight, zeros counted: that of the scheme
  "int4_g<g>". bfloat16 may come as its patterns, uint16.
* `zero` (N, K/g) int8, -8 to 7, where there are zero points: those of the scheme "int4_g<g>_asymmetric". What is not kept has
  the zero point as its code, and is 0.

Order of roundings of the value: codes are integers, and so are codes less zero points; a weight is that times its scale,
rounded to float32, products and their sum with the bias are exact, and the result is rounded once to the dtype of x. A kernel
adds in another order and may be as far from the exact product as `linear_error_bound` of `sparse_int4_weight` says; zeros add
nothing to that bound but their count.

Source: the pattern, Mishra et al., "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378); both together, Frantar et
al., "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models" (arXiv 2408.11743).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from reference.arrays.namespace import Array, Namespace, as_array, namespace_of
from reference.formats.storage import unpack
from reference.matmul.linear import linear
from reference.quantize.stored import Quantized
from reference.schemes.schemes import SCHEMES, Scheme
from reference.sparsity.compress import decompress

#: Columns of the dense weight that may share a scale, and the dtypes of scales with the one that the scheme stores.
GROUPS = (32, 64, 128, 256)
STORED_SCALES = {"float32": "float32", "bfloat16": "bfloat16", "uint16": "bfloat16"}
INPUTS = ("bfloat16", "float16")


def linear_sparse_int4(
    x: Array,
    codes: Array,
    metadata: Array,
    scale: Array,
    bias: Array | None = None,
    zero: Array | None = None,
) -> Array:
    """x (..., K) times the transpose of the dense weight (N, K), plus bias (N): (..., N) in the dtype of x.

    x: bfloat16 or float16. codes, metadata, scale and zero: see the module text. The sum of exact products and the bias is
    rounded once. Raises ValueError where shapes do not go together or g is no group of the scheme, TypeError for other dtypes.
    """
    x, codes, metadata, scale = (as_array(array) for array in (x, codes, metadata, scale))
    zero = None if zero is None else as_array(zero)
    check_operands(x, codes, metadata, scale, bias, zero)
    return linear(x, sparse_int4_weight(codes, metadata, scale, zero), bias)


def sparse_int4_weight(codes: Array, metadata: Array, scale: Array, zero: Array | None = None) -> Quantized:
    """The dense weight (N, K) with its zeros, one code a byte: a `Quantized` of `scheme_of_scales`."""
    codes, metadata, scale = as_array(codes), as_array(metadata), as_array(scale)
    zero = None if zero is None else as_array(zero)
    rows, length, group = check_sparse_int4(codes, metadata, scale, zero)
    kept = unpack(codes, "int4", (rows, length // 2))
    scheme = scheme_of_scales(group, STORED_SCALES[namespace_of(scale).dtype_name(scale)], zero is not None)
    stored, dense = _patterns(namespace_of(scale), scale), decompress(kept, metadata)
    if zero is not None:
        dense = _with_zero_points(dense, metadata, zero, group)
    return Quantized(dense, stored, None, zero, (rows, length), 1, scheme)


def _with_zero_points(codes: Array, metadata: Array, zero: Array, group: int) -> Array:
    """Codes (N, K) with the zero point of its group, in four bits, in place of what is not kept."""
    ns = namespace_of(codes)
    rows, length = codes.shape
    kept = decompress(ns.full((rows, length // 2), 1, "uint8", like=codes), metadata)
    points = ns.bitcast(zero, "uint8") & 15
    points = ns.broadcast_to(points[:, :, None], (rows, length // group, group)).reshape(rows, length)
    return ns.where(kept != 0, codes, points)


def check_sparse_int4(
    codes: Array, metadata: Array, scale: Array, zero: Array | None = None
) -> tuple[int, int, int]:
    """(N, K, g) of a stored weight; TypeError or ValueError where its arrays are not those of one."""
    for name, array, dtypes in (
        ("codes", codes, ("uint8",)), ("metadata", metadata, ("uint8",)), ("scale", scale, tuple(STORED_SCALES)),
    ):  # fmt: skip
        dtype = namespace_of(array).dtype_name(array)
        if dtype not in dtypes:
            raise TypeError(
                f"linear_sparse_int4 takes {name} of dtype {' or '.join(dtypes)}, got {dtype}; cast it"
            )
        if len(array.shape) != 2:
            raise ValueError(
                f"linear_sparse_int4 takes {name} of a matrix, got shape {tuple(array.shape)}; give one weight (N, K)"
            )
    rows, length = int(codes.shape[0]), 4 * int(codes.shape[1])
    blocks = int(scale.shape[1])
    group = length // blocks if blocks else 0
    if group not in GROUPS or group * blocks != length or scale.shape[0] != rows:
        raise ValueError(
            f"linear_sparse_int4: scales of shape {tuple(scale.shape)} do not belong to {rows} rows of {length} columns "
            f"(four a byte of codes); give (N, K/g) with g one of {', '.join(map(str, GROUPS))}"
        )
    if tuple(metadata.shape) != (rows, length // 8):
        raise ValueError(
            f"linear_sparse_int4: codes of shape {tuple(codes.shape)} go with metadata of shape {(rows, length // 8)}, got "
            f"{tuple(metadata.shape)}; pass both as compress returned them, codes packed"
        )
    if zero is not None:
        _check_zero(zero, tuple(scale.shape))
    return rows, length, group


def _check_zero(zero: Any, shape: tuple[int, ...]) -> None:
    """TypeError or ValueError where zero points are not int8, one a scale. Their values are not read."""
    dtype = namespace_of(zero).dtype_name(zero)
    if dtype != "int8":
        raise TypeError(
            f"linear_sparse_int4 takes zero of dtype int8, got {dtype}; give integer zero points, -8 to 7"
        )
    if tuple(zero.shape) != shape:
        raise ValueError(
            f"linear_sparse_int4: zero has shape {tuple(zero.shape)}, scales have {shape}; give one zero point a scale"
        )


def check_operands(
    x: Any, codes: Any, metadata: Any, scale: Any, bias: Any, zero: Any = None
) -> tuple[int, int, int]:
    """(N, K, g) of the weight; TypeError or ValueError as `linear_sparse_int4` raises."""
    rows, length, group = check_sparse_int4(codes, metadata, scale, zero)
    dtype = namespace_of(x).dtype_name(x)
    if dtype not in INPUTS:
        raise TypeError(f"linear_sparse_int4 takes x of dtype {' or '.join(INPUTS)}, got {dtype}; cast it")
    if not len(x.shape) or x.shape[-1] != length:
        raise ValueError(
            f"linear_sparse_int4 of inputs {tuple(x.shape)} and a weight {(rows, length)}: the last axes must be the same"
        )
    if bias is not None and tuple(bias.shape) != (rows,):
        raise ValueError(
            f"linear_sparse_int4: bias has shape {tuple(bias.shape)}, the weight asks for {(rows,)}; give one number a row"
        )
    return rows, length, group


@lru_cache(maxsize=32)
def scheme_of_scales(group: int, storage: str, zero: bool = False) -> Scheme:
    """The scheme "int4_g<group>", or with zero points its asymmetric one, with scales stored in this dtype: float32, as it is,
    or bfloat16."""
    scheme = SCHEMES[f"int4_g{group}{'_asymmetric' if zero else ''}"]
    if storage == "float32":
        return scheme
    scale = replace(scheme.scale, storage=storage, floor=None)
    return replace(scheme, name=f"{scheme.name} {storage}", scale=scale)


def _patterns(ns: Namespace, scale: Array) -> Array:
    """Scales as a `Quantized` holds them."""
    return ns.bitcast(scale, "uint16") if ns.dtype_name(scale) == "bfloat16" else scale


__all__ = [
    "check_operands",
    "check_sparse_int4",
    "linear_sparse_int4",
    "scheme_of_scales",
    "sparse_int4_weight",
]
