"""`linear_sparse_int4` for torch tensors; see `reference.linear_sparse_int4` for the layout of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.layers.column_sums import column_sums
from fast.matmul.weights import has_float_inputs, refuse_scale_gradients
from fast.ops import register
from reference.sparsity.linear_sparse_int4 import check_operands, check_sparse_int4, sparse_int4_weight

# `linear_sparse_int4` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`.

Values = tuple[Any, ...]
Operands = Sequence[Any]
STORED = ("codes", "metadata", "scale")


def linear_sparse_int4_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product."""
    y: torch.Tensor = execute(LINEAR_SPARSE_INT4, None, (), (x, codes, metadata, scale, bias, zero))
    return y


def _operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    check_operands(*operands)
    y: torch.Tensor = LINEAR_SPARSE_INT4_OP(*operands)
    return y


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By the kernel, or torch's product with the dense weight; the reference where the bias is none of its floats."""
    from fast.kernels.sparse_linear import host

    x, codes, metadata, scale, bias, zero = (*operands, None)[:6]
    group = check_operands(*operands)[2]
    y = host.linear_sparse_int4(x, codes, metadata, scale, bias, group, key, zero=zero)
    if y is not None or not has_float_inputs(bias):
        return y
    w = execute(SPARSE_INT4_DENSE, None, (x.dtype,), (codes, metadata, scale, zero))
    return torch.nn.functional.linear(x, w, None if bias is None else bias.to(x.dtype))


def _fake(x: torch.Tensor, codes: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The stored weight, and the dtypes of the gradients."""
    refuse_scale_gradients(ctx, "linear_sparse_int4", 3)
    x, codes, metadata, scale, bias, zero = inputs
    ctx.save_for_backward(codes, metadata, scale, zero)
    ctx.dtype, ctx.bias = x.dtype, None if bias is None else bias.dtype


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of x and bias."""
    dx = None
    if ctx.needs_input_grad[0]:
        *stored, zero = ctx.saved_tensors
        dx = g @ torch.ops.ao_lab.sparse_int4_dense(*stored, ctx.dtype, zero)
    db = column_sums(g, ctx.bias) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, db, None


LINEAR_SPARSE_INT4 = Function(
    "linear_sparse_int4", ("x", *STORED, "bias", "zero"), lambda r, v, o: reference.linear_sparse_int4(*o), _operate, _kernel,
    differentiable=True,
)  # fmt: skip
LINEAR_SPARSE_INT4_OP = register("linear_sparse_int4", linear_sparse_int4_op, _fake, _backward, _save)


def sparse_int4_dense_op(
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """The dense weight."""
    w: torch.Tensor = execute(SPARSE_INT4_DENSE, None, (dtype,), (codes, metadata, scale, zero))
    return w


def _dense_reference(record: Any, values: Values, operands: Operands) -> Any:
    return reference.dequantize(sparse_int4_weight(*operands), str(values[0]).removeprefix("torch."))


def _dense_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.sparse_linear import host

    codes, metadata, scale, zero = (*operands, None)[:4]
    group = check_sparse_int4(*operands)[2]
    return host.sparse_int4_dense(codes, metadata, scale, *values, group, key, zero)


def _dense_fake(
    codes: torch.Tensor, metadata: Any, scale: Any, dtype: torch.dtype, zero: Any = None
) -> torch.Tensor:
    return codes.new_empty((codes.shape[0], 4 * codes.shape[1]), dtype=dtype)


SPARSE_INT4_DENSE = Function(
    "sparse_int4_dense", (*STORED, "zero"), _dense_reference,
    lambda r, v, o: torch.ops.ao_lab.sparse_int4_dense(*o[:3], *v, *o[3:]), _dense_kernel,
)  # fmt: skip
register("sparse_int4_dense", sparse_int4_dense_op, _dense_fake)


def linear_sparse_int4(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    zero: torch.Tensor | None = None,
) -> torch.Tensor:
    """x (..., K) times the transpose of a weight (N, K) of 4-bit integers in 2:4 storage, plus bias (N), in x's dtype.

    x: bfloat16 or float16; codes uint8 (N, K/4), metadata uint8 (N, K/8), scale (N, K/g) and, where there are zero points,
    zero int8 (N, K/g) as `reference.linear_sparse_int4` has them, on one device. On a GPU up to 64 rows of x read the weight
    as it is stored, 0.375 bytes an element and the scales, and nothing dense is made: the result is within
    `reference.linear_error_bound` of the exact product with the dense weight, exact where all sums are exact in float32, and
    the same bits in every call. More rows, and zero points on other GPUs than Hopper or of a K that no kernel divides, are
    multiplied by torch with a dense weight in x's dtype that is made for the call. CPU tensors run the reference. Metadata are
    those of `compress`: of other bits the sparse tensor core makes anything. Zero points beyond -8 to 7 give anything, too.

    Errors are those of the reference. Differentiable in x and bias, by products with the dense weight; NotImplementedError
    where scales require a gradient.
    """
    y: torch.Tensor = run(LINEAR_SPARSE_INT4, None, (), (x, codes, metadata, scale, bias, zero))
    return y


__all__ = ["LINEAR_SPARSE_INT4", "LINEAR_SPARSE_INT4_OP", "linear_sparse_int4"]
