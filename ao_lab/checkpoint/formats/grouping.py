"""Scales whose groups are not runs of columns: activation order, as GPTQ's `g_idx` says it.

A quantizer that went through the columns in another order than they are stored has groups of columns that lie apart, and
`g_idx` names the group of each. Schemes have blocks of neighbours alone, so the scales are stored again for the longest aligned
runs of columns that lie in one group: the same length as before where the groups are runs, 1 (a scale for each column) where
they are scattered. The values are the same to the bit; scattered groups take more memory for their scales.
"""

from __future__ import annotations

from math import gcd

import torch


def run_length(g_idx: torch.Tensor, groups: int) -> int:
    """The longest length that divides the columns (g_idx: integers, one for each) and whose aligned runs lie in one group.

    ValueError where g_idx is no list of columns or names groups that are not 0..groups - 1.
    """
    if g_idx.dim() != 1 or not g_idx.numel() or g_idx.is_floating_point():
        raise ValueError(
            f"g_idx has an integer for each column, got {g_idx.dtype} of shape {tuple(g_idx.shape)}"
        )
    low, high = int(g_idx.min()), int(g_idx.max())
    if low < 0 or high >= groups:
        raise ValueError(f"g_idx names groups 0 to {groups - 1}, got {low} to {high}")
    changes = torch.nonzero(g_idx[1:] != g_idx[:-1]).flatten() + 1
    return gcd(g_idx.numel(), *changes.tolist())


def regrouped(g_idx: torch.Tensor, length: int, *stored: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scales and zero points (..., groups), stored again for runs of `length` columns: (..., columns / length)."""
    groups = g_idx[::length].to(torch.int64)
    return tuple(part.index_select(-1, groups).contiguous() for part in stored)


__all__ = ["regrouped", "run_length"]
