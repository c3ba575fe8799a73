"""Rows sorted by expert times the experts' preshuffled weights (E, N, K): the function, its operator and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.gemm.choose import choose
from fast.gemm.families import SM90_W4A16_GEMM, of_preshuffled
from fast.matmul.preshuffled import layout
from fast.matmul.preshuffled.linear import ALL_ROWS, INPUTS, STORED, restored, weight_of
from fast.matmul.weights import Operands, Values, dense, parts, refuse_scale_gradients
from fast.ops import record_name, register
from fast.scale_factors import form_of
from reference import Quantized
from reference.schemes.schemes import record_of

if TYPE_CHECKING:
    from fast.scale_factors import ArrangedWeight

#: Rows of an expert, on average, that are read as stored where `sm90_w4a16_gemm` takes no weights: those of `triton_small_m`.
MOST_AVERAGE = 64
SCHEMA = "(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor offsets, SymInt[] shape, str scheme) -> Tensor"


def grouped_linear_small(x: torch.Tensor, w: Quantized, offsets: torch.Tensor) -> torch.Tensor:
    """x (T, K), sorted by expert, times the transpose of each expert's preshuffled weight (N, K): (T, N) in x's dtype.

    w: what `preshuffled.linear.preshuffled` makes of weights (E, N, K). offsets: int32 (E,), on x's device: the row after
    each expert's last one; on a GPU the host reads none of them. Rows behind the last are undefined there, as torch's
    `_grouped_mm` leaves them, and zeros on a CPU. On a GPU up to `average_rows_as_stored` rows an expert, on average, of
    bfloat16 or float16 read the weights as they are stored: within `reference.linear_error_bound` of the exact product, the
    same bits in every call; more are multiplied by torch with what `dequantize` gives in x's dtype. CPU tensors run
    `reference.linear` of each expert. ValueError for shapes and offsets that do not go together. Differentiable in x;
    NotImplementedError where scales require a gradient.
    """
    operands = (x, w.codes, w.scale, w.zero, offsets)
    y: torch.Tensor = run(GROUPED_LINEAR_SMALL, w.scheme, (tuple(w.shape),), operands)
    return y


def grouped_linear_small_op(*arguments: Any) -> torch.Tensor:
    """Rows by the transposed weight of the expert of each."""
    *operands, shape, scheme = arguments
    y: torch.Tensor = execute(GROUPED_LINEAR_SMALL, record_of(scheme), (tuple(shape),), operands)
    return y


def _checked(record: Any, values: Values, operands: Operands) -> tuple[Any, Quantized, Any]:
    """Inputs, weights and offsets."""
    x, *stored, offsets = operands
    w = weight_of(record, values[0], stored)
    if len(w.shape) != 3 or x.dim() != 2 or x.shape[1] != w.shape[2]:
        raise ValueError(
            f"grouped_linear_small takes rows (T, K) and experts' weights (E, N, K), got {tuple(x.shape)} and {tuple(w.shape)}"
        )
    if offsets.dtype != torch.int32 or tuple(offsets.shape) != (w.shape[0],):
        raise ValueError(
            f"grouped_linear_small takes int32 offsets, one for each of {w.shape[0]} experts, got {offsets.dtype} of shape "
            f"{tuple(offsets.shape)}"
        )
    return x, w, offsets


def _operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, w, offsets = _checked(record, values, operands)
    name = record_name(w.scheme)
    y: torch.Tensor = GROUPED_LINEAR_SMALL_OP(x, w.codes, w.scale, w.zero, offsets, list(w.shape), name)
    return y


def _fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], arguments[-2][1]))


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """16-bit rows by the kernels, of few or of many rows; where neither takes them torch's product with dense weights."""
    from fast.kernels.triton_small_m.dense import arranged_dense

    x, w, offsets = _checked(record, values, operands)
    if x.dtype not in INPUTS:
        return None
    weights, average = _arranged(w), x.shape[0] / max(w.shape[0], 1)
    for family in choose(of_preshuffled(weights, average, x.dtype, experts=max(w.shape[0], 1))):
        multiply = family.function("experts")
        y = None if multiply is None else multiply(x, weights, offsets, key=key, record=record)
        if y is not None:
            return y
    dense_weights = arranged_dense(weights, x.dtype)
    every = dense(restored(w), x.dtype) if dense_weights is None else dense_weights
    return torch._grouped_mm(x, every.transpose(1, 2), offsets)


def _arranged(w: Quantized) -> ArrangedWeight:
    """Weights of experts as kernels take them."""
    from fast.scale_factors import ArrangedWeight

    shape = (w.shape[1], w.shape[2])
    return ArrangedWeight(w.codes, w.scale, w.zero, shape, *form_of(w.scheme, shape[1]))


def average_rows_as_stored(w: Quantized, dtype: torch.dtype) -> int:
    """The most rows of a dtype an expert, on average, that read weights (E, N, K) as they are stored on their device."""
    p = of_preshuffled(_arranged(w), 1, dtype, experts=max(w.shape[0], 1))
    return ALL_ROWS if SM90_W4A16_GEMM.refusal(p) is None else MOST_AVERAGE


def _reference(record: Any, values: Values, operands: Operands) -> Any:
    x, w, offsets = _checked(record, values, operands)
    y = x.new_zeros((x.shape[0], w.shape[1]))
    # As kernels have them: ends behind all rows, or in front of the one before, leave an expert without rows that others have.
    bounds = list(accumulate((min(end, x.shape[0]) for end in offsets.tolist()), max, initial=0))
    for (begin, end), one in zip(pairwise(bounds), _experts(layout.restored(w)), strict=True):
        if begin < end:
            y[begin:end] = reference.linear(x[begin:end], one)
    return y


def _experts(w: Quantized) -> Iterator[Quantized]:
    """The weight (N, K) of each."""
    for at in range(w.shape[0]):
        zero = None if w.zero is None else w.zero[at]
        yield replace(w, codes=w.codes[at], scale=w.scale[at], zero=zero, shape=tuple(w.shape[1:]), axis=1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The parts of the weights, and offsets."""
    refuse_scale_gradients(ctx, "grouped_linear_small", 2, 3)
    _, *tensors, shape, scheme = inputs
    ctx.save_for_backward(*tensors)
    ctx.stored = shape, scheme


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """The gradient of x: rows of g times the dequantized weight of the expert of each."""
    dx, (shape, scheme) = None, ctx.stored
    *stored, offsets = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        q = restored(weight_of(record_of(scheme), shape, stored))
        values = torch.ops.ao_lab.dequantize(*parts(q), list(shape), 2, scheme, q.packed, g.dtype)
        dx = torch._grouped_mm(g.contiguous(), values, offsets)
    return dx, None, None, None, None, None, None


GROUPED_LINEAR_SMALL = Function(
    "grouped_linear_small", ("x", *STORED, "offsets"), _reference, _operate, _kernel, differentiable=True
)
GROUPED_LINEAR_SMALL_OP = register(
    "grouped_linear_small", grouped_linear_small_op, _fake, _backward, _save, SCHEMA, linear_in=(0,)
)

__all__ = ["GROUPED_LINEAR_SMALL", "MOST_AVERAGE", "average_rows_as_stored", "grouped_linear_small"]
