"""`linear` of inputs that are quantized on the way and a preshuffled weight, for torch tensors.

`linear_small_dynamic` below its signature: kernels, reference, operator and gradient; see `fast.dispatch`.

Operands are those of `linear_small`; values the weight's shape (N, K) and the record of the inputs as text.

Which schemes of inputs a product of 16-bit floats computes exactly: a question to the record alone.

The tensor core multiplies bfloat16 or float16, exactly, and adds in float32. So a product of a quantized input is that of
its dequantized values, to the bound of one of the values alone, where 16-bit floats hold

* ``values``: the elements times their scales. These are powers of two: they move no digit, and what is rounded from 16-bit
  floats to fewer digits is a multiple of their smallest one. Above the dtype's largest number it stops there, as
  `reference.dequantize` in that dtype.
* ``codes``: the elements less their zero point, under one float scale for each row, by which the sums are multiplied.

Neither holds of scales with digits of their own for parts of a row (float32 in blocks, an outer scale over e4m3 ones).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

import reference
from fast.dispatch import Function, execute, has_float_inputs, require_tensor, run
from fast.gemm.choose import choose
from fast.gemm.families import SM90_W4A16_GEMM, of_preshuffled
from fast.layers.column_sums import column_sums
from fast.matmul.preshuffled import layout
from fast.matmul.preshuffled.linear import LINEAR_SMALL, STORED, restored, weight_of
from fast.matmul.weights import (
    Operands,
    Values,
    parts,
    refuse_scale_gradients,
    times_weight,
)
from fast.ops import record_name, register
from fast.quantize.fake_quantize import FAKE_QUANTIZE, VJP_OP
from fast.scale_factors import form_of
from reference import Quantized, Scheme
from reference.matmul.linear import check_linear, result_dtype
from reference.schemes.schemes import record_of

#: Dtypes of inputs that the tensor core takes here: digits of a significand, exponents of the smallest number and the largest.
DIGITS = {torch.bfloat16: (8, -133, 127), torch.float16: (11, -24, 15)}
VALUES, CODES = "values", "codes"
#: Storages of the scales of rows, which float32 holds.
ROW_STORAGES = ("float32", "bfloat16", "float16")


def kind_of(scheme: Scheme) -> str | None:
    """What the dtypes of `DIGITS` hold exactly of inputs in a scheme, VALUES or CODES; None where neither."""
    return _kind(scheme.key)


@lru_cache(maxsize=1024)
def inputs_record(key: str) -> Scheme:
    """The record of a `Scheme.key`, the same object in every call: the cache of calls knows records by their ids."""
    return record_of(key)


def inputs_reason(scheme: Scheme) -> str | None:
    """Why no product of 16-bit floats computes with inputs in a scheme; None where one does."""
    if kind_of(scheme) is not None:
        return None
    return f"16-bit floats must hold {scheme.name} exactly: elements times powers of two, or under one float scale for each row"


@lru_cache(maxsize=1024)
def _kind(key: str) -> str | None:
    scheme = record_of(key)
    scale, fmt = scheme.scale, scheme.format
    plain = scheme.outer is None and scheme.rounding == "nearest_even" and scale.stored == "decode"
    if not plain or fmt.kind not in ("float", "int") or scheme.dequantize == "target":
        return None
    if (
        scale.power_of_two
        and isinstance(scale.block, int)
        and scheme.zero is None
        and _digits(scheme) <= _least_digits()
    ):
        return VALUES
    rows = scale.block == -1 and scale.storage in ROW_STORAGES
    return CODES if rows and _codes_are_exact(scheme) else None


def _least_digits() -> int:
    return min(digits for digits, *_ in DIGITS.values())


def _digits(scheme: Scheme) -> int:
    """Digits of the longest significand of an element."""
    return _significand(scheme.format.values)


def _significand(values: np.ndarray) -> int:
    """Digits of the longest of these numbers, from their first to their last that is not 0."""
    finite = values[np.isfinite(values) & (values != 0)].astype(np.float64)
    fractions = np.abs(np.frexp(finite)[0])
    return next(digits for digits in range(1, 54) if bool((fractions * 2.0**digits % 1 == 0).all()))


def _codes_are_exact(scheme: Scheme) -> bool:
    """Whether elements less any zero point have few enough digits, and lie in the range of every dtype."""
    fmt = scheme.format
    values = fmt.values
    if scheme.zero is not None:
        low, high = fmt.integer_range
        values = np.arange(low - high, high - low + 1, dtype=np.float32)
        if scheme.zero.rule != "code":
            return False
    finite = np.abs(values[np.isfinite(values) & (values != 0)].astype(np.float64))
    span = [int(np.frexp(end)[1]) - 1 for end in (finite.min(), finite.max())]
    return all(
        _significand(values) <= digits and lowest <= span[0] and span[1] <= highest
        for digits, lowest, highest in DIGITS.values()
    )


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
    from fast.kernels import exact_inputs
    from fast.scale_factors import ArrangedWeight

    x, w, bias = _checked(record, values, operands)
    if not has_float_inputs(x, bias):
        return None
    scheme, kind = _scheme(values)
    arranged = ArrangedWeight(w.codes, w.scale, w.zero, w.shape, *form_of(record, w.shape[1]))  # type: ignore[arg-type]
    if x.numel():
        families = [
            family.name for family in choose(of_preshuffled(arranged, x.numel() // w.shape[1], x.dtype))
        ]
    if x.numel() and not (kind == VALUES and families[0] == SM90_W4A16_GEMM.name):
        y = exact_inputs.linear_small_dynamic(
            x, scheme, kind, arranged, bias, families, key=key, record=record
        )
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


def linear_small_dynamic(
    x: torch.Tensor, scheme: str | Scheme, w: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x (..., K) in a scheme along K times the transpose of a preshuffled weight (N, K), plus bias (N), in x's dtype.

    The scales of x are found anew. scheme: one that `inputs_reason` has nothing against, ValueError with its rule for others.
    On a GPU up to `linear.MOST_ROWS` rows of bfloat16 or float16 take two launches (three where K is in parts), which read
    the weight as it is stored; on Hopper more rows of codes under a scale for each row do too, but for those that
    `linear_small` multiplies by the dense weight. Bounds are those of `linear_small`, x being the dequantized inputs: every
    addition is counted twice there, which covers the scales of rows. The bits are the same in every call. Other inputs are
    what `linear_small` gives of what `fast.fake_quantize` gives in x's dtype (which is infinite where that overflows: float16
    near its largest number), and so are 33 to 128 rows in schemes whose values that dtype holds (MX), where another kernel
    than that of few rows is faster. CPU tensors run `reference.linear` of the quantized inputs. Errors are its.
    Differentiable in x, straight through as `fake_quantize` is, and in bias; NotImplementedError where scales require a
    gradient.
    """
    require_tensor(x, "linear_small_dynamic")
    values = (tuple(w.shape), record_name(scheme))
    y: torch.Tensor = run(LINEAR_SMALL_DYNAMIC, w.scheme, values, (x, w.codes, w.scale, w.zero, bias))
    return y


__all__ = [
    "CODES",
    "DIGITS",
    "LINEAR_SMALL_DYNAMIC",
    "VALUES",
    "inputs_reason",
    "inputs_record",
    "kind_of",
    "linear_small_dynamic",
]
