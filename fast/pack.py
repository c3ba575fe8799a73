"""`pack` and `unpack` for torch tensors; see `reference.pack` for the layout."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.device import has_kernels
from fast.tensors import require_tensor
from reference import Format


def pack(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Bytes of sub-byte codes along the last axis, as in `reference.pack`."""
    if has_kernels(require_tensor(codes, "pack")):
        from fast.kernels import pointwise

        fast = pointwise.pack(codes, fmt)
        if fast is not None:
            return fast
    made: Any = reference.pack(codes, fmt)
    return require_tensor(made, "pack")


def unpack(packed: torch.Tensor, fmt: str | Format, shape: tuple[int, ...]) -> torch.Tensor:
    """Codes of the given shape, as in `reference.unpack`."""
    if has_kernels(require_tensor(packed, "unpack")):
        from fast.kernels import pointwise

        fast = pointwise.unpack(packed, fmt, tuple(shape))
        if fast is not None:
            return fast
    made: Any = reference.unpack(packed, fmt, tuple(shape))
    return require_tensor(made, "unpack")
