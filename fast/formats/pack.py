"""`pack` and `unpack` for torch tensors; see `reference.pack` for the layout."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.formats.ops import PACK, UNPACK
from reference import Format


def pack(codes: torch.Tensor, fmt: str | Format) -> torch.Tensor:
    """Bytes of sub-byte codes along the last axis, as in `reference.pack`."""
    packed: torch.Tensor = run(PACK, fmt, (), (codes,))
    return packed


def unpack(packed: torch.Tensor, fmt: str | Format, shape: tuple[int, ...]) -> torch.Tensor:
    """Codes of the given shape, as in `reference.unpack`."""
    codes: torch.Tensor = run(UNPACK, fmt, tuple(shape), (packed,))
    return codes
