"""The `torch.library` operator of one row times a stored weight on a CPU. Only tracers meet it (see `fast.ops`)."""

from __future__ import annotations

from typing import Any

import torch

from fast.cpu.linear import linear_of_one_row
from fast.device import is_traced
from fast.ops import record_name
from reference import Quantized
from reference.quantize.quantize import with_plain_scales
from reference.schemes.record_text import record_of


@torch.library.custom_op("ao_lab::cpu_linear", mutates_args=())
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
    record = record_of(scheme)
    return linear_of_one_row(x, Quantized(codes, scale, outer, zero, tuple(shape), 1, record, packed), bias)


@cpu_linear_op.register_fake
def _cpu_linear_fake(
    x: torch.Tensor, codes: Any, scale: Any, outer: Any, zero: Any, bias: Any, shape: list[int], scheme: str, packed: bool
) -> torch.Tensor:  # fmt: skip
    return x.new_empty((x.shape[0], shape[0]))


def linear(x: torch.Tensor, w: Quantized, bias: torch.Tensor | None) -> torch.Tensor:
    """`fast.cpu.linear.linear_of_one_row`, recorded where a tracer listens."""
    if not (is_traced(x) or is_traced(w.codes)):
        return linear_of_one_row(x, w, bias)
    q = with_plain_scales(w)
    made: torch.Tensor = cpu_linear_op(
        x, q.codes, q.scale, q.outer, q.zero, bias, list(q.shape), record_name(q.scheme), q.packed
    )
    return made


__all__ = ["linear"]
