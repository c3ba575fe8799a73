"""One row times a stored weight on a CPU, with its `torch.library` operator; see `fast.dispatch` and `fast.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fast.cpu.linear import linear_of_one_row
from fast.dispatch import Function, execute, run
from fast.kernels.launch.cache import settings
from fast.matmul.linear_ops import STORED, linear_backward, save_linear
from fast.matmul.weights import parts, plain, weight_of
from fast.ops import record_name, register
from reference import Quantized
from reference.schemes.record_text import record_of


def cpu_linear_op(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: list[int],
    scheme: str,
    packed: bool,
) -> torch.Tensor:
    """One row of inputs times the transpose of the weight that codes and scales stand for."""
    values = (tuple(shape), 1, packed, False)
    made: torch.Tensor = execute(CPU_LINEAR, record_of(scheme), values, (x, codes, scale, outer, zero, bias))
    return made


def _cpu_linear_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, bias: Any, shape: list[int], scheme: str, packed: bool
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], shape[0]))


def _cpu_linear(record: Any, values: tuple[Any, ...], operands: Sequence[Any]) -> torch.Tensor:
    x, *stored, bias = operands
    w = plain(weight_of(record, values, stored))
    made: torch.Tensor = cpu_linear(x, *parts(w), bias, list(w.shape), record_name(w.scheme), w.packed)
    return made


CPU_LINEAR = Function(
    "linear", ("x", *STORED, "bias"), lambda r, v, o: linear_of_one_row(o[0], weight_of(r, v, o[1:5]), o[5]),
    _cpu_linear, differentiable=True,
)  # fmt: skip
cpu_linear = register("cpu_linear", cpu_linear_op, _cpu_linear_fake, linear_backward, save_linear)


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """`fast.cpu.linear.linear_of_one_row`, recorded where a tracer listens; differentiable in x and bias."""
    y: torch.Tensor = run(CPU_LINEAR, w.scheme, settings(w), (x, *parts(w), bias))
    return y


__all__ = ["linear"]
