"""Tensors as the functions of this folder take them: checked, converted to NumPy arrays for the reference and back, rounded.

Checks of values are those of `reference.calibration.inputs`, with the same messages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fast.dispatch import require_tensor
from reference import Quantized, Scales
from reference.arrays.bridges import to_numpy, to_torch
from reference.arrays.namespace import tensor_kind
from reference.calibration.inputs import LARGEST

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALES = ("scale", "outer", "zero")


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


def weight_matrix(w: torch.Tensor, what: str, name: str = "w") -> torch.Tensor:
    """A finite float matrix (N, K) without history; TypeError for other tensors, ValueError for other shapes and values."""
    w = float_tensor(w, what, name)
    if w.dim() != 2:
        raise ValueError(
            f"{what} takes {name} as a matrix (outputs, inputs), got shape {tuple(w.shape)}; reshape it"
        )
    check_finite(w, what, name)
    return w


def input_values(values: torch.Tensor, size: int, what: str, name: str) -> torch.Tensor:
    """A vector (size,) of non-negative finite numbers in float64; ValueError that names the argument otherwise."""
    if tuple(values.shape) != (size,):
        raise ValueError(
            f"{what} takes {name} of shape ({size},), one for each input, got {tuple(values.shape)}; "
            f"use the statistics of this layer"
        )
    check_finite(values, what, name)
    if bool((values < 0).any()):
        raise ValueError(f"{what} takes {name} of magnitudes, got negative ones; take their absolute values")
    return values.double()


def second_moments(hessian: torch.Tensor, size: int, what: str) -> torch.Tensor:
    """A finite (size, size) matrix in float64 with a non-negative diagonal; ValueError otherwise."""
    if tuple(hessian.shape) != (size, size):
        raise ValueError(
            f"{what} takes a hessian of shape ({size}, {size}), inputs by inputs, got {tuple(hessian.shape)}; "
            f"use the statistics of this layer"
        )
    check_finite(hessian, what, "the hessian")
    if bool((hessian.diagonal() < 0).any()):
        raise ValueError(
            f"{what}: the diagonal of a hessian is a sum of squares, got negative elements; sum x x^T again"
        )
    return hessian.double()


def check_finite(tensor: torch.Tensor, what: str, name: str) -> None:
    """ValueError for NaN and infinities."""
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


def numpy_of(value: Any) -> Any:
    """A tensor on any device, or each field of a `Scales` or `Quantized`, as NumPy arrays; anything else as it is."""
    if isinstance(value, (Scales, Quantized)):
        return replace(value, **{name: numpy_of(getattr(value, name)) for name in _fields(value)})
    return to_numpy(value.detach().cpu()) if isinstance(value, torch.Tensor) else value


def torch_of(value: Any) -> Any:
    """A NumPy array, or each field of a `Scales` or `Quantized` of them, as CPU tensors over the same memory; None as it is."""
    if isinstance(value, (Scales, Quantized)):
        return replace(value, **{name: to_torch(getattr(value, name)) for name in _fields(value)})
    return to_torch(value)


def _fields(value: Scales | Quantized) -> tuple[str, ...]:
    return SCALES if isinstance(value, Scales) else ("codes", *SCALES)


__all__ = [
    "check_finite",
    "float_tensor",
    "input_values",
    "numpy_of",
    "rounded",
    "second_moments",
    "torch_of",
    "weight_matrix",
]
