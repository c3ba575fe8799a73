"""Keys or values of a cache of fixed size: tensors that are written in place, token by token.

`StoredTokens` is what a `Quantized` along head_dim holds, with room for tokens to come. `append_` quantizes new tokens as
`fast.quantize` does and puts them behind those that are there; where the next ones go is a number on the device, so that
nothing waits for it and a CUDA graph replays.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fast.ops import constant_record
from fast.quantize.quantize import dequantize, quantize
from reference import Quantized, Scheme

#: Parts of a token beside its codes, in the order of `Quantized`.
PARTS = ("scale", "zero")


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

    def quantized(self, length: int | None = None) -> Quantized:
        """The first tokens as a `Quantized` of views; of a scheme alone."""
        parts = [None if t is None else t[:, :, :length] for t in (self.codes, self.scale, self.zero)]
        codes, scale, zero = parts
        assert codes is not None
        shape = (*codes.shape[:3], self.width)
        return Quantized(codes, scale, None, zero, shape, 3, constant_record(self.scheme), packed=True)

    def values(self, length: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """What the first tokens stand for: (B, heads, length, width)."""
        if not self.scheme:
            return self.codes[:, :, :length].to(dtype)
        q = self.quantized(length)
        contiguous = [None if t is None else t.contiguous() for t in (q.codes, q.scale, q.zero)]
        again = Quantized(
            contiguous[0], contiguous[1], None, contiguous[2], q.shape, 3, q.scheme, packed=True
        )
        return dequantize(again, dtype)


def room_for(x: torch.Tensor, length: int, scheme: Scheme | None) -> StoredTokens:
    """Zeroed memory for tokens like those of x (B, heads, any, width): finite whatever is read of it."""
    batch, heads, _, width = x.shape
    if scheme is None:
        return StoredTokens(x.new_zeros((batch, heads, length, width)), None, None, "", width)
    one = quantize(x.new_zeros((1, 1, 1, width)), scheme, packed=True)

    def room(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.new_zeros((batch, heads, length, part.shape[-1]))

    codes = room(one.codes)
    assert codes is not None
    return StoredTokens(codes, room(one.scale), room(one.zero), scheme.key, width)


def append_(stored: StoredTokens, x: torch.Tensor, position: torch.Tensor) -> None:
    """Write tokens x (B, heads, n, width) at `position` and after it (a number on x's device)."""
    at = torch.arange(x.shape[2], device=x.device) + position
    if not stored.scheme:
        stored.codes.index_copy_(2, at, x.to(stored.codes.dtype))
        return
    q = quantize(x.contiguous(), constant_record(stored.scheme), packed=True)
    stored.codes.index_copy_(2, at, q.codes)
    for name in PARTS:
        held = getattr(stored, name)
        if held is not None:
            new = getattr(q, name)
            # index_copy_ knows no uint16, in which bfloat16 scales are stored.
            if held.dtype == torch.uint16:
                held, new = held.view(torch.int16), new.view(torch.int16)
            held.index_copy_(2, at, new)


__all__ = ["StoredTokens", "append_", "room_for"]
