"""`matmul` with a stated accumulation and its error bound, for torch tensors; see `reference.matmul`.

This is the specification on torch tensors, computed on the host: for tests and measurements, not for speed.
"""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.tensors import require_tensor
from reference import Quantized

Operand = torch.Tensor | Quantized


def matmul(
    a: Operand,
    b: Operand,
    *,
    accumulation: str = "exact",
    out_dtype: str | torch.dtype = "float32",
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """a (..., M, K) times b (..., K, N) plus bias, on a's device. Arguments, options and errors as in `reference.matmul`."""
    made: Any = reference.matmul(
        _operand(a), _operand(b), accumulation=accumulation, out_dtype=_name(out_dtype), bias=bias, **options
    )
    return require_tensor(made, "matmul")


def matmul_error_bound(
    a: Operand,
    b: Operand,
    *,
    accumulation: str = "exact",
    out_dtype: str | torch.dtype = "float32",
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The largest error of each element, as in `reference.matmul_error_bound`."""
    made: Any = reference.matmul_error_bound(
        _operand(a), _operand(b), accumulation=accumulation, out_dtype=_name(out_dtype), bias=bias, **options
    )
    return require_tensor(made, "matmul_error_bound")


def _operand(value: Operand) -> Any:
    """Detached tensors and quantized tensors pass; anything else is refused."""
    if isinstance(value, Quantized):
        require_tensor(value.codes, "matmul")
        return value
    return require_tensor(value, "matmul").detach()


def _name(dtype: str | torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
