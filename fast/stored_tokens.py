"""`StoredTokens`: keys or values of a cache of fixed size, as kernels and `fast.attention` know them; `NewTokens` for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from reference.attention.window import ALL_STORED, Window


@dataclass(eq=False)
class StoredTokens:
    """Room for `length` tokens of each head.

    codes: (B, heads, length, width) values, or packed codes (B, heads, length, bytes), uint8. scale, zero: (B, heads, length,
    blocks), or None; where blocks lie along tokens (axis 2) (B, heads, length / block, width); a scale (heads,) or (1,) is the
    same for all tokens. scheme: the key of the record (`Scheme.key`); "" for values. width: channels of a head.

    window: which tokens are read as they were computed. computed: these, (B, heads, window.slots, width), or None. recent: of a
    call with several tokens, the last `window.ring` before them and its own, (B, heads, ring + T, width), or None.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    scheme: str
    width: int
    axis: int = 3
    window: Window = ALL_STORED
    computed: torch.Tensor | None = None
    recent: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, heads, length, width) of the values."""
        batch, heads, length, _ = self.codes.shape
        return batch, heads, length, self.width

    @property
    def static(self) -> bool:
        """Whether its scale is the same for all tokens."""
        return self.scale is not None and self.scale.dim() == 1

    def tensors(self) -> list[torch.Tensor]:
        """What holds memory for tokens."""
        parts = self.codes, None if self.static else self.scale, self.zero, self.computed
        return [t for t in parts if t is not None]


class NewTokens(NamedTuple):
    """Tokens k and v (B, heads, n, width) that are written behind the `length` of a cache, which counts them then.

    length: int64, 0-d, on their device. rotate: whether k is mixed by Hadamard's transform of its width first.
    """

    keys: StoredTokens
    values: StoredTokens
    k: torch.Tensor
    v: torch.Tensor
    length: torch.Tensor
    rotate: bool = False


__all__ = ["NewTokens", "StoredTokens"]
