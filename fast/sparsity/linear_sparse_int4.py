"""`linear_sparse_int4` for torch tensors; see `reference.linear_sparse_int4` for the layout of the weight.

And two products of the same inputs by 2:4 weights of 4-bit integers, and silu of one times the other. Operands are x and
codes, metadata and scales of both weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, has_float_inputs, run
from fast.gemm.choose import choose
from fast.gemm.families import TORCH_DEQUANTIZE, of_sparse_int4
from fast.layers.column_sums import column_sums
from fast.layers.swiglu import SWIGLU, swiglu_vjp
from fast.matmul.weights import refuse_scale_gradients
from fast.ops import register, strides
from reference.sparsity.linear_sparse_int4 import check_operands, check_sparse_int4, sparse_int4_weight


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
    from fast.kernels.triton_sparse24_small_m import host

    x, codes, metadata, scale, bias, zero = (*operands, None)[:6]
    group = check_operands(*operands)[2]
    rows = x.numel() // max(x.shape[-1], 1)
    for family in choose(of_sparse_int4(codes, rows, x.dtype, group, zero is not None)):
        if family is TORCH_DEQUANTIZE:
            break
        y = host.linear_sparse_int4(
            x, codes, metadata, scale, bias, group, key, zero=zero, family=family.name
        )
        if y is not None:
            return y
    if not has_float_inputs(bias):
        return None
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
LINEAR_SPARSE_INT4_OP = register(
    "linear_sparse_int4", linear_sparse_int4_op, _fake, _backward, _save, linear_in=(0, 4)
)


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
    from fast.kernels.triton_sparse24_small_m import host

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


#: The most rows of inputs that take one launch.
MOST_ROWS = 16


def linear_sparse_int4_pair(
    x: torch.Tensor, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear_sparse_int4(x, *first)`, `linear_sparse_int4(x, *second)`) of x (..., K) and weights (N, K) and (M, K).

    first, second: codes, metadata and scales of a weight, without zero points. On a Hopper GPU up to MOST_ROWS rows of x and
    two weights with groups of one size and scales of one dtype take one launch. Its results lie within
    `reference.linear_error_bound`, like those of `linear_sparse_int4`, whose sums may be made in another order. Everything else
    is two calls. Errors are those of `linear_sparse_int4`. Differentiable in x.
    """
    result: tuple[torch.Tensor, torch.Tensor] = run(LINEAR_SPARSE_INT4_PAIR, None, (), (x, *first, *second))
    return result


def linear_sparse_int4_swiglu(
    x: torch.Tensor, gate: Sequence[torch.Tensor], up: Sequence[torch.Tensor]
) -> torch.Tensor:
    """`swiglu(linear_sparse_int4(x, *gate), linear_sparse_int4(x, *up))` of x (..., K) and weights (N, K).

    Both products are rounded to x's dtype, then `reference.swiglu` holds, and that is the dtype of the result. On a Hopper GPU
    up to MOST_ROWS rows and two weights with groups of one size and scales of one dtype take one launch, whose sums may be made
    in another order than those of `linear_sparse_int4`, within the same bound. Everything else is three calls. Errors are those
    of `linear_sparse_int4`; ValueError where the weights have other shapes. Differentiable in x.
    """
    y: torch.Tensor = run(LINEAR_SPARSE_INT4_SWIGLU, None, (), (x, *gate, *up))
    return y


Pair = tuple[torch.Tensor, torch.Tensor]
OPERANDS = ("x", *(f"{part} of the {which} weight" for which in ("first", "second") for part in STORED))


def linear_sparse_int4_pair_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    codes2: torch.Tensor,
    metadata2: torch.Tensor,
    scale2: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both products."""
    operands = (x, codes, metadata, scale, codes2, metadata2, scale2)
    result: Pair = execute(LINEAR_SPARSE_INT4_PAIR, None, (), operands)
    return result


def linear_sparse_int4_swiglu_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    metadata: torch.Tensor,
    scale: torch.Tensor,
    codes2: torch.Tensor,
    metadata2: torch.Tensor,
    scale2: torch.Tensor,
) -> torch.Tensor:
    """silu of the first product times the second."""
    operands = (x, codes, metadata, scale, codes2, metadata2, scale2)
    y: torch.Tensor = execute(LINEAR_SPARSE_INT4_SWIGLU, None, (), operands)
    return y


def _checked(operands: Operands) -> list[tuple[int, int, int]]:
    """(N, K, group) of both weights; errors are those of `linear_sparse_int4`."""
    x, *stored = operands
    return [check_operands(x, *one, None) for one in (stored[:3], stored[3:])]


def _checked_swiglu(operands: Operands) -> list[tuple[int, int, int]]:
    """The same of a gate and what it gates."""
    first, second = _checked(operands)
    if first[0] != second[0]:
        raise ValueError(
            f"linear_sparse_int4_swiglu takes two weights of one shape, got {first[:2]} and {second[:2]}; "
            f"linear_sparse_int4_pair takes such"
        )
    return [first, second]


def _separate(operands: Operands) -> Pair:
    """Both products by themselves."""
    x, *stored = operands
    one, other = (
        execute(LINEAR_SPARSE_INT4, None, (), (x, *part, None, None)) for part in (stored[:3], stored[3:])
    )
    return one, other


# Two products


def _pair(record: Any, values: Values, operands: Operands) -> Pair:
    _checked(operands)
    result: Pair = LINEAR_SPARSE_INT4_PAIR_OP(*operands)
    return result


def _pair_fake(x: torch.Tensor, *stored: torch.Tensor) -> Pair:
    first, second = (x.new_empty((*x.shape[:-1], stored[at].shape[0])) for at in (0, 3))
    return first, second


def _in_one_launch(kind: str, weights: Sequence[Any], operands: Operands, key: Any) -> Any:
    """Of few rows, kind "pair" or "swiglu"; None where groups differ. weights: what checks of the operands give."""
    from fast.kernels.sm90_sparse24_w4a16_gemv import host

    x, *stored = operands
    (*_, group), (*_, other) = weights
    if group != other:
        return None
    multiply = getattr(host, f"sm90_sparse24_w4a16_gemv_{kind}")
    return multiply(x, stored[:3], stored[3:], group, key=key)


def _pair_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    return _in_one_launch("pair", _checked(operands), operands, key)


def _pair_reference(record: Any, values: Values, operands: Operands) -> Pair:
    _checked(operands)
    return _separate(operands)


def _gradient(g: torch.Tensor, stored: Sequence[torch.Tensor]) -> torch.Tensor:
    """That of x, of one product."""
    return g @ torch.ops.ao_lab.sparse_int4_dense(*stored, g.dtype)


def _pair_backward(ctx: Any, g: torch.Tensor, g2: torch.Tensor) -> tuple[Any, ...]:
    _, *stored = ctx.saved_tensors
    return (_gradient(g, stored[:3]) + _gradient(g2, stored[3:]), *(None,) * 6)


def _pair_save(name: str) -> Any:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Inputs and the parts of both weights."""
        refuse_scale_gradients(ctx, name, 3, 6)
        ctx.save_for_backward(*inputs)

    return save


LINEAR_SPARSE_INT4_PAIR = Function(
    "linear_sparse_int4_pair", OPERANDS, _pair_reference, _pair, _pair_kernel, differentiable=True
)
LINEAR_SPARSE_INT4_PAIR_OP = register(
    "linear_sparse_int4_pair", linear_sparse_int4_pair_op, _pair_fake, _pair_backward,
    _pair_save("linear_sparse_int4_pair"), linear_in=(0,),
)  # fmt: skip


# silu of one times the other


def _swiglu(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    _checked_swiglu(operands)
    y: torch.Tensor = LINEAR_SPARSE_INT4_SWIGLU_OP(*operands)
    return y


def _swiglu_fake(x: torch.Tensor, codes: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _swiglu_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    return _in_one_launch("swiglu", _checked_swiglu(operands), operands, key)


def _swiglu_reference(record: Any, values: Values, operands: Operands) -> Any:
    _checked_swiglu(operands)
    products = _separate(operands)
    return execute(SWIGLU, None, strides(*products), products)


def _swiglu_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Both products are made again."""
    x, *stored = ctx.saved_tensors
    both = stored[:3], stored[3:]
    products = (LINEAR_SPARSE_INT4_OP(x, *one, None, None) for one in both)
    first, second = (_gradient(d, one) for d, one in zip(swiglu_vjp(g, *products), both, strict=True))
    return (first + second, *(None,) * 6)


LINEAR_SPARSE_INT4_SWIGLU = Function(
    "linear_sparse_int4_swiglu", OPERANDS, _swiglu_reference, _swiglu, _swiglu_kernel, differentiable=True
)
LINEAR_SPARSE_INT4_SWIGLU_OP = register(
    "linear_sparse_int4_swiglu", linear_sparse_int4_swiglu_op, _swiglu_fake, _swiglu_backward,
    _pair_save("linear_sparse_int4_swiglu"),
)  # fmt: skip


__all__ = [
    "LINEAR_SPARSE_INT4",
    "LINEAR_SPARSE_INT4_OP",
    "MOST_ROWS",
    "linear_sparse_int4",
    "linear_sparse_int4_pair",
    "linear_sparse_int4_swiglu",
]
