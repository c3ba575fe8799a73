"""`linear` of a preshuffled weight (`fast.matmul.preshuffled.layout`), for torch tensors.

Products of a preshuffled weight, and its codes and parts made and restored: what runs below `linear`; see `fast.dispatch`.

Operands of the product are x, the parts of the weight (`layout`) and the bias; its values are the weight's shape (N, K) and,
where one is named, the family that is asked first (`fast.gemm.choose`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, has_float_inputs, run
from fast.gemm.choose import choose, rows_of_gemm
from fast.gemm.families import SM90_W4A16_GEMM, of_preshuffled
from fast.layers.column_sums import column_sums
from fast.matmul.preshuffled import layout
from fast.matmul.weights import (
    Operands,
    Values,
    dense,
    parts,
    refuse_scale_gradients,
    times_weight,
)
from fast.ops import record_name, register
from fast.scale_factors import ELEMENTS, form_of
from reference import Quantized
from reference.matmul.linear import check_linear
from reference.schemes.schemes import record_of

OPERANDS = "Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? bias"
SCHEMA = f"({OPERANDS}, SymInt[] shape, str scheme, str first='') -> Tensor"
STORED = ("codes", "scale", "zero point")
#: Rows of as many atoms as a grid has along its second axis.
MOST_ROWS_ARRANGED = 64 * 65535


def weight_of(record: Any, shape: Sequence[int], stored: Sequence[Any]) -> Quantized:
    """The preshuffled weight (N, K), or of experts (E, N, K), of its record, shape and parts."""
    codes, scale, zero = stored
    axis = len(shape) - 1
    return Quantized(codes, scale, None, zero, tuple(shape), axis, record, record.format.bits < 8)


def restored(q: Quantized) -> Quantized:
    """A preshuffled weight as it was stored: its codes by a kernel on a GPU."""
    words = layout.atoms_in_all(q.codes)
    values = (ELEMENTS[q.scheme.element], layout.shape_in_all(q))
    codes: torch.Tensor = run(CODES, None, values, (words,))
    return layout.restored(q, codes)


def preshuffled(q: Quantized) -> Quantized:
    """A stored weight in the layout, see `layout.preshuffled`: its codes by a kernel on a GPU."""
    if layout.unsupported_reason(q) is not None:
        return layout.preshuffled(q)
    return rearranged(q)


def rearranged(q: Quantized) -> Quantized:
    """`preshuffled` of a weight of which it is known that it can be: its values are not looked at again."""
    codes = layout.rows_in_all(q.codes)
    words: torch.Tensor = run(WORDS, None, (ELEMENTS[q.scheme.element],), (codes,))
    return layout.rearranged(q, words)


def linear_small_op(*arguments: Any) -> torch.Tensor:
    """Inputs times the transpose of a preshuffled weight."""
    operands, (shape, scheme, *first) = arguments[:5], arguments[5:]
    y: torch.Tensor = execute(LINEAR_SMALL, record_of(scheme), values_of(shape, *first), operands)
    return y


def values_of(shape: Sequence[int], first: str = "") -> Values:
    """The values of a call."""
    return (tuple(shape), first) if first else (tuple(shape),)


def _checked(record: Any, values: Values, operands: Operands) -> tuple[Any, Quantized, Any]:
    """Inputs, weight and bias; errors are those of `linear`."""
    x, *stored, bias = operands
    w = weight_of(record, values[0], stored)
    check_linear(x, w, bias)
    return x, w, bias


def _operate(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, w, bias = _checked(record, values, operands)
    named = list(w.shape), record_name(w.scheme), *values[1:]
    y: torch.Tensor = LINEAR_SMALL_OP(x, w.codes, w.scale, w.zero, bias, *named)
    return y


def _fake(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], arguments[4][0]))


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By the quickest family that takes the product, or the next one where that does not compile or load."""
    from fast.scale_factors import ArrangedWeight

    x, w, bias = _checked(record, values, operands)
    if not has_float_inputs(x, bias):
        return None
    arranged = ArrangedWeight(w.codes, w.scale, w.zero, w.shape, *form_of(record, w.shape[1]))  # type: ignore[arg-type]
    for family in choose(of_preshuffled(arranged, x.numel() // w.shape[1], x.dtype), *values[1:]):
        multiply = family.function("linear")
        y = None if multiply is None else multiply(x, arranged, bias, key=key, record=record)
        if y is not None:
            return y
    return _by_dense_weight(x, w, arranged, bias)


def _by_dense_weight(x: torch.Tensor, w: Quantized, arranged: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """torch's product with what `dequantize` gives."""
    from fast.kernels.triton_small_m.dense import arranged_dense

    dense_weight = arranged_dense(arranged, x.dtype)
    values = dense(restored(w), x.dtype) if dense_weight is None else dense_weight
    return torch.nn.functional.linear(x, values, None if bias is None else bias.to(x.dtype))


def _reference(record: Any, values: Values, operands: Operands) -> Any:
    x, w, bias = _checked(record, values, operands)
    return reference.linear(x, layout.restored(w), bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The parts of the weight, and the dtype of the bias's gradient."""
    refuse_scale_gradients(ctx, "linear_small", 2, 3)
    stored, bias, (shape, scheme, *_) = inputs[1:4], inputs[4], inputs[5:]
    ctx.save_for_backward(*stored)
    ctx.stored, ctx.others = (shape, scheme), len(inputs) - 5
    ctx.bias = None if bias is None else bias.dtype


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    """Gradients of x and bias."""
    dx, (shape, scheme) = None, ctx.stored
    if ctx.needs_input_grad[0]:
        q = restored(weight_of(record_of(scheme), shape, ctx.saved_tensors))
        dx = times_weight(g, parts(q), shape, scheme, q.packed)
    db = column_sums(g, ctx.bias) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, db, *(None,) * ctx.others


LINEAR_SMALL = Function(
    "linear_small", ("x", *STORED, "bias"), _reference, _operate, _kernel, differentiable=True
)
LINEAR_SMALL_OP = register("linear_small", linear_small_op, _fake, _backward, _save, SCHEMA, linear_in=(0, 4))


# The codes: operand them, or their words; value the element


def preshuffle_codes_op(codes: torch.Tensor, element: str) -> torch.Tensor:
    """`layout.arranged`."""
    words: torch.Tensor = execute(WORDS, None, (element,), (codes,))
    return words


def restore_codes_op(words: torch.Tensor, element: str, shape: Sequence[int] | None = None) -> torch.Tensor:
    """`layout.all_rows`. shape: of the codes; None where nothing was filled."""
    shape = _codes_shape(words, element, shape)
    codes: torch.Tensor = execute(CODES, None, (element, shape), (words,))
    return codes


def _words_shape(codes: torch.Tensor, element: str) -> tuple[int, int, int]:
    n, bytes_ = layout.filled_codes(codes.shape, element)
    return (n // 64, bytes_ // 32, 512) if element in layout.NIBBLES else (n // 64, bytes_ // 64, 1024)


def _codes_shape(words: torch.Tensor, element: str, shape: Sequence[int] | None) -> tuple[int, ...]:
    if shape is not None:
        return tuple(shape)
    return 64 * words.shape[0], (32 if element in layout.NIBBLES else 64) * words.shape[1]


def _all_rows(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    rows, bytes_ = values[1]
    return layout.all_rows(operands[0], values[0])[:rows, :bytes_].contiguous()


def _arrange(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By the kernel, where its grid holds the rows: those of many experts may be more."""
    from fast.kernels.triton_small_m.layout import arranged_words

    if operands[0].shape[0] > MOST_ROWS_ARRANGED:
        return None
    return arranged_words(operands[0], values[0], key)


def _restore(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.triton_small_m.layout import restored_words

    return restored_words(operands[0], values[1], values[0], key)


WORDS = Function(
    "preshuffle_codes", ("codes",), lambda r, v, o: layout.arranged(o[0], v[0]),
    lambda r, v, o: torch.ops.ao_lab.preshuffle_codes(o[0], v[0]), _arrange,
)  # fmt: skip
CODES = Function(
    "restore_codes", ("codes",), _all_rows,
    lambda r, v, o: torch.ops.ao_lab.restore_codes(o[0], v[0], list(v[1])), _restore,
)  # fmt: skip
register(
    "preshuffle_codes", preshuffle_codes_op,
    lambda codes, element: codes.new_empty(_words_shape(codes, element), dtype=torch.int32),
)  # fmt: skip
register(
    "restore_codes", restore_codes_op,
    lambda words, element, shape=None: words.new_empty(_codes_shape(words, element, shape), dtype=torch.uint8),
)  # fmt: skip


#: The most rows that read the weight as it is stored, and their dtypes.
MOST_ROWS = 128
#: More than there can be: of weights that any number of rows reads as they are stored.
ALL_ROWS = 2**31 - 1
INPUTS = (torch.bfloat16, torch.float16)


def linear_small(
    x: torch.Tensor, w: Quantized, bias: torch.Tensor | None = None, first: str = ""
) -> torch.Tensor:
    """x (..., K) times the transpose of a preshuffled weight (N, K), plus bias (N), in x's dtype and on its device.

    w: what `preshuffled.linear.preshuffled` makes of a stored weight. On a GPU up to MOST_ROWS rows of bfloat16 or float16
    read it as it is stored, with the same bits in every call, and the result is within `reference.linear_error_bound` of the
    exact product; so it is of the product with what `dequantize` gives in x's dtype for more rows, and for those from 33 on
    that are faster so. These, 16-bit rows on Hopper (where NVRTC is installed), are multiplied by a kernel that decodes the
    weight as it reads it, all else by torch. first: the name of the family that is asked first, see `fast.gemm.choose.choose`;
    "" for the order by models. CPU tensors run `reference.linear`. Errors are its. Differentiable in x and bias;
    NotImplementedError where scales require a gradient.
    """
    operands = (x, w.codes, w.scale, w.zero, bias)
    y: torch.Tensor = run(LINEAR_SMALL, w.scheme, values_of(w.shape, first), operands)
    return y


def rows_as_stored(w: Quantized, dtype: torch.dtype) -> int:
    """The most rows of a dtype that read a preshuffled matrix (N, K) as it is stored, on the device where it is; 0 for none."""
    if dtype not in INPUTS or not w.codes.is_cuda:
        return 0
    from fast.scale_factors import ArrangedWeight

    form = form_of(w.scheme, w.shape[1])
    p = of_preshuffled(ArrangedWeight(w.codes, w.scale, w.zero, (w.shape[0], w.shape[1]), *form), 1, dtype)
    return max(MOST_ROWS, rows_of_gemm(p) if SM90_W4A16_GEMM.refusal(p) is None else 0)


__all__ = [
    "ALL_ROWS",
    "CODES",
    "INPUTS",
    "LINEAR_SMALL",
    "LINEAR_SMALL_OP",
    "MOST_ROWS",
    "WORDS",
    "linear_small",
    "preshuffled",
    "rearranged",
    "restored",
    "rows_as_stored",
    "values_of",
]
