"""Products by stored weights below their signatures: kernel, reference, operator and gradient; see `fast.dispatch`.

Gradients of inputs are products with the dequantized weight in the inputs' dtype, those of a bias the sums over rows. A stored
weight has none: asking for that of its scales is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute
from fast.kernels.launch.cache import settings
from fast.layers.ops import SWIGLU, strides, swiglu_gradient
from fast.matmul.weights import (
    alike,
    check_weight,
    pair_of,
    parts,
    plain,
    weight_of,
)
from fast.ops import record_name, register
from fast.quantize.ops import DEQUANTIZE
from reference import Quantized
from reference.layers.swiglu import DTYPES
from reference.schemes.record_text import record_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Values = tuple[Any, ...]
Operands = Sequence[Any]
STORED = ("codes", "scale", "outer scale", "zero point")
TWO = tuple(f"{part} of the {which} weight" for which in ("first", "second") for part in STORED)


def dense(w: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """The weight in a dtype."""
    w = plain(w)
    made: torch.Tensor = execute(DEQUANTIZE, w.scheme, (dtype, *settings(w)), parts(w))
    return made


def refuse_scale_gradients(ctx: Any, name: str, *inputs: int) -> None:
    """NotImplementedError where one of these inputs, parts of weights, wants a gradient."""
    if any(ctx.needs_input_grad[at] for at in inputs):
        raise NotImplementedError(
            f"fast.{name} has no gradient for the scales of a stored weight: detach them, or learn them with fake_quantize"
        )


# linear: operands x, the weight's parts, bias; values the weight's settings


def linear_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: list[int],
    scheme: str,
    packed: bool,
) -> torch.Tensor:
    """Inputs times the transpose of the weight that codes and scales stand for."""
    values = (tuple(shape), 1, packed, False)
    made: torch.Tensor = execute(LINEAR, record_of(scheme), values, (x, codes, scale, outer, zero, bias))
    return made


def _linear_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, bias: Any, shape: list[int], scheme: str, packed: bool
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], shape[0]))


def save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The parts of the weight, and the dtypes of the gradients."""
    x, *stored, bias, shape, scheme, packed = inputs
    ctx.save_for_backward(*stored)
    ctx.stored, ctx.dtype = (shape, scheme, packed), x.dtype
    ctx.bias = None if bias is None else bias.dtype


def linear_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of x and bias."""
    refuse_scale_gradients(ctx, "linear", 2, 3, 4)
    dx = _times_weight(g, ctx.saved_tensors, *ctx.stored) if ctx.needs_input_grad[0] else None
    db = sum_of_rows(g).to(ctx.bias) if ctx.needs_input_grad[5] else None
    return dx, None, None, None, None, db, None, None, None


def _times_weight(
    g: torch.Tensor, stored: Sequence[Any], shape: Sequence[int], scheme: str, packed: bool
) -> torch.Tensor:
    """g (..., N) times a weight (N, K), by operators."""
    values = torch.ops.ao_lab.dequantize(*stored, list(shape), 1, scheme, packed, g.dtype)
    return g @ values


def sum_of_rows(g: torch.Tensor) -> torch.Tensor:
    """The gradient of a bias, in float32."""
    return g.float().reshape(-1, g.shape[-1]).sum(0)


def _linear(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, *stored, bias = operands
    w = weight_of(record, values, stored)
    check_weight(x, w, bias, "linear")
    w = plain(w)
    made: torch.Tensor = LINEAR_OP(x, *parts(w), bias, list(w.shape), record_name(w.scheme), w.packed)
    return made


def has_float_inputs(*tensors: Any) -> bool:
    """Whether inputs and bias, where there is one, have dtypes that kernels and torch multiply as the reference does."""
    return all(t is None or t.dtype in FLOATS for t in tensors)


def _linear_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By a kernel that decodes the weight on the way, or torch's product with what `dequantize` gives."""
    from fast.kernels.linear import select

    x, *stored, bias = operands
    w = weight_of(record, values, stored)
    check_weight(x, w, bias, "linear")
    if not has_float_inputs(x, bias):
        return None
    made = select.linear(x, w, bias, key)
    if made is not None:
        return made
    return torch.nn.functional.linear(x, dense(w, x.dtype), None if bias is None else bias.to(x.dtype))


def _linear_reference(record: Any, values: Values, operands: Operands) -> Any:
    x, *stored, bias = operands
    w = weight_of(record, values, stored)
    check_weight(x, w, bias, "linear")
    return reference.linear(x, w, bias)


LINEAR = Function(
    "linear", ("x", *STORED, "bias"), _linear_reference, _linear, _linear_kernel, differentiable=True
)
LINEAR_OP = register("linear", linear_op, _linear_fake, linear_backward, save_linear)

# linear_pair: operands x and the parts of both weights; values `pair_values`


def linear_pair_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    codes2: torch.Tensor,
    scale2: torch.Tensor,
    outer2: torch.Tensor | None,
    zero2: torch.Tensor | None,
    shape: list[int],
    scheme: str,
    packed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs times the transposes of two weights of one shape and scheme."""
    record, stored = record_of(scheme), (tuple(shape), 1, packed, False)
    operands = (x, codes, scale, outer, zero, codes2, scale2, outer2, zero2)
    made: tuple[torch.Tensor, torch.Tensor] = execute(
        LINEAR_PAIR, record, (record.key, *stored, *stored), operands
    )
    return made


def _linear_pair_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, codes2: Any, scale2: Any, outer2: Any, zero2: Any,
    shape: list[int], scheme: str, packed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    size = (*x.shape[:-1], shape[0])
    return x.new_empty(size), x.new_empty(size)


def _save_pair(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.stored = inputs[9:]


def _linear_pair_backward(ctx: Any, g: torch.Tensor, g2: torch.Tensor) -> tuple[Any, ...]:
    refuse_scale_gradients(ctx, "linear_pair", 2, 3, 4, 6, 7, 8)
    _, *stored = ctx.saved_tensors
    dx = _times_weight(g, stored[:4], *ctx.stored) + _times_weight(g2, stored[4:], *ctx.stored)
    return (dx, *(None,) * 11)


def _linear_pair(record: Any, values: Values, operands: Operands) -> tuple[Any, Any]:
    x, first, second = _checked_pair(record, values, operands, "linear_pair")
    if not alike(first, second):
        return _linear(first.scheme, settings(first), (x, *parts(first), None)), _linear(
            second.scheme, settings(second), (x, *parts(second), None)
        )
    made: tuple[torch.Tensor, torch.Tensor] = LINEAR_PAIR_OP(
        x, *parts(first, second), list(first.shape), record_name(first.scheme), first.packed
    )
    return made


def _checked_pair(
    record: Any, values: Values, operands: Operands, name: str
) -> tuple[Any, Quantized, Quantized]:
    x, *stored = operands
    first, second = pair_of(record, values, stored)
    for w in (first, second):
        check_weight(x, w, None, name)
    return x, first, second


def _linear_pair_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """One launch for one row and two weights that are stored alike."""
    x, first, second = _checked_pair(record, values, operands, "linear_pair")
    if x.numel() != x.shape[-1] or not alike(first, second):
        return None
    from fast.kernels.linear import pair_host

    return pair_host.linear_pair(x, first, second, key)


def _linear_pair_reference(record: Any, values: Values, operands: Operands) -> Any:
    x, first, second = _checked_pair(record, values, operands, "linear_pair")
    return tuple(execute(LINEAR, w.scheme, settings(w), (x, *parts(w), None)) for w in (first, second))


LINEAR_PAIR = Function(
    "linear_pair", ("x", *TWO), _linear_pair_reference, _linear_pair, _linear_pair_kernel, differentiable=True
)
LINEAR_PAIR_OP = register("linear_pair", linear_pair_op, _linear_pair_fake, _linear_pair_backward, _save_pair)

# linear_swiglu: operands and values as for linear_pair


def linear_swiglu_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    codes2: torch.Tensor,
    scale2: torch.Tensor,
    outer2: torch.Tensor | None,
    zero2: torch.Tensor | None,
    shape: list[int],
    scheme: str,
    packed: bool,
    scheme2: str,
    packed2: bool,
) -> torch.Tensor:
    """silu of the first product times the second, of two weights of one shape."""
    size = tuple(shape)
    values = (record_of(scheme2).key, size, 1, packed, False, size, 1, packed2, False)
    operands = (x, codes, scale, outer, zero, codes2, scale2, outer2, zero2)
    made: torch.Tensor = execute(LINEAR_SWIGLU, record_of(scheme), values, operands)
    return made


def _linear_swiglu_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, codes2: Any, scale2: Any, outer2: Any, zero2: Any,
    shape: list[int], scheme: str, packed: bool, scheme2: str, packed2: bool,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], shape[0]))


def _linear_swiglu_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Both products are made again."""
    refuse_scale_gradients(ctx, "linear_swiglu", 2, 3, 4, 6, 7, 8)
    x, *stored = ctx.saved_tensors
    shape, *kinds = ctx.stored
    weights = [(stored[:4], shape, *kinds[:2]), (stored[4:], shape, *kinds[2:])]
    gate, up = (LINEAR_OP(x, *w[0], None, *w[1:]) for w in weights)
    dgate, dup = swiglu_gradient(g, gate, up)
    return (_times_weight(dgate, *weights[0]) + _times_weight(dup, *weights[1]), *(None,) * 13)


def _linear_swiglu(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, gate, up = _checked_swiglu(record, values, operands)
    gate, up = plain(gate), plain(up)
    stored = record_name(gate.scheme), gate.packed, record_name(up.scheme), up.packed
    made: torch.Tensor = LINEAR_SWIGLU_OP(x, *parts(gate, up), list(gate.shape), *stored)
    return made


def _checked_swiglu(record: Any, values: Values, operands: Operands) -> tuple[Any, Quantized, Quantized]:
    x, gate, up = _checked_pair(record, values, operands, "linear_swiglu")
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
    """One launch for one row and two weights that are stored alike."""
    x, gate, up = _checked_swiglu(record, values, operands)
    if x.numel() != x.shape[-1] or not alike(gate, up):
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
    "linear_swiglu", linear_swiglu_op, _linear_swiglu_fake, _linear_swiglu_backward, _save_pair
)

__all__ = ["LINEAR", "LINEAR_PAIR", "LINEAR_SWIGLU", "dense", "linear_backward", "save_linear"]
