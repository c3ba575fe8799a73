"""`compress` and `decompress` for torch tensors; see `reference.compress` for the 2:4 layout."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.sparsity.ops import COMPRESS, DECOMPRESS
from reference import Compressed


def compress(w: torch.Tensor, mask: torch.Tensor | str | None = None) -> Compressed:
    """Kept values and metadata of w on its device, as in `reference.compress`. No gradient flows through.

    Elements are counted here in compiled programs too: the operator runs on tensors that have values, and raises there.
    """
    pattern, given = (mask, None) if isinstance(mask, str) else (None, mask)
    made: Compressed = run(COMPRESS, None, (pattern,), (w, given))
    return made


def decompress(
    values: torch.Tensor, metadata: torch.Tensor, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """The dense tensor, zeros where nothing was kept, as in `reference.decompress`. No gradient flows through."""
    made: torch.Tensor = run(DECOMPRESS, None, (None if shape is None else tuple(shape),), (values, metadata))
    return made
