"""What every function here asks of its input: torch tensors."""

from __future__ import annotations

from typing import Any

import torch


def require_tensor(value: Any, what: str) -> torch.Tensor:
    """`value` if it is a torch tensor; TypeError that names the way out otherwise."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"fast.{what} takes torch tensors, got {type(value).__name__}; those of `reference` take NumPy and JAX arrays"
        )
    return value
