"""`prune` for torch tensors; see `reference.prune` for ties and NaN."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.sparsity.ops import PRUNE


def prune(w: torch.Tensor, *, pattern: str = "2:4", scores: torch.Tensor | None = None) -> torch.Tensor:
    """Bool mask of the weights to keep on w's device, as in `reference.prune`."""
    mask: torch.Tensor = run(PRUNE, None, (pattern,), (w, scores))
    return mask
