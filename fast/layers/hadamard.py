"""The randomized Hadamard transform of `reference.training.hadamard` for torch tensors, the same bits; no gradient of its own.

No name of `fast` itself yet: products of training quantize what it gives.
"""

from __future__ import annotations

from math import sqrt

import torch

from reference.training.hadamard import signs

#: Signs in a number.
PIECE = 32


def hadamard(x: torch.Tensor, length: int) -> torch.Tensor:
    """Blocks of `length` elements along the last axis transformed; sums and differences in float32, in order."""
    sign = _signs(length, x.device)
    y = x.to(torch.float32).reshape(-1, length) * sign
    for stage in range(length.bit_length() - 1):
        pairs = y.reshape(-1, length >> (stage + 1), 2, 1 << stage)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack([left + right, left - right], dim=2).reshape(-1, length)
    factor = torch.full((), 1 / sqrt(length), dtype=torch.float32, device=x.device)
    return (y * factor).reshape(x.shape).to(x.dtype)


def _signs(length: int, device: torch.device) -> torch.Tensor:
    """The signs of a block, from the bits of numbers: a copy of a table from the host would wait for the GPU."""
    table = signs(length)
    return torch.cat([_piece(table[first : first + PIECE], device) for first in range(0, length, PIECE)])


def _piece(table: tuple[int, ...], device: torch.device) -> torch.Tensor:
    negative = sum(1 << at for at, sign in enumerate(table) if sign < 0)
    at = torch.arange(len(table), device=device)
    bits = torch.bitwise_right_shift(torch.full_like(at, negative), at) & 1
    return (1 - 2 * bits).to(torch.float32)
