"""`linear` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`.

Operands are x, the weight's tensors and the bias; values `cache.settings` of the weight.
"""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.dispatch import Function, Kernel, Reference, execute
from fast.layers.column_sums import column_sums
from fast.matmul.stored_weight_ops import (
    FORM,
    STORED,
    TENSORS,
    Operands,
    Values,
    dense,
    has_float_inputs,
    refuse_scale_gradients,
    times_weight,
)
from fast.matmul.weights import check_weight, parts, plain, weight_of
from fast.ops import record_name, register
from reference import Quantized
from reference.schemes.schemes import record_of

SCHEMA = f"(Tensor x, {TENSORS}, Tensor? bias, {FORM}) -> Tensor"


def linear_function(name: str, compute: Reference, kernel: Kernel | None = None) -> tuple[Function, Any]:
    """A product of x, a stored weight and a bias with its operator ``ao_lab::name``.

    compute: by the reference, or on a CPU. The operator takes x, codes, scale, outer scale, zero point, bias, the weight's
    shape, its record as text, and whether codes are packed.
    """

    def implementation(*arguments: Any) -> torch.Tensor:
        *operands, shape, scheme, packed = arguments
        y: torch.Tensor = execute(function, record_of(scheme), (tuple(shape), 1, packed, False), operands)
        return y

    def operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
        x, w, bias = linear_operands(record, values, operands)
        w = plain(w)
        y: torch.Tensor = operator(x, *parts(w), bias, list(w.shape), record_name(w.scheme), w.packed)
        return y

    function = Function(name, ("x", *STORED, "bias"), compute, operate, kernel, differentiable=True)
    operator = register(name, implementation, _linear_fake, _linear_backward, _save_linear, SCHEMA)
    return function, operator


def linear_operands(record: Any, values: Values, operands: Operands) -> tuple[Any, Quantized, Any]:
    """Inputs, weight and bias, checked."""
    x, *stored, bias = operands
    w = weight_of(record, values, stored)
    check_weight(x, w, bias, "linear")
    return x, w, bias


def _linear_fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    shape = arguments[-3]
    return x.new_empty((*x.shape[:-1], shape[0]))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The parts of the weight, and the dtypes of the gradients."""
    refuse_scale_gradients(ctx, "linear", 2, 3, 4)
    x, *stored, bias, shape, scheme, packed = inputs
    ctx.save_for_backward(*stored)
    ctx.stored, ctx.dtype = (shape, scheme, packed), x.dtype
    ctx.bias = None if bias is None else bias.dtype


def _linear_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of x and bias."""
    dx = times_weight(g, ctx.saved_tensors, *ctx.stored) if ctx.needs_input_grad[0] else None
    db = column_sums(g, ctx.bias) if ctx.needs_input_grad[5] else None
    return dx, None, None, None, None, db, None, None, None


def _linear_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By a kernel that decodes the weight on the way, or torch's product with what `dequantize` gives."""
    from fast.kernels.linear import select

    x, w, bias = linear_operands(record, values, operands)
    if not has_float_inputs(x, bias):
        return None
    y = select.linear(x, w, bias, key)
    if y is not None:
        return y
    return torch.nn.functional.linear(x, dense(w, x.dtype), None if bias is None else bias.to(x.dtype))


def _linear_reference(record: Any, values: Values, operands: Operands) -> Any:
    return reference.linear(*linear_operands(record, values, operands))


LINEAR, LINEAR_OP = linear_function("linear", _linear_reference, _linear_kernel)

__all__ = ["LINEAR", "LINEAR_OP", "linear_function", "linear_operands"]
