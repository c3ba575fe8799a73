"""Rows of inputs times a stored weight on a CPU, with its `torch.library` operator; see `fast.dispatch` and `fast.ops`."""

from __future__ import annotations

from typing import Any

import torch

from fast.cpu.linear import linear_of_rows
from fast.dispatch import run, settings
from fast.matmul.linear import linear_function
from fast.matmul.weights import Operands, Values, parts, weight_of
from reference import Quantized


def _compute(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    x, *stored, bias = operands
    return linear_of_rows(x, weight_of(record, values, stored), bias)


CPU_LINEAR, _ = linear_function("cpu_linear", _compute)


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """`fast.cpu.linear.linear_of_rows`, recorded where a tracer listens; differentiable in x and bias."""
    operands = (x, *parts(w), bias)
    y: torch.Tensor = run(CPU_LINEAR, w.scheme, settings(w), operands)
    return y


__all__ = ["linear"]
