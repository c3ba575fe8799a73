"""Zero points of keys by channel as the bound of a kernel takes them that subtracts sums of them from sums of codes."""

from __future__ import annotations

import torch

from fast.attention.stored import signed
from fast.stored_tokens import StoredTokens


def zero_values(stored: StoredTokens, length: int) -> torch.Tensor | None:
    """What those of the first tokens stand for, (B, heads, length, width) float32 on the host, 0 for those of a group that is
    not full; None without zero points."""
    if stored.zero is None or stored.scale is None:
        return None
    group = stored.window.group
    full = length // group
    each = (signed(stored.zero)[:, :, :full].float() * stored.scale[:, :, :full]).repeat_interleave(group, 2)
    return torch.nn.functional.pad(each, (0, 0, 0, length - each.shape[2])).cpu()


__all__ = ["zero_values"]
