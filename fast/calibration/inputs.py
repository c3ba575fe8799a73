"""Tensors as the functions of this folder take them, and float64 results in a stated dtype."""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import require_tensor
from reference.arrays.namespace import tensor_kind
from reference.calibration.inputs import LARGEST

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def float_tensor(value: Any, what: str, name: str) -> torch.Tensor:
    """A dense float tensor without history; TypeError that names the argument otherwise."""
    tensor = require_tensor(value, what).detach()
    if kind := tensor_kind(torch, tensor):
        raise TypeError(
            f"fast.{what} takes dense tensors, got {name} as a {kind} tensor; make it dense first"
        )
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"fast.{what}: {name} is float32, bfloat16, float16 or float64, got {tensor.dtype}; convert it first"
        )
    return tensor


def check_finite(tensor: torch.Tensor, what: str, name: str) -> None:
    """ValueError for NaN and infinities, as the reference says it."""
    wrong = int((~tensor.isfinite()).sum())
    if wrong:
        raise ValueError(
            f"{what} takes finite numbers, got {wrong} of NaN or infinity in {name}; replace them or leave this layer out"
        )


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`reference.calibration.inputs.rounded`: float64 to float32 and then to `dtype`; finite values stay finite."""
    if dtype == torch.float64:
        return values
    finite = values.isfinite()
    short = torch.where(finite, values.clamp(-LARGEST, LARGEST), values).float()
    if dtype == torch.float32:
        return short
    limit = torch.finfo(dtype).max
    return torch.where(finite, short.clamp(-limit, limit), short).to(dtype)


__all__ = ["check_finite", "float_tensor", "rounded"]
