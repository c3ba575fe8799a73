"""`linear_swiglu` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`.

Operands and values are those of `linear_pair`; here the records of the two weights may differ, their shapes not.
"""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import Function, execute
from fast.layers.gradients import swiglu_vjp
from fast.layers.ops import SWIGLU, strides
from fast.matmul.linear_ops import LINEAR_OP
from fast.matmul.linear_pair_ops import LINEAR_PAIR, checked_pair, is_one_launch
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
from fast.matmul.weights import parts, plain
from fast.ops import record_name, register
from reference import Quantized
from reference.layers.swiglu import DTYPES
from reference.schemes.schemes import record_of

SCHEMA = f"(Tensor x, {TENSORS}, {SECOND_TENSORS}, {FORM}, str scheme2, bool packed2) -> Tensor"


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
    from fast.kernels.linear import pair_host

    return pair_host.linear_swiglu(x, gate, up, key)


def _linear_swiglu_reference(record: Any, values: Values, operands: Operands) -> Any:
    _checked_swiglu(record, values, operands)
    products = execute(LINEAR_PAIR, record, values, operands)
    return execute(SWIGLU, None, strides(*products), products)


LINEAR_SWIGLU = Function(
    "linear_swiglu", ("x", *TWO), _linear_swiglu_reference, _linear_swiglu, _linear_swiglu_kernel,
    differentiable=True,
)  # fmt: skip
LINEAR_SWIGLU_OP = register(
    "linear_swiglu", linear_swiglu_op, _linear_swiglu_fake, _linear_swiglu_backward, save_pair("linear_swiglu"), SCHEMA
)  # fmt: skip

__all__ = ["LINEAR_SWIGLU"]
