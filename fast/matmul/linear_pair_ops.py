"""`linear_pair` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`.

Operands are x and the tensors of both weights, values `pair_values`.
"""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import Function, execute
from fast.launch.cache import settings
from fast.matmul.linear_ops import LINEAR
from fast.matmul.stored_weight_ops import (
    FORM,
    SECOND_TENSORS,
    TENSORS,
    TWO,
    Operands,
    Values,
    save_pair,
    times_weight,
)
from fast.matmul.weights import alike, check_weight, pair_of, parts
from fast.ops import record_name, register
from reference import Quantized
from reference.schemes.schemes import record_of

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
    from fast.kernels.linear import pair_host

    return pair_host.linear_pair(x, first, second, key)


def _linear_pair_reference(record: Any, values: Values, operands: Operands) -> Any:
    x, first, second = checked_pair(record, values, operands, "linear_pair")
    return tuple(execute(LINEAR, w.scheme, settings(w), (x, *parts(w), None)) for w in (first, second))


LINEAR_PAIR = Function(
    "linear_pair", ("x", *TWO), _linear_pair_reference, _linear_pair, _linear_pair_kernel, differentiable=True
)
LINEAR_PAIR_OP = register(
    "linear_pair", linear_pair_op, _linear_pair_fake, _linear_pair_backward, save_pair("linear_pair"), SCHEMA
)

__all__ = ["LINEAR_PAIR", "checked_pair", "is_one_launch"]
