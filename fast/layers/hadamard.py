"""The randomized Hadamard transform of `reference.training.hadamard` for torch tensors, the same bits; no gradient of its own.

On a GPU one read and one write (`fast.kernels.hadamard`); operations of torch where a tracer has to see them. No name of `fast`
itself: products of training quantize what it gives.
"""

from __future__ import annotations

from math import sqrt

import torch

from fast.device import has_kernels, is_traced
from reference.training.hadamard import signs

#: Signs in a number.
PIECE = 32


def hadamard(x: torch.Tensor, length: int, axis: int = -1) -> torch.Tensor:
    """Blocks of `length` elements along an axis (the last, or 0 of a matrix) transformed; sums and differences in float32, in
    order. ValueError for a length that does not divide the axis, or is no power of two."""
    if length < 1 or length & (length - 1) or not x.dim() or x.shape[axis] % length:
        raise ValueError(
            f"hadamard mixes blocks of a power of two that divides the axis, got {length} for shape {tuple(x.shape)}; pad it"
        )
    columns = axis == 0 and x.dim() > 1
    if not is_traced(x) and has_kernels(x) and x.is_contiguous():
        from fast.kernels import hadamard as host

        matrix = x if columns else x.reshape(-1, x.shape[-1])
        rule = host.Rule(None, length, 0 if columns else 1)
        if host.covers(matrix, rule):
            return host.mixed(matrix, rule).reshape(x.shape)
    if columns:
        return _by_operations(x.t().contiguous(), length).t().contiguous()
    return _by_operations(x, length)


def _by_operations(x: torch.Tensor, length: int) -> torch.Tensor:
    """The same along the last axis by operations of torch, on any device."""
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
