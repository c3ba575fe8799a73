"""`linear_of_codes` below its signature: kernel, reference, operator and gradient; see `fast.dispatch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, has_float_inputs
from fast.gemm.choose import choose
from fast.gemm.families import TRITON_SCALED_MM, of_codes
from fast.layers.column_sums import column_sums
from fast.matmul.weights import check_codes, check_weight, refuse_scale_gradients, weight_of
from fast.ops import record_name, register
from reference import Quantized
from reference.arrays.namespace import choice
from reference.matmul.exact import RESULTS
from reference.matmul.linear import check_linear
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]

# linear_of_codes: operands codes, scale and zero point of x, codes and scale of the weight, bias;
# values dtype, the weight's record, whether there are other parts, whether sums are fast, what else is stored of both


def linear_of_codes_op(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    x_zero: torch.Tensor | None,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    x_scheme: str,
    scheme: str,
    dtype: torch.dtype,
    fast_sums: bool = False,
) -> torch.Tensor:
    """Rows of codes times the transpose of a weight of codes."""
    sizes = (tuple(x.shape), 1, False, False, tuple(codes.shape), 1, False, False)
    values = (dtype, record_of(scheme).key, False, fast_sums, *sizes)
    result: torch.Tensor = execute(
        LINEAR_OF_CODES, record_of(x_scheme), values, (x, x_scale, x_zero, codes, scale, bias)
    )
    return result


def _linear_of_codes_fake(
    x: torch.Tensor, x_scale: Any, x_zero: Any, codes: torch.Tensor, scale: Any, bias: Any, x_scheme: str, scheme: str,
    dtype: torch.dtype, fast_sums: bool = False,
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], codes.shape[0]), dtype=dtype)


def _save_codes(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    refuse_scale_gradients(ctx, "linear_of_codes", 1, 2, 4)
    ctx.bias = None if inputs[5] is None else inputs[5].dtype


def _linear_of_codes_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return (*(None,) * 5, column_sums(g, ctx.bias) if ctx.needs_input_grad[5] else None, *(None,) * 4)


def _codes_of(record: Any, values: Values, operands: Operands) -> tuple[Quantized, Quantized, Any, str]:
    """Inputs, weight, bias and the name of the dtype, checked."""
    dtype, key, extra, _, *stored = values
    codes, scale, zero, w_codes, w_scale, bias = operands
    x = weight_of(record, stored[:4], (codes, scale, None, zero))
    w = weight_of(record_of(key), stored[4:], (w_codes, w_scale, None, None))
    check_linear(x, w, bias)
    check_codes(x, w, extra)
    check_weight(x, w, bias, "linear_of_codes")
    return x, w, bias, choice(str(dtype).removeprefix("torch."), tuple(RESULTS), "dtype")


def _linear_of_codes(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, w, _, _ = _codes_of(record, values, operands)
    names = record_name(x.scheme), record_name(w.scheme)
    result: torch.Tensor = LINEAR_OF_CODES_OP(*operands, *names, values[0], values[3])
    return result


def _linear_of_codes_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    x, w, bias, _ = _codes_of(record, values, operands)
    check_quantized(x)
    check_quantized(w)
    if not has_float_inputs(bias):
        return None
    dtype, shape = values[0], (w.shape[0], w.shape[1])
    for family in choose(of_codes(x.scheme, w.scheme, shape, x.shape[0], dtype, x.codes.device)):
        multiply = family.function("linear")
        # Whether the tensor core's sums are fast is asked of those of floats alone.
        options = {"fast_sums": values[3]} if family is TRITON_SCALED_MM else {}
        y = None if multiply is None else multiply(x, w, bias, dtype, key, **options)
        if y is not None:
            return y
    return None


def _linear_of_codes_reference(record: Any, values: Values, operands: Operands) -> Any:
    x, w, bias, name = _codes_of(record, values, operands)
    check_quantized(x)
    check_quantized(w)
    options: dict[str, Any] = {"accumulation": "blocked", "block": max(w.shape[1], 1), "out_dtype": name}
    return reference.linear(x, w, bias, **options)


LINEAR_OF_CODES = Function(
    "linear_of_codes", ("x", "scale of x", "zero point of x", "codes", "scale", "bias"), _linear_of_codes_reference,
    _linear_of_codes, _linear_of_codes_kernel, differentiable=True,
)  # fmt: skip
LINEAR_OF_CODES_OP = register(
    "linear_of_codes", linear_of_codes_op, _linear_of_codes_fake, _linear_of_codes_backward, _save_codes
)
