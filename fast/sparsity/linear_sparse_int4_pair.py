"""Two products of the same inputs by weights of 4-bit integers in 2:4 storage, and silu of one times the other.

Two products of the same inputs by 2:4 weights of 4-bit integers, and silu of one times the other, below their signatures:
kernels, references, operators and gradients; see `fast.dispatch`.

Operands are x and codes, metadata and scales of both weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fast.dispatch import Function, execute, run
from fast.layers.gradients import swiglu_vjp
from fast.layers.ops import SWIGLU, strides
from fast.matmul.weights import refuse_scale_gradients
from fast.ops import register
from fast.sparsity.linear_sparse_int4 import LINEAR_SPARSE_INT4, LINEAR_SPARSE_INT4_OP, STORED
from reference.sparsity.linear_sparse_int4 import check_operands

Values = tuple[Any, ...]
Operands = Sequence[Any]
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
    made: Pair = execute(LINEAR_SPARSE_INT4_PAIR, None, (), operands)
    return made


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
    made: Pair = LINEAR_SPARSE_INT4_PAIR_OP(*operands)
    return made


def _pair_fake(x: torch.Tensor, *stored: torch.Tensor) -> Pair:
    first, second = (x.new_empty((*x.shape[:-1], stored[at].shape[0])) for at in (0, 3))
    return first, second


def _pair_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch for few rows, or None."""
    from fast.kernels.sm90_sparse24_w4a16_gemv import pair

    x, *stored = operands
    (*_, group), (*_, other) = _checked(operands)
    if group != other:
        return None
    return pair.sm90_sparse24_w4a16_gemv_pair(x, stored[:3], stored[3:], group, key=key)


def _pair_reference(record: Any, values: Values, operands: Operands) -> Pair:
    _checked(operands)
    return _separate(operands)


def _gradient(g: torch.Tensor, stored: Sequence[torch.Tensor]) -> torch.Tensor:
    """That of x, of one product."""
    return g @ torch.ops.ao_lab.sparse_int4_dense(*stored, g.dtype)


def _pair_backward(ctx: Any, g: torch.Tensor, g2: torch.Tensor) -> tuple[Any, ...]:
    _, *stored = ctx.saved_tensors
    return (_gradient(g, stored[:3]) + _gradient(g2, stored[3:]), *(None,) * 6)


def _save(name: str) -> Any:
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
    _save("linear_sparse_int4_pair"),
)  # fmt: skip


# silu of one times the other


def _swiglu(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    _checked_swiglu(operands)
    y: torch.Tensor = LINEAR_SPARSE_INT4_SWIGLU_OP(*operands)
    return y


def _swiglu_fake(x: torch.Tensor, codes: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _swiglu_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch for few rows, or None."""
    from fast.kernels.sm90_sparse24_w4a16_gemv import pair

    x, *stored = operands
    (*_, group), (*_, other) = _checked_swiglu(operands)
    if group != other:
        return None
    return pair.sm90_sparse24_w4a16_gemv_swiglu(x, stored[:3], stored[3:], group, key=key)


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
    _save("linear_sparse_int4_swiglu"),
)  # fmt: skip


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
    made: tuple[torch.Tensor, torch.Tensor] = run(LINEAR_SPARSE_INT4_PAIR, None, (), (x, *first, *second))
    return made


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


__all__ = ["MOST_ROWS", "linear_sparse_int4_pair", "linear_sparse_int4_swiglu"]
