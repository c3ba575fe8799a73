"""`linear`: inputs times a stored weight, and `linear_of_codes`, for torch tensors; see `reference.linear`.

Inputs that are codes themselves are multiplied as codes: `linear_of_codes`, of one row, of several integers, and of several
floats where torch's own product is slow (`fast.gemm.choose.codes_beat_torch`).

Each below its signature: kernel, reference, operator and gradient; see `fast.dispatch`. Operands of `linear` are x, the
weight's tensors and the bias; values `cache.settings` of the weight.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import reference
from fast.dispatch import Function, Kernel, Reference, execute, has_float_inputs, run, settings
from fast.gemm.choose import choose
from fast.gemm.families import TORCH_DEQUANTIZE, TRITON_SCALED_MM, of_codes, of_stored
from fast.layers.column_sums import column_sums
from fast.matmul.weights import (
    FORM,
    STORED,
    TENSORS,
    Operands,
    Values,
    check_codes,
    check_weight,
    dense,
    parts,
    plain,
    refuse_scale_gradients,
    require_weights,
    times_weight,
    weight_of,
)
from fast.ops import record_name, register
from reference import Quantized
from reference.arrays.namespace import choice
from reference.matmul.exact import RESULTS
from reference.matmul.linear import check_linear
from reference.quantize.quantize import check_quantized
from reference.schemes.schemes import record_of

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


SCHEMA = f"(Tensor x, {TENSORS}, Tensor? bias, {FORM}) -> Tensor"


def linear_function(
    name: str, compute: Reference, kernel: Kernel | None = None, on_cpu: Reference | None = None
) -> tuple[Function, Any]:
    """A product of x, a stored weight and a bias with its operator ``ao_lab::name``.

    compute: by the reference, or on a CPU. on_cpu: what the operator calls there in place of it, past all that is looked up.
    The operator takes x, codes, scale, outer scale, zero point, bias, the weight's shape, its record as text, and whether codes
    are packed.
    """

    def implementation(*arguments: Any) -> torch.Tensor:
        *operands, shape, scheme, packed = arguments
        y: torch.Tensor = product(record_of(scheme), (tuple(shape), 1, packed, False), operands)
        return y

    def operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
        x, w, bias = linear_operands(record, values, operands)
        w = plain(w)
        y: torch.Tensor = operator(x, *parts(w), bias, list(w.shape), record_name(w.scheme), w.packed)
        return y

    function = Function(name, ("x", *STORED, "bias"), compute, operate, kernel, differentiable=True)
    product = on_cpu or partial(execute, function)
    devices = ("CPU",) if on_cpu else ("CUDA",)
    operator = register(
        name, implementation, _linear_fake, _linear_backward, _save_linear, SCHEMA, (0, 5), devices
    )
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
    from fast.kernels.triton_gemv import select

    x, w, bias = linear_operands(record, values, operands)
    if not has_float_inputs(x, bias):
        return None
    for family in choose(of_stored(w, x.numel() // max(x.shape[-1], 1), x.dtype)):
        y = None if family is TORCH_DEQUANTIZE else select.linear(x, w, bias, family.name, key)
        if y is not None:
            return y
    return torch.nn.functional.linear(x, dense(w, x.dtype), None if bias is None else bias.to(x.dtype))


def _linear_reference(record: Any, values: Values, operands: Operands) -> Any:
    return reference.linear(*linear_operands(record, values, operands))


LINEAR, LINEAR_OP = linear_function("linear", _linear_reference, _linear_kernel)


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (..., K) times the transpose of a stored weight (N, K), plus bias (N), in x's dtype and on its device.

    On a GPU codes are decoded on the way to the products and nothing dense is made, for one row and for up to 128 rows of
    bfloat16 or float16 (32 where scales change along K; of packed integers of 2, 3, 5 and 6 bits on Hopper 96 where the
    weight has 8192 rows or more, else 32); the result is within `reference.linear_error_bound` of the exact product, which
    promises nothing where sums of codes and inputs leave float32 before their scale: there, and where an input is infinite, a
    result may be NaN. Where no kernel takes them (`fast.gemm.choose.rows_stored`), torch multiplies by what `dequantize`
    gives in x's dtype. CPU tensors run `reference.linear`, exact and slow. Arguments and errors are its. Differentiable in x
    and bias: the gradient of x is a product with the dequantized weight. NotImplementedError where scales require a gradient.
    """
    require_weights(x, "linear", w)
    operands = (x, w.codes, w.scale, w.outer, w.zero, bias)
    y: torch.Tensor = run(LINEAR, w.scheme, settings(w), operands)
    return y


def linear_of_codes(
    x: Quantized,
    w: Quantized,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype,
    fast_sums: bool = False,
) -> torch.Tensor:
    """Codes x (M, K) times the transpose of a stored weight (N, K), plus bias (N), in a dtype and on x's device.

    Both are int8 (x perhaps has a zero point in all or for each row), or both float8_e4m3fn or float8_e5m2, and each has one
    float32 scale in all or for each row. This is `reference.linear` with accumulation "blocked" and one block, which CPU
    tensors run: the sum of codes, x's scale, the weight's, the bias, each rounded to float32, and one rounding to `dtype`
    (float32, bfloat16 or float16). On a GPU weights are read once, as they are stored. Sums of integers are exact, results
    the same bits. Sums of one row of floats are float32 in another order, within `reference.matmul_error_bound` of that
    accumulation; those of several rows are the tensor core's, within its bound for "hopper_fp8" with promote=128, and with
    fast_sums (torch's `use_fast_accum`) without it. Where no kernel takes them (see `fast.gemm.choose.takes_codes`), the
    reference runs, on the host. ValueError for other operands; else those of `reference.linear`. Differentiable in the bias;
    NotImplementedError for scales that require a gradient.
    """
    if not isinstance(x, Quantized):
        raise TypeError(
            f"linear_of_codes takes Quantized inputs, got {type(x).__name__}; `linear` takes others"
        )
    if not isinstance(w, Quantized):
        check_weight(x, w, bias, "linear_of_codes")
    # Parts that have no place in the product. A key has the id of one record: the other one travels by name.
    extra = x.outer is not None or w.outer is not None or w.zero is not None
    values = (dtype, w.scheme.key, extra, fast_sums, *settings(x), *settings(w))
    y: torch.Tensor = run(
        LINEAR_OF_CODES, x.scheme, values, (x.codes, x.scale, x.zero, w.codes, w.scale, bias)
    )
    return y


__all__ = ["LINEAR", "LINEAR_OF_CODES", "LINEAR_OP", "linear", "linear_function", "linear_of_codes"]
