"""`fake_quantize` of CPU tensors: by a compiled loop (`activations`), or some rows at a time: quantized by the reference,
dequantized by what is quicker.

The bits are those of `reference.fake_quantize`, which is `dequantize(quantize(x))`. Where no scale is of more than a row, rows
do not depend on each other, and what lies between stays in cache; else all rows go at once.
"""

from __future__ import annotations

import torch

import reference
from fast.cpu.activations import values
from fast.cpu.dequantize import dequantize
from fast.cpu.scales import DTYPES, covered
from reference.schemes.schemes import Scheme

#: Elements that are quantized at a time.
PART = 1 << 16


def fake_quantize(x: torch.Tensor, scheme: Scheme, axis: int) -> torch.Tensor | None:
    """x as its scheme represents it, in its dtype, contiguous; None where the reference has to say. Errors as there."""
    if not _takes(x, scheme, axis):
        return None
    by_loop = values(x, scheme)
    if by_loop is not None:
        return by_loop
    return _by_parts(x, scheme)


def _by_parts(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    length = x.shape[-1]
    rows = x.detach().reshape(-1, length)
    made = torch.empty(rows.shape, dtype=x.dtype, device="cpu")
    step = max(1, PART // length) if _is_of_rows(scheme) else len(rows)
    name = str(x.dtype).removeprefix("torch.")
    for first in range(0, len(rows), step):
        q = reference.quantize(rows[first : first + step], scheme)
        part = dequantize(q, name)
        made[first : first + step] = reference.dequantize(q, name) if part is None else part
    return made.view(x.shape)


def _takes(x: torch.Tensor, scheme: Scheme, axis: int) -> bool:
    """Whether x is a plain tensor whose blocks run along its last axis, in numbers that `dequantize` knows."""
    if (
        type(x) is not torch.Tensor
        or x.device.type != "cpu"
        or x.dtype not in DTYPES
        or x.dim() < 2
        or not x.numel()
    ):
        return False
    if axis % x.dim() != x.dim() - 1 or isinstance(scheme.scale.block, tuple) or scheme.scale.flat_size:
        return False
    return scheme.rounding != "stochastic" and covered(
        scheme, (x.numel() // x.shape[-1], x.shape[-1]), 1, x.dtype
    )


def _is_of_rows(scheme: Scheme) -> bool:
    """Whether rows are quantized each for itself."""
    return isinstance(scheme.scale.block, int) and scheme.outer is None


__all__ = ["fake_quantize"]
