"""`choose_scales`, `quantize` and `dequantize` for torch tensors; see `reference.quantize` for the rules."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.tensors import require_tensor
from reference import Quantized, Scales, Scheme


def choose_scales(x: torch.Tensor, scheme: str | Scheme, *, axis: int = -1) -> Scales:
    """Scales of x, as in `reference.choose_scales`, on x's device."""
    return reference.choose_scales(require_tensor(x, "choose_scales").detach(), scheme, axis=axis)


def quantize(
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | torch.Tensor | None = None,
    random_bits: torch.Tensor | None = None,
) -> Quantized:
    """x as codes and scales on its device. Arguments, edges and errors as in `reference.quantize`."""
    x = require_tensor(x, "quantize").detach()
    return reference.quantize(x, scheme, axis=axis, scales=scales, random_bits=random_bits)


def dequantize(q: Quantized, dtype: str | torch.dtype = "float32") -> torch.Tensor:
    """The tensor that q stands for; dtype as a name or a torch dtype. As in `reference.dequantize`."""
    made: Any = reference.dequantize(q, str(dtype).removeprefix("torch."))
    return require_tensor(made, "dequantize")
