"""`linear_pair`: two products of the same inputs.

`linear_pair` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`.

Operands are x and the tensors of both weights, values `pair_values`.

`linear_swiglu`: two products of the same inputs, the silu of one times the other.

`linear_swiglu` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`.

Operands and values are those of `linear_pair`; here the records of the two weights may differ, their shapes not.
"""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import Function, execute, run, settings
from fast.layers.swiglu import SWIGLU, swiglu_vjp
from fast.matmul.linear import LINEAR, LINEAR_OP
from fast.matmul.weights import (
    FORM,
    SECOND_TENSORS,
    TENSORS,
    TWO,
    Operands,
    Values,
    alike,
    check_weight,
    pair_of,
    pair_values,
    parts,
    plain,
    require_weights,
    save_pair,
    times_weight,
)
from fast.ops import record_name, register, strides
from reference import Quantized
from reference.layers.swiglu import DTYPES
from reference.schemes.schemes import record_of

SWIGLU_SCHEMA = f"(Tensor x, {TENSORS}, {SECOND_TENSORS}, {FORM}, str scheme2, bool packed2) -> Tensor"


def linear_swiglu_op(*arguments: Any) -> torch.Tensor:
    """silu of the first product times the second, of two weights of one shape."""
    *operands, shape, scheme, packed, scheme2, packed2 = arguments
    size = tuple(shape)
    values = (record_of(scheme2).key, size, 1, packed, False, size, 1, packed2, False)
    y: torch.Tensor = execute(LINEAR_SWIGLU, record_of(scheme), values, operands)
    return y


def _linear_swiglu_fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], arguments[-5][0]))


def _linear_swiglu_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Both products are made again."""
    x, *stored = ctx.saved_tensors
    shape, *kinds = ctx.stored
    weights = [(stored[:4], shape, *kinds[:2]), (stored[4:], shape, *kinds[2:])]
    gate, up = (LINEAR_OP(x, *w[0], None, *w[1:]) for w in weights)
    dgate, dup = swiglu_vjp(g, gate, up)
    return (times_weight(dgate, *weights[0]) + times_weight(dup, *weights[1]), *(None,) * 13)


def _linear_swiglu(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, gate, up = _checked_swiglu(record, values, operands)
    gate, up = plain(gate), plain(up)
    stored = record_name(gate.scheme), gate.packed, record_name(up.scheme), up.packed
    y: torch.Tensor = LINEAR_SWIGLU_OP(x, *parts(gate, up), list(gate.shape), *stored)
    return y


def _checked_swiglu(record: Any, values: Values, operands: Operands) -> tuple[Any, Quantized, Quantized]:
    x, gate, up = checked_pair(record, values, operands, "linear_swiglu")
    if str(x.dtype).removeprefix("torch.") not in DTYPES:
        raise TypeError(
            f"linear_swiglu takes {' or '.join(DTYPES)}, for which silu has a rule, got {x.dtype}; cast inputs first"
        )
    if tuple(gate.shape) != tuple(up.shape):
        raise ValueError(
            f"linear_swiglu multiplies two products element by element, got weights of {tuple(gate.shape)} and "
            f"{tuple(up.shape)}; linear_pair takes such"
        )
    return x, gate, up


def _linear_swiglu_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch, or None."""
    x, gate, up = _checked_swiglu(record, values, operands)
    if not is_one_launch(x, gate, up):
        return None
    from fast.kernels.triton_gemv import select

    return select.linear_swiglu(x, gate, up, key)


def _linear_swiglu_reference(record: Any, values: Values, operands: Operands) -> Any:
    _checked_swiglu(record, values, operands)
    products = execute(LINEAR_PAIR, record, values, operands)
    return execute(SWIGLU, None, strides(*products), products)


LINEAR_SWIGLU = Function(
    "linear_swiglu", ("x", *TWO), _linear_swiglu_reference, _linear_swiglu, _linear_swiglu_kernel,
    differentiable=True,
)  # fmt: skip
LINEAR_SWIGLU_OP = register(
    "linear_swiglu", linear_swiglu_op, _linear_swiglu_fake, _linear_swiglu_backward, save_pair("linear_swiglu"), SWIGLU_SCHEMA
)  # fmt: skip


def linear_swiglu(x: torch.Tensor, gate: Quantized, up: Quantized) -> torch.Tensor:
    """`swiglu(linear(x, gate), linear(x, up))` of x (..., K), bfloat16 or float16, and two weights (N, K), in x's dtype.

    Both products are rounded to x's dtype, as `linear` rounds them, then `reference.swiglu` holds: silu correctly rounded, its
    product with up rounded once. On a GPU one row of inputs and two weights that are stored alike (see `linear_pair`) take one
    launch, whose sums may be made in another order than those of `linear`, within the same bound. Everything else is three
    calls. Errors are those of `linear` and `swiglu`; ValueError where the weights have other shapes. Differentiable in x.
    """
    require_weights(x, "linear_swiglu", gate, up)
    y: torch.Tensor = run(LINEAR_SWIGLU, gate.scheme, pair_values(gate, up), (x, *parts(gate, up)))
    return y


SCHEMA = f"(Tensor x, {TENSORS}, {SECOND_TENSORS}, {FORM}) -> (Tensor, Tensor)"


def checked_pair(
    record: Any, values: Values, operands: Operands, name: str
) -> tuple[Any, Quantized, Quantized]:
    """Inputs and both weights of a call of `fast.name`; errors are those of `linear`."""
    x, *stored = operands
    first, second = pair_of(record, values, stored)
    for w in (first, second):
        check_weight(x, w, None, name)
    return x, first, second


def is_one_launch(x: torch.Tensor, first: Quantized, second: Quantized) -> bool:
    """Whether kernels may take both products at once: one row, and two weights that are stored alike."""
    return x.numel() == x.shape[-1] and alike(first, second)


def linear_pair_op(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs times the transposes of two weights of one shape and scheme."""
    *operands, shape, scheme, packed = arguments
    record, stored = record_of(scheme), (tuple(shape), 1, packed, False)
    values = (record.key, *stored, *stored)
    products: tuple[torch.Tensor, torch.Tensor] = execute(LINEAR_PAIR, record, values, operands)
    return products


def _linear_pair_fake(x: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    size = (*x.shape[:-1], arguments[-3][0])
    return x.new_empty(size), x.new_empty(size)


def _linear_pair_backward(ctx: Any, g: torch.Tensor, g2: torch.Tensor) -> tuple[Any, ...]:
    _, *stored = ctx.saved_tensors
    dx = times_weight(g, stored[:4], *ctx.stored) + times_weight(g2, stored[4:], *ctx.stored)
    return (dx, *(None,) * 11)


def _linear_pair(record: Any, values: Values, operands: Operands) -> tuple[Any, Any]:
    x, first, second = checked_pair(record, values, operands, "linear_pair")
    if not alike(first, second):
        one, other = (LINEAR.operator(w.scheme, settings(w), (x, *parts(w), None)) for w in (first, second))
        return one, other
    products: tuple[torch.Tensor, torch.Tensor] = LINEAR_PAIR_OP(
        x, *parts(first, second), list(first.shape), record_name(first.scheme), first.packed
    )
    return products


def _linear_pair_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch, or None."""
    x, first, second = checked_pair(record, values, operands, "linear_pair")
    if not is_one_launch(x, first, second):
        return None
    from fast.kernels.triton_gemv import select

    return select.linear_pair(x, first, second, key)


def _linear_pair_reference(record: Any, values: Values, operands: Operands) -> Any:
    x, first, second = checked_pair(record, values, operands, "linear_pair")
    return tuple(execute(LINEAR, w.scheme, settings(w), (x, *parts(w), None)) for w in (first, second))


LINEAR_PAIR = Function(
    "linear_pair", ("x", *TWO), _linear_pair_reference, _linear_pair, _linear_pair_kernel, differentiable=True
)
LINEAR_PAIR_OP = register(
    "linear_pair", linear_pair_op, _linear_pair_fake, _linear_pair_backward, save_pair("linear_pair"), SCHEMA,
    linear_in=(0,),
)  # fmt: skip


def linear_pair(x: torch.Tensor, first: Quantized, second: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
    """(`linear(x, first)`, `linear(x, second)`) of x (..., K) and weights (N, K) and (M, K).

    On a GPU one row of inputs and two weights that are stored alike (one scheme, one shape, 4-bit integers or bytes as `linear`
    multiplies them by kernels of one row) take one launch. Its results lie within `reference.linear_error_bound`, like those of
    `linear`, whose sums may be made in another order. Everything else is two calls. Arguments and errors are those of `linear`.
    Differentiable in x.
    """
    require_weights(x, "linear_pair", first, second)
    products: tuple[torch.Tensor, torch.Tensor] = run(
        LINEAR_PAIR, first.scheme, pair_values(first, second), (x, *parts(first, second))
    )
    return products


__all__ = ["LINEAR_PAIR", "checked_pair", "is_one_launch", "linear_pair", "linear_swiglu"]
