"""`pack` and `unpack` for torch tensors; see `reference.pack` for the layout."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.tensors import require_tensor
from reference import Format


def pack(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Bytes of sub-byte codes along the last axis, as in `reference.pack`."""
    made: Any = reference.pack(require_tensor(codes, "pack"), fmt)
    return require_tensor(made, "pack")


def unpack(packed: torch.Tensor, fmt: str | Format, shape: tuple[int, ...]) -> torch.Tensor:
    """Codes of the given shape, as in `reference.unpack`."""
    made: Any = reference.unpack(require_tensor(packed, "unpack"), fmt, tuple(shape))
    return require_tensor(made, "unpack")
