"""`prune` for torch tensors; see `reference.prune` for ties and NaN."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.tensors import require_tensor


def prune(w: torch.Tensor, *, pattern: str = "2:4", scores: torch.Tensor | None = None) -> torch.Tensor:
    """Bool mask of the weights to keep on w's device, as in `reference.prune`."""
    w = require_tensor(w, "prune").detach()
    made: Any = reference.prune(w, pattern=pattern, scores=None if scores is None else scores.detach())
    return require_tensor(made, "prune")
