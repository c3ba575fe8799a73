"""Zero points of keys by channel as the bound of a kernel takes them that subtracts sums of them from sums of codes."""

from __future__ import annotations

import torch

from fast.attention.stored import signed
from fast.stored_tokens import StoredTokens

#: What `sm90_decode` adds to half of int4's codes, and takes off sums with zero points.
RAISED = 72


def zero_values(stored: StoredTokens, length: int, raised: int = 0) -> torch.Tensor | None:
    """What those of the first tokens stand for, (B, heads, length, width) float32 on the host, 0 for those of a group that is
    not full; None without zero points. raised: of a kernel that adds as much to codes, too: at most what is taken off then."""
    if stored.zero is None or stored.scale is None:
        return None
    group = stored.window.group
    full = length // group
    zero = signed(stored.zero)[:, :, :full].float().abs() + raised
    each = (zero * stored.scale[:, :, :full]).repeat_interleave(group, 2)
    return torch.nn.functional.pad(each, (0, 0, 0, length - each.shape[2])).cpu()


__all__ = ["RAISED", "zero_values"]
