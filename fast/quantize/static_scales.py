"""`quantize_rows`: codes under given scales, whose rows say by a scale of their own that they hold a NaN.

Integers have no code for NaN, and a given scale does not become one, as a scale that is found does: `quantize` gives a row with
a NaN finite codes under a finite scale. What multiplies rows takes them from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.ops import derived, record_name, register
from fast.quantize.quantize import without_history
from reference import Quantized, Scales, Scheme
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]


def quantize_rows(x: torch.Tensor, scheme: str | Scheme, scales: Scales) -> Quantized:
    """Codes of x (M, K) as `quantize(x, scheme, scales=scales)` makes them, with a scale (M, 1), float32, and where the scheme
    has zero points one (M, 1), for each row: those that are given, and NaN for the scale of a row that holds a NaN.

    scheme: with one float32 scale in all or for each row, and no second level; the result's is the same with one for each row.
    ValueError for others and for other shapes; else the errors of `reference.quantize`. No gradient.
    """
    operands = (x, without_history(scales.scale), without_history(scales.zero))
    result: Quantized = run(QUANTIZE_ROWS, scheme, (), operands)
    return result


@derived
def rows_record(key: str) -> Scheme:
    """The record of a `Scheme.key` with a scale for each row; ValueError where it has no one scale to give."""
    scheme = record_of(key)
    scale, zero = scheme.scale, scheme.zero
    one = scale.block in (-1, "tensor") and scale.storage == "float32" and scheme.outer is None
    if not one or (zero is not None and (zero.rule, zero.storage) != ("code", "int8")):
        raise ValueError(
            f"quantize_rows takes schemes with one float32 scale for each row or in all, got {scheme.name}"
        )
    if scale.block == -1:
        return scheme
    return replace(scheme, name=f"{scheme.name}, rows", scale=replace(scale, block=-1))


def quantize_rows_op(
    x: torch.Tensor, scheme: str, scale: torch.Tensor, zero: torch.Tensor | None
) -> list[torch.Tensor]:
    """Codes, scales and, where there are some, zero points."""
    q = execute(QUANTIZE_ROWS, record_of(scheme), (), (x, scale, zero))
    return [q.codes, q.scale] if q.zero is None else [q.codes, q.scale, q.zero]


def _fake(x: torch.Tensor, scheme: str, scale: Any, zero: Any) -> list[torch.Tensor]:
    column = (x.shape[0], 1)
    result = [x.new_empty(tuple(x.shape), dtype=torch.uint8), x.new_empty(column, dtype=torch.float32)]
    return result if zero is None else [*result, x.new_empty(column, dtype=torch.int8)]


def _operator(record: Any, values: Values, operands: Operands) -> Quantized:
    x, scale, zero = operands
    _check(x)
    name = record_name(record)
    by_rows = rows_record(name)
    codes, *parts = torch.ops.ao_lab.quantize_rows(x, name, scale, zero)
    return Quantized(
        codes, parts[0], None, None if zero is None else parts[1], tuple(x.shape), 1, by_rows, False
    )


def _kernel(record: Any, values: Values, operands: Operands, key: Any) -> Quantized | None:
    from fast.kernels import static_scales

    x, scale, zero = operands
    _check(x)
    by_rows = rows_record(record_name(record))
    return static_scales.quantize_rows(x, record, by_rows, Scales(scale, None, zero), key)


def _host(record: Any, values: Values, operands: Operands, key: Any) -> Quantized | None:
    """By the compiled loop; None where it is not for such inputs, and of a NaN."""
    from fast.cpu.quantize import plan_of

    x, scale, zero = operands
    _check(x)
    by_rows = rows_record(record_name(record))
    plan = (
        plan_of(x, record, -1, codes=True, given=(scale, None, zero)) if isinstance(record, Scheme) else None
    )
    made = None if plan is None else plan.codes(x, scale, zero)
    if made is None:
        return None
    codes, scales, zeros = made
    points = None if zero is None else torch.from_numpy(zeros)
    shape = tuple(x.shape)
    return Quantized(codes.view(torch.uint8), torch.from_numpy(scales), None, points, shape, 1, by_rows)


def _reference(record: Any, values: Values, operands: Operands) -> Quantized:
    x, scale, zero = operands
    _check(x)
    by_rows = rows_record(record_name(record))
    q = reference.quantize(x, record, axis=-1, scales=Scales(scale, None, zero))
    column = (x.shape[0], 1)
    scales = torch.where(x.isnan().any(-1, keepdim=True), float("nan"), q.scale).expand(column)
    zeros = None if q.zero is None else q.zero.expand(column).contiguous()
    return Quantized(q.codes, scales.contiguous(), None, zeros, tuple(x.shape), 1, by_rows, False)


def _check(x: torch.Tensor) -> None:
    if x.dim() != 2:
        raise ValueError(
            f"quantize_rows takes a matrix (M, K), got shape {tuple(x.shape)}; reshape it to two axes"
        )


QUANTIZE_ROWS = Function(
    "quantize_rows", ("x", "scale", "zero point"), _reference, _operator, _kernel, host=_host
)
register("quantize_rows", quantize_rows_op, _fake)

__all__ = ["QUANTIZE_ROWS", "quantize_rows", "rows_record"]
