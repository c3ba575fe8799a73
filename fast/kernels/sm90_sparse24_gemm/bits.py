"""Masks as bits, eight elements a byte: what layers that multiply compressed weights keep, an eighth of a bool tensor's memory.

Element k of the last axis is bit 7 - k % 8 of byte k // 8, as `numpy.packbits` has it; bits behind the last element are 0.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

#: Elements of a byte.
OCTET = 8


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """uint8 (..., ceil(K / 8)) of a bool mask (..., K), on its device."""
    more = -mask.shape[-1] % OCTET
    marks = F.pad(mask.to(torch.uint8), (0, more)).reshape(*packed_shape(mask.shape), OCTET)
    return (marks << _places(mask.device)).sum(-1, dtype=torch.uint8)


def unpack_bits(bits: torch.Tensor, length: int) -> torch.Tensor:
    """The bool mask (..., length) that `pack_bits` packed."""
    marks = (bits.unsqueeze(-1) >> _places(bits.device)) & 1
    return marks.flatten(-2)[..., :length].bool()


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the bits of a mask of this shape."""
    return (*shape[:-1], -(-shape[-1] // OCTET))


def _places(device: torch.device) -> torch.Tensor:
    """How far an element's bit is from the lowest one."""
    return torch.arange(OCTET - 1, -1, -1, dtype=torch.uint8, device=device)


__all__ = ["OCTET", "pack_bits", "packed_shape", "unpack_bits"]
