"""`compress` and `decompress` for torch tensors; see `reference.compress` for the 2:4 layout."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.tensors import require_tensor
from reference import Compressed


def compress(w: torch.Tensor, mask: torch.Tensor | str = "2:4") -> Compressed:
    """Kept values and metadata of w on its device, as in `reference.compress`."""
    return reference.compress(require_tensor(w, "compress").detach(), mask)


def decompress(
    values: torch.Tensor, metadata: torch.Tensor, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The dense tensor, zeros where nothing was kept, as in `reference.decompress`."""
    made: Any = reference.decompress(require_tensor(values, "decompress").detach(), metadata, shape)
    return require_tensor(made, "decompress")
