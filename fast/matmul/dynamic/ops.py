"""`linear_dynamic` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`.

Operands are x, codes and scale of the weight, bias; values the record of the inputs as text, whether the weight has other
parts, and how it is stored.
"""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.dispatch import Function, execute
from fast.kernels.launch.cache import settings
from fast.layers.column_sums import column_sums
from fast.matmul.codes_ops import LINEAR_OF_CODES
from fast.matmul.stored_weight_ops import Operands, Values, has_float_inputs, refuse_scale_gradients
from fast.matmul.weights import check_weight, weight_of
from fast.ops import record_name, register
from fast.quantize.ops import QUANTIZE, operands_of
from reference import Quantized
from reference.matmul.linear import check_linear, result_dtype
from reference.schemes.record_text import record_of


def linear_dynamic_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scheme: str,
    scheme: str,
) -> torch.Tensor:
    """Inputs in a scheme times the transpose of a weight of codes."""
    values = (x_scheme, False, tuple(codes.shape), 1, False, False)
    y: torch.Tensor = execute(LINEAR_DYNAMIC, record_of(scheme), values, (x, codes, scale, bias))
    return y


def _checked(record: Any, values: Values, operands: Operands) -> tuple[Any, Quantized, Any]:
    """Inputs, weight and bias; errors are those of `linear_of_codes`."""
    x, codes, scale, bias = operands
    w = weight_of(record, values[2:], (codes, scale, None, None))
    check_linear(x, w, bias)
    check_weight(x, w, bias, "linear_dynamic")
    if x.ndim != 2 or values[1]:
        raise ValueError(
            f"linear_dynamic takes inputs in rows (M, K) and weights of one scale for each row or in all, got {tuple(x.shape)} "
            f"and {w.scheme.name}; reshape them, or `linear` takes such weights"
        )
    return x, w, bias


def _operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, w, bias = _checked(record, values, operands)
    y: torch.Tensor = LINEAR_DYNAMIC_OP(x, w.codes, w.scale, bias, values[0], record_name(w.scheme))
    return y


def _fake(x: torch.Tensor, codes: torch.Tensor, *rest: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """In one launch, or quantized first."""
    from fast.kernels.fp8_skinny import host

    x, w, bias = _checked(record, values, operands)
    if not has_float_inputs(x, bias):
        return None
    scheme = record_of(values[0])
    if host.takes_schemes(scheme.key, record.key) and x.numel():
        y = host.fp8_skinny(x, w.codes, w.scale, bias, key=key, record=record)
        if y is not None:
            return y
    q = execute(QUANTIZE, scheme, (-1, False, False), operands_of(x, None, None))
    given = (x.dtype, record.key, False, False, *settings(q), *settings(w))
    return execute(LINEAR_OF_CODES, scheme, given, (q.codes, q.scale, q.zero, w.codes, w.scale, bias))


def _reference(record: Any, values: Values, operands: Operands) -> Any:
    x, w, bias = _checked(record, values, operands)
    rows = reference.quantize(x, record_of(values[0]), axis=-1)
    options: dict[str, Any] = {"accumulation": "blocked", "block": max(w.shape[1], 1)}
    return reference.linear(rows, w, bias, out_dtype=result_dtype(x), **options)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    refuse_scale_gradients(ctx, "linear_dynamic", 2)
    ctx.bias = None if inputs[3] is None else inputs[3].dtype


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    db = column_sums(g, ctx.bias) if ctx.needs_input_grad[3] else None
    return None, None, None, db, None, None


LINEAR_DYNAMIC = Function(
    "linear_dynamic", ("x", "codes", "scale", "bias"), _reference, _operate, _kernel, differentiable=True
)
LINEAR_DYNAMIC_OP = register("linear_dynamic", linear_dynamic_op, _fake, _backward, _save)

__all__ = ["LINEAR_DYNAMIC", "LINEAR_DYNAMIC_OP"]
