"""`attention` over stored keys and values for torch tensors; see `reference.attention.attention` for the rules.

CPU tensors: the reference. CUDA tensors: the kernel of `fast.kernels.attention` for few
queries over a cache; what it does not take is dequantized to q's dtype and given to torch's scaled_dot_product_attention
(`refusal` says why). No gradient: a cache is for generation.
"""

from __future__ import annotations

import math

import torch

from fast.attention.stored import quantized_tokens, token_values
from fast.stored_tokens import StoredTokens
from reference.attention import attention as specified
from reference.attention.attention import check_heads


def attention(
    q: torch.Tensor,
    k: StoredTokens,
    v: StoredTokens,
    length: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of q (B, H, T, D) over the first `length` tokens of a cache: (B, H, T, D of v) in q's dtype.

    length: int64 on q's device, 0-d, this call's own T tokens included. Other arguments, edges and errors as in the reference.
    """
    check_heads(tuple(q.shape), k.shape, v.shape)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    y: torch.Tensor = torch.ops.ao_lab.cached_attention(
        q, k.codes, k.scale, k.zero, k.scheme, k.width, v.codes, v.scale, v.zero, v.scheme, v.width, length, mask,
        float(scale), causal, 0.0 if softcap is None else float(softcap),
    )  # fmt: skip
    return y


@torch.library.custom_op("ao_lab::cached_attention", mutates_args=())
def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_zero: torch.Tensor | None,
    k_scheme: str,
    k_width: int,
    v: torch.Tensor,
    v_scale: torch.Tensor | None,
    v_zero: torch.Tensor | None,
    v_scheme: str,
    v_width: int,
    length: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
) -> torch.Tensor:
    """`attention` as an operator, which compiled programs call."""
    keys = StoredTokens(k, k_scale, k_zero, k_scheme, k_width)
    values = StoredTokens(v, v_scale, v_zero, v_scheme, v_width)
    if q.is_cuda:
        from fast.kernels.attention import decode

        if decode.refusal(q, keys, values, mask, softcap) is None:
            return decode.attention(q, keys, values, length, mask, scale, causal)
        return _by_tokens(_dequantized(q, keys, values, length, mask, scale, causal, softcap))
    return _by_tokens(_specified(q, keys, values, int(length), mask, scale, causal, softcap))


def _by_tokens(y: torch.Tensor) -> torch.Tensor:
    """y (B, H, T, D) in memory of (B, T, H, D), as the next product reads it."""
    return y.transpose(1, 2).contiguous().transpose(1, 2)


@cached_attention.register_fake
def _fake(
    q, k, k_scale, k_zero, k_scheme, k_width, v, v_scale, v_zero, v_scheme, v_width, length, mask, scale, causal, softcap
):  # type: ignore[no-untyped-def] # fmt: skip
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v_width)).transpose(1, 2)


def _specified(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: int, mask: torch.Tensor | None, scale: float,
    causal: bool, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """By the reference, over the tokens that are there."""
    keys, values = (
        quantized_tokens(x, length) if x.scheme else token_values(x, length, x.codes.dtype) for x in (k, v)
    )
    if mask is not None:
        mask = mask[..., :length]
        if mask.dtype != torch.bool:
            mask = mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min, -math.inf)
    y: torch.Tensor = specified.attention(
        q, keys, values, scale=scale, causal=causal, mask=mask, softcap=softcap or None
    )
    return y


def _visible(
    length: torch.Tensor, queries: int, mask: torch.Tensor | None, causal: bool, keys: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """bool (…, T, keys), True where a query sees a key, and what is added to scores."""
    ends = length + torch.arange(1 - queries, 1, device=device)[:, None] * causal
    seen = torch.arange(keys, device=device) < ends
    if mask is None:
        return seen, None
    mask = mask[..., :keys]
    if mask.dtype == torch.bool:
        return seen & mask, None
    return seen & (mask > torch.finfo(mask.dtype).min), mask


def _dequantized(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: torch.Tensor, mask: torch.Tensor | None, scale: float,
    causal: bool, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """By torch's attention over all positions, those beyond the length masked."""
    keys, values = (token_values(x, dtype=q.dtype) for x in (k, v))
    seen, bias = _visible(length, q.shape[2], mask, causal, keys.shape[2], q.device)
    if softcap:
        scores = (q @ keys.repeat_interleave(q.shape[1] // keys.shape[1], 1).mT).float() * scale
        scores = softcap * torch.tanh(scores / softcap)
        scores = torch.where(seen, scores if bias is None else scores + bias, -math.inf)
        weights = torch.nan_to_num(torch.softmax(scores, -1)).to(q.dtype)
        return weights @ values.repeat_interleave(q.shape[1] // keys.shape[1], 1)
    added = seen if bias is None else torch.where(seen, bias, -math.inf).to(q.dtype)
    y = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=added, scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
    )
    return torch.nan_to_num(y)


__all__ = ["attention"]
