"""What a weight says of itself: whether it can be written in place, which pattern its zeros have, whether it is finite."""

from __future__ import annotations

import torch
from torch import nn

#: Groups in which weights are pruned, beside those of the pattern that is asked for.
GROUPS = (4, 8)
NOT_FINITE = "it holds NaN or infinity"
#: The share of groups that have as many nonzeros as the fullest, from which on they are a pattern.
USUAL = 0.95


def layout_reason(w: torch.Tensor) -> str | None:
    """Why a tensor's elements cannot be read as those of a matrix, and the way out."""
    if w.layout == torch.strided:
        return None
    return (
        f"layout {w.layout} holds values and places; make it dense (module.weight = "
        f"torch.nn.Parameter(module.weight.to_dense()))"
    )


def in_place_reason(w: torch.Tensor, inference: bool = False) -> str | None:
    """Why a tensor cannot be written in place, and the way out. inference: whether that is tried inside inference mode."""
    clone = "module.weight = torch.nn.Parameter(module.weight.detach().clone()) outside of it"
    if w.is_inference() and not inference:
        return f"it was made under torch.inference_mode and cannot be written in place; {clone} makes it a plain one"
    if any(step == 0 and length > 1 for length, step in zip(w.shape, w.stride(), strict=True)):
        clone = "module.weight = torch.nn.Parameter(module.weight.detach().contiguous())"
        return f"it was expanded: several elements are one in memory; {clone} gives each its own"
    return None


def torch_prune_reason(module: nn.Module, name: str) -> str | None:
    """What to do with a parameter that torch.nn.utils.prune masks."""
    plain = name.removesuffix("_orig")
    if plain == name or not hasattr(module, f"{plain}_mask"):
        return None
    return (
        f"torch.nn.utils.prune computes the layer's {plain} from it; torch.nn.utils.prune.remove(module, {plain!r}) makes it a "
        f"plain one with zeros"
    )


def most_kept(kept: torch.Tensor, group: int) -> int:
    """The largest number of True in any group of a bool matrix's rows."""
    return int(kept.reshape(-1, group).sum(-1).max())


def pruned_pattern(kept: torch.Tensor, group: int) -> str | None:
    """ "N:M" of a bool matrix whose groups of M along its rows have N True each: some pruning left these zeros.

    M is `group`, or one of `GROUPS`, and rows have more than one group. Groups that are False altogether do not count, and a
    few may have fewer. None of dense weights, of a matrix that is False altogether, and of zeros here and there.
    """
    for size in dict.fromkeys((group, *GROUPS)):
        if size > 1 and kept.numel() and kept.shape[-1] % size == 0 and kept.shape[-1] > size:
            counts = kept.reshape(-1, size).sum(-1)
            most, some = int(counts.max()), counts[counts > 0]
            if 0 < most < size and float((some == most).float().mean()) >= USUAL:
                return f"{most}:{size}"
    return None


__all__ = [
    "NOT_FINITE", "in_place_reason", "layout_reason", "most_kept", "pruned_pattern", "torch_prune_reason",
]  # fmt: skip
