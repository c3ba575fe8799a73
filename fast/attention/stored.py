"""Keys or values of a cache of fixed size: tensors that are written in place, token by token.

`StoredTokens` is what a `Quantized` along head_dim holds, with room for tokens to come. `append_` quantizes new tokens as
`fast.quantize` does and puts them behind those that are there; where the next ones go is a number on the device, so that
nothing waits for it and a CUDA graph replays.
"""

from __future__ import annotations

import torch

from fast.ops import constant_record
from fast.quantize.quantize import dequantize, quantize
from fast.stored_tokens import StoredTokens
from reference import Quantized, Scheme

#: Parts of a token beside its codes, in the order of `Quantized`.
PARTS = ("scale", "zero")


def quantized_tokens(stored: StoredTokens, length: int | None = None) -> Quantized:
    """The first tokens as a `Quantized` of copies; of a scheme alone."""
    codes, scale, zero = (
        None if t is None else t[:, :, :length].contiguous()
        for t in (stored.codes, stored.scale, stored.zero)
    )
    assert codes is not None
    shape = (*codes.shape[:3], stored.width)
    return Quantized(codes, scale, None, zero, shape, 3, constant_record(stored.scheme), packed=True)


def token_values(
    stored: StoredTokens, length: int | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What the first tokens stand for: (B, heads, length, width)."""
    if not stored.scheme:
        return stored.codes[:, :, :length].to(dtype)
    return dequantize(quantized_tokens(stored, length), dtype)


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


__all__ = ["append_", "quantized_tokens", "room_for", "token_values"]
