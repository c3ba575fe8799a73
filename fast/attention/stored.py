"""Keys or values of a cache of fixed size: tensors that are written in place, token by token.

`StoredTokens` is what a `Quantized` along head_dim holds, with room for tokens to come. `append_` quantizes new tokens as
`fast.quantize` does and puts them behind those that are there; how many these are is a number on the device, so that nothing
waits for it and a CUDA graph replays.
"""

from __future__ import annotations

import torch

from fast.dispatch import has_kernels
from fast.layers.hadamard import hadamard
from fast.quantize.quantize import dequantize, quantize
from fast.stored_tokens import StoredTokens
from reference import Quantized, Scheme
from reference.schemes.schemes import record_of


def quantized_tokens(stored: StoredTokens, length: int | None = None) -> Quantized:
    """The first tokens as a `Quantized` of copies; of a scheme alone."""
    codes, scale, zero = (
        None if t is None else t[:, :, :length].contiguous()
        for t in (stored.codes, stored.scale, stored.zero)
    )
    assert codes is not None
    shape = (*codes.shape[:3], stored.width)
    return Quantized(codes, scale, None, zero, shape, 3, record_of(stored.scheme), packed=True)


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


def append_(
    keys: StoredTokens,
    values: StoredTokens,
    k: torch.Tensor,
    v: torch.Tensor,
    length: torch.Tensor,
    rotate: bool = False,
) -> None:
    """Write tokens k and v (B, heads, n, width) behind the `length` that are there, and count them.

    length: int64, 0-d, on their device. rotate: whether k is mixed by Hadamard's transform of its width first. Codes and scales
    are those of `fast.quantize`. Tokens beyond the room are an IndexError on CPUs and CUDA's device-side assertion on GPUs; a
    caller that knows the length refuses them before.
    """
    torch.ops.ao_lab.append_tokens_(
        k, v, keys.codes, keys.scale, keys.zero, keys.scheme, values.codes, values.scale, values.zero, values.scheme, length,
        rotate,
    )  # fmt: skip


@torch.library.custom_op(
    "ao_lab::append_tokens_",
    mutates_args=("k_codes", "k_scale", "k_zero", "v_codes", "v_scale", "v_zero", "length"),
)
def append_tokens_(
    k: torch.Tensor,
    v: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_zero: torch.Tensor | None,
    k_scheme: str,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor | None,
    v_zero: torch.Tensor | None,
    v_scheme: str,
    length: torch.Tensor,
    rotate: bool,
) -> None:
    """`append_` as an operator, which compiled programs call."""
    keys = StoredTokens(k_codes, k_scale, k_zero, k_scheme, k.shape[-1])
    values = StoredTokens(v_codes, v_scale, v_zero, v_scheme, v.shape[-1])
    if k.is_cuda and has_kernels(k):
        from fast.kernels.attention import append

        if append.covers(k, v, keys, values):
            append.append(k, v, keys, values, length, rotate)
            return
    at = torch.arange(k.shape[2], device=k.device) + length
    _write(keys, hadamard(k.contiguous(), k.shape[-1]) if rotate else k, at)
    _write(values, v, at)
    length.add_(k.shape[2])


@append_tokens_.register_fake
def _append_fake(*args: object) -> None:
    return None


def _write(stored: StoredTokens, x: torch.Tensor, at: torch.Tensor) -> None:
    """Tokens x at these positions."""
    if not stored.scheme:
        stored.codes.index_copy_(2, at, x.to(stored.codes.dtype))
        return
    q = quantize(x.contiguous(), record_of(stored.scheme), packed=True)
    for held, new in ((stored.codes, q.codes), (stored.scale, q.scale), (stored.zero, q.zero)):
        if held is not None:
            signed(held).index_copy_(2, at, signed(new))


def signed(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch indexes: bfloat16 scales are stored as uint16."""
    return x.view(torch.int16) if x.dtype == torch.uint16 else x


__all__ = ["append_", "quantized_tokens", "room_for", "signed", "token_values"]
