"""Two products of the same inputs by preshuffled weights, and silu of one times the other, for torch tensors.

Two products of the same inputs by preshuffled weights of one scheme and shape, and silu of one times the other, below their
signatures: kernels, references, operators and gradients; see `fast.dispatch`.

Operands are x and the parts of both weights, the value is their shape (N, K).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fast.dispatch import Function, execute, run
from fast.gemm.choose import choose
from fast.gemm.families import of_preshuffled
from fast.layers.swiglu import SWIGLU, swiglu, swiglu_vjp
from fast.matmul.preshuffled.linear import (
    LINEAR_SMALL,
    LINEAR_SMALL_OP,
    STORED,
    linear_small,
    restored,
    weight_of,
)
from fast.matmul.weights import Operands, Values, parts, refuse_scale_gradients, times_weight
from fast.ops import record_name, register, strides
from fast.scale_factors import form_of
from reference import Quantized
from reference.layers.swiglu import DTYPES
from reference.matmul.linear import check_linear
from reference.schemes.schemes import record_of

if TYPE_CHECKING:
    from fast.scale_factors import ArrangedWeight

TENSORS = "Tensor codes, Tensor scale, Tensor? zero, Tensor codes2, Tensor scale2, Tensor? zero2"
SCHEMA = f"(Tensor x, {TENSORS}, SymInt[] shape, str scheme) -> "
OPERANDS = ("x", *(f"{part} of the {which} weight" for which in ("first", "second") for part in STORED))


def linear_small_pair_op(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs times the transposes of two preshuffled weights."""
    *operands, shape, scheme = arguments
    products: tuple[torch.Tensor, torch.Tensor] = execute(
        LINEAR_SMALL_PAIR, record_of(scheme), (tuple(shape),), operands
    )
    return products


def linear_small_swiglu_op(*arguments: Any) -> torch.Tensor:
    """silu of the first product times the second."""
    *operands, shape, scheme = arguments
    y: torch.Tensor = execute(LINEAR_SMALL_SWIGLU, record_of(scheme), (tuple(shape),), operands)
    return y


def _checked(record: Any, values: Values, operands: Operands) -> Any:
    """Inputs; errors are those of `linear`."""
    x, *stored = operands
    for one in (stored[:3], stored[3:]):
        check_linear(x, weight_of(record, values[0], one), None)
    return x


def _checked_swiglu(record: Any, values: Values, operands: Operands) -> Any:
    x = _checked(record, values, operands)
    if str(x.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(
            f"linear_small_swiglu takes {' or '.join(DTYPES)}, for which silu has a rule, got {x.dtype}; cast inputs first"
        )
    return x


def _separate(record: Any, values: Values, operands: Operands) -> tuple[Any, Any]:
    """Both products by themselves."""
    x, *stored = operands
    first, second = (
        execute(LINEAR_SMALL, record, values, (x, *one, None)) for one in (stored[:3], stored[3:])
    )
    return first, second


def _arranged(record: Any, values: Values, operands: Operands) -> list[ArrangedWeight]:
    """Both weights as the kernels take them."""
    from fast.scale_factors import ArrangedWeight

    form, (_, *stored) = form_of(record, values[0][1]), operands
    return [ArrangedWeight(*one, values[0], *form) for one in (stored[:3], stored[3:])]


def _in_one_launch(kind: str, x: torch.Tensor, weights: list[ArrangedWeight], key: Any, record: Any) -> Any:
    """Both products, kind "pair", or silu of one times the other, "swiglu", by the family that is faster so; None for none."""
    if not x.numel():
        return None
    for family in choose(of_preshuffled(weights[0], x.numel() // x.shape[-1], x.dtype, products=2)):
        multiply = family.function(kind)
        y = None if multiply is None else multiply(x, *weights, key=key, record=record)
        if y is not None:
            return y
    return None


# Two products


def _pair(record: Any, values: Values, operands: Operands) -> tuple[Any, Any]:
    x, *stored = _checked(record, values, operands), *operands[1:]
    result: tuple[Any, Any] = LINEAR_SMALL_PAIR_OP(x, *stored, list(values[0]), record_name(record))
    return result


def _pair_fake(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = (*x.shape[:-1], arguments[-2][0])
    return x.new_empty(size), x.new_empty(size)


def _pair_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch for few 16-bit rows, or None."""
    x = _checked(record, values, operands)
    return _in_one_launch("pair", x, _arranged(record, values, operands), key, record)


def _pair_reference(record: Any, values: Values, operands: Operands) -> Any:
    _checked(record, values, operands)
    return _separate(record, values, operands)


def _gradient(g: torch.Tensor, stored: tuple[Any, ...], shape: Any, scheme: str) -> torch.Tensor:
    """That of x, of one product."""
    q = restored(weight_of(record_of(scheme), shape, stored))
    return times_weight(g, parts(q), shape, scheme, q.packed)


def _pair_backward(ctx: Any, g: torch.Tensor, g2: torch.Tensor) -> tuple[Any, ...]:
    _, *stored = ctx.saved_tensors
    dx = _gradient(g, stored[:3], *ctx.stored) + _gradient(g2, stored[3:], *ctx.stored)
    return (dx, *(None,) * 8)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Inputs, the parts of both weights, and how they are stored."""
    refuse_scale_gradients(ctx, "linear_small_pair", 2, 3, 5, 6)
    ctx.save_for_backward(*inputs[:7])
    ctx.stored = inputs[7:]


LINEAR_SMALL_PAIR = Function(
    "linear_small_pair", OPERANDS, _pair_reference, _pair, _pair_kernel, differentiable=True
)
LINEAR_SMALL_PAIR_OP = register(
    "linear_small_pair", linear_small_pair_op, _pair_fake, _pair_backward, _save, SCHEMA + "(Tensor, Tensor)",
    linear_in=(0,),
)  # fmt: skip


# silu of one times the other


def _swiglu(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, *stored = _checked_swiglu(record, values, operands), *operands[1:]
    y: torch.Tensor = LINEAR_SMALL_SWIGLU_OP(x, *stored, list(values[0]), record_name(record))
    return y


def _swiglu_fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], arguments[-2][0]))


def _swiglu_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch for few rows, or None."""
    x = _checked_swiglu(record, values, operands)
    return _in_one_launch("swiglu", x, _arranged(record, values, operands), key, record)


def _swiglu_reference(record: Any, values: Values, operands: Operands) -> Any:
    _checked_swiglu(record, values, operands)
    products = _separate(record, values, operands)
    return execute(SWIGLU, None, strides(*products), products)


def _swiglu_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Both products are made again."""
    x, *stored = ctx.saved_tensors
    pair = stored[:3], stored[3:]
    products = (LINEAR_SMALL_OP(x, *one, None, *ctx.stored) for one in pair)
    first, second = (
        _gradient(d, one, *ctx.stored) for d, one in zip(swiglu_vjp(g, *products), pair, strict=True)
    )
    return (first + second, *(None,) * 8)


LINEAR_SMALL_SWIGLU = Function(
    "linear_small_swiglu", OPERANDS, _swiglu_reference, _swiglu, _swiglu_kernel, differentiable=True
)
LINEAR_SMALL_SWIGLU_OP = register(
    "linear_small_swiglu", linear_small_swiglu_op, _swiglu_fake, _swiglu_backward, _save, SCHEMA + "Tensor"
)


#: The most rows of inputs that take one launch.
MOST_ROWS = 16


def linear_small_pair(
    x: torch.Tensor, first: Quantized, second: Quantized
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear_small(x, first)`, `linear_small(x, second)`) of x (..., K) and preshuffled weights (N, K) and (M, K).

    On a GPU up to MOST_ROWS rows of bfloat16 or float16 and two weights of one scheme and shape take one launch. Its results
    lie within `reference.linear_error_bound`, like those of `linear_small`, whose sums may be made in another order. Everything
    else is two calls. Arguments and errors are those of `linear`. Differentiable in x.
    """
    if not _alike(first, second):
        return linear_small(x, first), linear_small(x, second)
    result: tuple[torch.Tensor, torch.Tensor] = run(
        LINEAR_SMALL_PAIR, first.scheme, *_given(x, first, second)
    )
    return result


def linear_small_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized) -> torch.Tensor:
    """`swiglu(linear_small(x, gate), linear_small(x, up))` of x (..., K), bfloat16 or float16, and weights (N, K).

    Both products are rounded to x's dtype, then `reference.swiglu` holds, and that is the dtype of the result. On a GPU up to
    MOST_ROWS rows and two weights of one scheme take one launch, whose sums may be made in another order than those of
    `linear_small`, within the same bound. Everything else is three calls. Errors are those of `linear` and `swiglu`: TypeError
    for other dtypes, ValueError where the weights have other shapes. Differentiable in x.
    """
    if not _alike(gate, up):
        return swiglu(linear_small(x, gate), linear_small(x, up))
    y: torch.Tensor = run(LINEAR_SMALL_SWIGLU, gate.scheme, *_given(x, gate, up))
    return y


def _alike(first: Quantized, second: Quantized) -> bool:
    return first.scheme.key == second.scheme.key and tuple(first.shape) == tuple(second.shape)


def _given(x: torch.Tensor, *weights: Quantized) -> tuple[Any, ...]:
    """Value and operands of a call."""
    stored = (part for w in weights for part in (w.codes, w.scale, w.zero))
    return (tuple(weights[0].shape),), (x, *stored)


__all__ = ["MOST_ROWS", "linear_small_pair", "linear_small_swiglu"]
