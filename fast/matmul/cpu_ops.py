"""Rows of inputs times a stored weight on a CPU, with its `torch.library` operator; see `fast.dispatch` and `fast.ops`.

A compiled program calls the operator with the parts of a weight. What is looked up for a product takes longer than the product
of a small weight: it is kept with the codes, as layers of eager inference keep it with their weight (`fast.cpu.products`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fast.cpu.linear import PreparedRows, linear_of_rows, prepared_rows, way_of
from fast.dispatch import execute, run, settings
from fast.matmul.linear import linear_function
from fast.matmul.weights import Operands, Values, parts, weight_of
from reference import Quantized


def _compute(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, *stored, bias = operands
    return linear_of_rows(x, weight_of(record, values, stored), bias)


#: By codes, while these live: where the weight's parts lie, and by all else that products depend on what multiplies.
_KEPT: Any = WeakTensorKeyDictionary()
#: In place of what multiplies: a product was made once.
_ONCE: Any = object()


def _of_parts(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    """`linear_of_rows` of operands on a CPU. The first one of its kind goes the ordinary way, with all checks: tensors that are
    made for one call (by a program that C++ runs) see no second one, for which something is prepared."""
    x, *stored, bias = operands
    known = _known(stored)
    # What is kept holds the record: no other one has its id.
    of_bias = None if bias is None else (bias.shape, bias.dtype, bias.device)
    key = id(record), values, x.dtype, x.device, x.shape[1:], way_of(x), of_bias
    multiply = known.get(key)
    if multiply is _ONCE:
        multiply = known[key] = _prepared(x, weight_of(record, values, stored))
    y = None if multiply is None else multiply(x.detach(), bias)
    if y is None:
        y = execute(CPU_LINEAR, record, values, operands)
        known.setdefault(key, _ONCE)
    return y


def _known(stored: Sequence[Any]) -> dict[Any, PreparedRows | None]:
    """What is kept for a weight's parts where they lie."""
    places = tuple([None if part is None else part.data_ptr() for part in stored])
    known: tuple[Any, dict[Any, PreparedRows | None]] | None = _KEPT.get(stored[0])
    if known is None or known[0] != places:
        known = _KEPT[stored[0]] = places, {}
    return known[1]


def _prepared(x: torch.Tensor, w: Quantized) -> PreparedRows | None:
    """`prepared_rows`, which has the memory of a weight's parts but not the tensors: it would keep its own key."""
    names = ("codes", "scale", "outer", "zero")
    held = {name: part.detach() for name in names if (part := getattr(w, name)) is not None}
    return prepared_rows(x, replace(w, **held))


CPU_LINEAR, _ = linear_function("cpu_linear", _compute, on_cpu=_of_parts)


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """`fast.cpu.linear.linear_of_rows`, recorded where a tracer listens; differentiable in x and bias."""
    operands = (x, *parts(w), bias)
    y: torch.Tensor = run(CPU_LINEAR, w.scheme, settings(w), operands)
    return y


__all__ = ["linear"]
