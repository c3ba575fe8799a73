"""`StoredTokens`: keys or values of a cache of fixed size, as kernels and `fast.attention` know them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class StoredTokens:
    """Room for `length` tokens of each head.

    codes: (B, heads, length, width) values, or packed codes (B, heads, length, bytes), uint8. scale, zero: (B, heads, length,
    blocks), or None. scheme: the key of the record (`Scheme.key`); "" for values. width: channels of a head.
    """

    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    scheme: str
    width: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, heads, length, width) of the values."""
        batch, heads, length, _ = self.codes.shape
        return batch, heads, length, self.width

    def tensors(self) -> list[torch.Tensor]:
        """What holds memory."""
        return [t for t in (self.codes, self.scale, self.zero) if t is not None]


__all__ = ["StoredTokens"]
