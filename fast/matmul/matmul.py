"""`matmul` with a stated accumulation and its error bound, for torch tensors; see `reference.matmul`.

This is the specification on torch tensors, computed on the host: for tests and measurements, not for speed. Asking for a
gradient is an error.
"""

from __future__ import annotations

from typing import Any

import torch

from fast.dispatch import Function, require_tensor, run
from fast.matmul.matmul_ops import BOUND, MATMUL, described
from reference import Quantized
from reference.arrays.errors import DTypeLike, spelled

Operand = torch.Tensor | Quantized


def matmul(
    a: Operand,
    b: Operand,
    *,
    accumulation: str = "exact",
    out_dtype: DTypeLike = "float32",
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """a (..., M, K) times b (..., K, N) plus bias, on a's device. Arguments, options and errors as in `reference.matmul`."""
    return _run(MATMUL, a, b, bias, {"accumulation": accumulation, "out_dtype": _name(out_dtype), **options})


def matmul_error_bound(
    a: Operand,
    b: Operand,
    *,
    accumulation: str = "exact",
    out_dtype: DTypeLike = "float32",
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """The largest error of each element, as in `reference.matmul_error_bound`."""
    return _run(BOUND, a, b, bias, {"accumulation": accumulation, "out_dtype": _name(out_dtype), **options})


def _run(
    function: Function, a: Operand, b: Operand, bias: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    for operand in (a, b):
        require_tensor(operand.codes if isinstance(operand, Quantized) else operand, function.name)
    text, tensors = described(a, b, **options)
    made: torch.Tensor = run(function, None, (text,), (*tensors, bias))
    return made


def _name(dtype: DTypeLike) -> str:
    """The dtype's name; what is none goes on as text, for the reference to name."""
    return spelled(dtype) or str(dtype)
