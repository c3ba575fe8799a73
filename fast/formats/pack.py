"""`pack` and `unpack` for torch tensors; see `reference.pack` for the layout."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.device import has_kernels
from fast.kernels.launch import cache as ready
from fast.tensors import require_tensor
from reference import Format


def pack(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Bytes of sub-byte codes along the last axis, as in `reference.pack`."""
    key, known = ready.call("pack", fmt, (), require_tensor(codes, "pack"))
    if known is not None:
        return known  # type: ignore[no-any-return]
    if has_kernels(codes):
        from fast.kernels.encode import pointwise

        fast = pointwise.pack(codes, fmt, key)
        if fast is not None:
            return fast
    made: Any = reference.pack(codes, fmt)
    return require_tensor(made, "pack")


def unpack(packed: torch.Tensor, fmt: str | Format, shape: tuple[int, ...]) -> torch.Tensor:
    """Codes of the given shape, as in `reference.unpack`."""
    shape = tuple(shape)
    key, known = ready.call("unpack", fmt, shape, require_tensor(packed, "unpack"))
    if known is not None:
        return known  # type: ignore[no-any-return]
    if has_kernels(packed):
        from fast.kernels.encode import pointwise

        fast = pointwise.unpack(packed, fmt, shape, key)
        if fast is not None:
            return fast
    made: Any = reference.unpack(packed, fmt, shape)
    return require_tensor(made, "unpack")
