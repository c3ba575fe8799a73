"""`linear_small_dynamic` below its signature: kernels, reference, operator and gradient; see `fast.dispatch`.

Operands are those of `linear_small`; values the weight's shape (N, K) and the record of the inputs as text.
"""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.dispatch import Function, execute
from fast.gemm import choose
from fast.gemm.families import SM90_W4A16_GEMM
from fast.layers.column_sums import column_sums
from fast.matmul.preshuffled import layout
from fast.matmul.preshuffled.exact_inputs import VALUES, inputs_reason, inputs_record, kind_of
from fast.matmul.preshuffled.ops import LINEAR_SMALL, STORED, restored, weight_of
from fast.matmul.stored_weight_ops import (
    Operands,
    Values,
    has_float_inputs,
    refuse_scale_gradients,
    times_weight,
)
from fast.matmul.weights import parts
from fast.ops import record_name, register
from fast.quantize.fake_quantize import FAKE_QUANTIZE, VJP_OP
from reference import Quantized, Scheme
from reference.matmul.linear import check_linear, result_dtype
from reference.schemes.schemes import record_of

TENSORS = "Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? bias"
SCHEMA = f"({TENSORS}, SymInt[] shape, str x_scheme, str scheme) -> Tensor"


def linear_small_dynamic_op(*arguments: Any) -> torch.Tensor:
    """Inputs in a scheme times the transpose of a preshuffled weight."""
    *operands, shape, x_scheme, scheme = arguments
    values = (tuple(shape), x_scheme)
    y: torch.Tensor = execute(LINEAR_SMALL_DYNAMIC, record_of(scheme), values, operands)
    return y


def _checked(record: Any, values: Values, operands: Operands) -> tuple[Any, Quantized, Any]:
    """Inputs, weight and bias; errors are those of `linear`."""
    x, *stored, bias = operands
    w = weight_of(record, values[0], stored)
    check_linear(x, w, bias)
    return x, w, bias


def _scheme(values: Values) -> tuple[Scheme, str]:
    """The inputs' record, and what is exact of them; ValueError where nothing is."""
    scheme = inputs_record(values[1])
    kind = kind_of(scheme)
    if kind is None:
        raise ValueError(
            f"linear_small_dynamic: {inputs_reason(scheme)}; fake_quantize the inputs and multiply them by `linear_small`"
        )
    return scheme, kind


def _operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, w, bias = _checked(record, values, operands)
    names = values[1], record_name(w.scheme)
    y: torch.Tensor = LINEAR_SMALL_DYNAMIC_OP(x, w.codes, w.scale, w.zero, bias, list(w.shape), *names)
    return y


def _fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], arguments[-3][0]))


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """Of 16-bit rows by a kernel in front of the product's; of others `linear_small` of what the inputs' scheme makes of them
    in their dtype, and so of values, which 16-bit floats hold exactly, that the kernel of many rows multiplies faster."""
    from fast.kernels.exact_inputs import host
    from fast.kernels.linear_small.layout import ArrangedWeight

    x, w, bias = _checked(record, values, operands)
    if not has_float_inputs(x, bias):
        return None
    scheme, kind = _scheme(values)
    arranged = ArrangedWeight(w.codes, w.scale, w.zero, w.shape, *layout.form_of(record, w.shape[1]))  # type: ignore[arg-type]
    if x.numel():
        families = [family.name for family in choose.preshuffled(arranged, x.numel() // w.shape[1], x.dtype)]
    if x.numel() and not (kind == VALUES and families[0] == SM90_W4A16_GEMM.name):
        y = host.linear_small_dynamic(x, scheme, kind, arranged, bias, families, key=key, record=record)
        if y is not None:
            return y
    rounded = execute(FAKE_QUANTIZE, scheme, (-1,), (x,))
    return execute(LINEAR_SMALL, record, values[:1], (rounded, *operands[1:]))


def _reference(record: Any, values: Values, operands: Operands) -> Any:
    """Of rows of codes."""
    x, w, bias = _checked(record, values, operands)
    rows = reference.quantize(x.reshape(-1, x.shape[-1]), _scheme(values)[0], axis=-1)
    y: Any = reference.linear(rows, layout.restored(w), bias, out_dtype=result_dtype(x))
    return y.reshape(*x.shape[:-1], w.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Inputs and the parts of the weight, and the dtype of the bias's gradient."""
    refuse_scale_gradients(ctx, "linear_small_dynamic", 2, 3)
    x, *stored, bias, shape, x_scheme, scheme = inputs
    ctx.save_for_backward(x, *stored)
    ctx.stored = shape, scheme
    ctx.x_scheme = x_scheme
    ctx.bias = None if bias is None else bias.dtype


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of x, where it did not saturate, and bias."""
    dx, (shape, scheme), (x, *stored) = None, ctx.stored, ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        q = restored(weight_of(record_of(scheme), shape, stored))
        through = times_weight(g, parts(q), shape, scheme, q.packed)
        dx = VJP_OP(through, x, None, None, None, ctx.x_scheme, -1, None)[0]
    db = column_sums(g, ctx.bias) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, db, None, None, None


LINEAR_SMALL_DYNAMIC = Function(
    "linear_small_dynamic", ("x", *STORED, "bias"), _reference, _operate, _kernel, differentiable=True
)
LINEAR_SMALL_DYNAMIC_OP = register(
    "linear_small_dynamic", linear_small_dynamic_op, _fake, _backward, _save, SCHEMA
)

__all__ = ["LINEAR_SMALL_DYNAMIC", "LINEAR_SMALL_DYNAMIC_OP"]
