"""`attention` over stored keys and values for torch tensors; see `reference.attention.attention` for the rules.

CPU tensors: the reference. CUDA tensors: the kernel of `fast.kernels.attention` for few
queries over a cache; what it does not take is dequantized to q's dtype and given to torch's scaled_dot_product_attention
(`refusal` says why). No gradient: a cache is for generation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fast.attention.stored import computed_values, quantized_tokens, token_values, window_numbers
from fast.dispatch import runs_eagerly
from fast.stored_tokens import StoredTokens
from reference.attention import attention as specified
from reference.attention.attention import check_heads
from reference.attention.window import Window


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

    length: int64 on q's device, 0-d, this call's own T tokens included. mask: as in the reference, of at least `length` keys or
    of one that stands for all. Other arguments, edges and errors as in the reference.
    """
    check_heads(tuple(q.shape), (*k.shape[:2], 0, k.width), (*v.shape[:2], 0, v.width))
    mask = None if mask is None else _of_four_axes(mask, k.shape[2])
    scale = float(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if runs_eagerly(q, k.codes):
        return _attended(q, k, v, length, mask, scale, causal, 0.0 if softcap is None else float(softcap))
    y: torch.Tensor = torch.ops.ao_lab.cached_attention(
        q, k.codes, k.scale, k.zero, k.computed, k.recent, k.scheme, k.width, k.axis, v.codes, v.scale, v.zero, v.computed,
        v.recent, v.scheme, v.width, v.axis, window_numbers(_window(k, v)), length, mask, scale, causal,
        0.0 if softcap is None else float(softcap),
    )  # fmt: skip
    return y


def _of_four_axes(mask: torch.Tensor, room: int) -> torch.Tensor:
    """A view (B or 1, H or 1, T or 1, keys): one of fewer axes is of all sequences or heads, one of one key of all keys."""
    mask = mask[(None,) * (4 - mask.dim())]
    return mask.expand(*mask.shape[:-1], room) if mask.shape[-1] == 1 else mask


@torch.library.custom_op("ao_lab::cached_attention", mutates_args=())
def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_zero: torch.Tensor | None,
    k_computed: torch.Tensor | None,
    k_recent: torch.Tensor | None,
    k_scheme: str,
    k_width: int,
    k_axis: int,
    v: torch.Tensor,
    v_scale: torch.Tensor | None,
    v_zero: torch.Tensor | None,
    v_computed: torch.Tensor | None,
    v_recent: torch.Tensor | None,
    v_scheme: str,
    v_width: int,
    v_axis: int,
    window: Sequence[int],
    length: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    causal: bool,
    softcap: float,
) -> torch.Tensor:
    """`attention` as an operator, which compiled programs call."""
    seen = Window(*window)
    keys = StoredTokens(k, k_scale, k_zero, k_scheme, k_width, k_axis, seen, k_computed, k_recent)
    values = StoredTokens(v, v_scale, v_zero, v_scheme, v_width, v_axis, seen, v_computed, v_recent)
    return _attended(q, keys, values, length, mask, scale, causal, softcap)


def _attended(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: torch.Tensor, mask: torch.Tensor | None, scale: float,
    causal: bool, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """By the kernel, torch's attention over dequantized values, or the reference."""
    if q.is_cuda:
        from fast.kernels.attention import decode

        if decode.refusal(q, k, v, mask, softcap) is None:
            with torch.cuda.device_of(q):  # Triton launches on the current one
                return decode.attention(q, k, v, length, mask, scale, causal)
        return _by_tokens(_dequantized(q, k, v, length, mask, scale, causal, softcap))
    return _by_tokens(_specified(q, k, v, int(length), mask, scale, causal, softcap))


def _by_tokens(y: torch.Tensor) -> torch.Tensor:
    """y (B, H, T, D) in memory of (B, T, H, D), as the next product reads it."""
    return y.transpose(1, 2).contiguous().transpose(1, 2)


@cached_attention.register_fake
def _fake(
    q, k, k_scale, k_zero, k_computed, k_recent, k_scheme, k_width, k_axis, v, v_scale, v_zero, v_computed, v_recent, v_scheme,
    v_width, v_axis, window, length, mask, scale, causal, softcap
):  # type: ignore[no-untyped-def] # fmt: skip
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v_width)).transpose(1, 2)


def _specified(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: int, mask: torch.Tensor | None, scale: float,
    causal: bool, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """By the reference, over the tokens that are there."""
    if mask is not None:
        mask = mask[..., :length]
        if mask.dtype != torch.bool:
            mask = mask.float().masked_fill(mask <= torch.finfo(mask.dtype).min, -math.inf)
    rules = {"scale": scale, "causal": causal, "mask": mask, "softcap": softcap or None}
    if k.computed is None and v.computed is None:
        keys, values = (
            quantized_tokens(x, length) if x.scheme else token_values(x, length, x.codes.dtype)
            for x in (k, v)
        )
        y: torch.Tensor = specified.attention(q, keys, values, **rules)
        return y
    keys, values = (token_values(x, length, torch.float32) for x in (k, v))
    count = torch.tensor(length)
    computed = computed_values(k, keys, count), computed_values(v, values, count)
    return torch.as_tensor(
        specified.attention(q, keys, values, computed=computed, window=_window(k, v), **rules)
    )


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


Pair = tuple[torch.Tensor, torch.Tensor]


def _dequantized(
    q: torch.Tensor, k: StoredTokens, v: StoredTokens, length: torch.Tensor, mask: torch.Tensor | None, scale: float,
    causal: bool, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """By torch's attention over all positions, those beyond the length masked."""
    keys, values = (token_values(x, dtype=q.dtype) for x in (k, v))
    # Groups along tokens have more room than there are positions.
    positions = min(keys.shape[2], values.shape[2], keys.shape[2] if mask is None else mask.shape[-1])
    keys, values = keys[:, :, :positions], values[:, :, :positions]
    if k.computed is not None or v.computed is not None:
        window = _window(k, v)
        computed = computed_values(k, keys, length), computed_values(v, values, length)
        if q.shape[2] > 1 and causal:
            return _of_both(q, (keys, values), computed, window, length, mask, scale, softcap)
        at = torch.arange(positions, device=q.device)
        near = ((at < window.sinks) | (at >= window.first(length)))[:, None]
        keys, values = (torch.where(near, x, y) for x, y in zip(computed, (keys, values), strict=True))
    seen, bias = _visible(length, q.shape[2], mask, causal, positions, q.device)
    keys, values = (_hidden_as_zeros(x, seen) for x in (keys, values))
    if softcap:
        scores = softcap * torch.tanh(_by_heads(q, keys.mT) * scale / softcap)
        scores = torch.where(seen, scores if bias is None else scores + bias, -math.inf)
        return _by_heads(_softmax(scores), values).to(q.dtype)
    added = seen if bias is None else torch.where(seen, bias, -math.inf).to(q.dtype)
    y = torch.nn.functional.scaled_dot_product_attention(
        q, keys, values, attn_mask=added, scale=scale, enable_gqa=q.shape[1] != keys.shape[1]
    )
    return _of_some(y, seen)


def _by_heads(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (B, H, T, n) times b (B, heads, n, m), one of b's heads for a group of a's: (B, H, T, m) in float32, where products of
    16-bit floats are exact (in TF32 too); rounded to 16 bits, a score of 10 would be off by 0.03."""
    batch, heads, tokens, width = a.shape
    grouped = a.float().reshape(batch, b.shape[1], heads // b.shape[1] * tokens, width)
    return (grouped @ b.float()).view(batch, heads, tokens, b.shape[-1])


def _softmax(scores: torch.Tensor) -> torch.Tensor:
    """Weights of scores (..., keys): 0 where all of a query's are minus infinity, hidden or not; NaN of NaN and of infinity."""
    nothing = scores.amax(-1, keepdim=True) == -math.inf
    return torch.softmax(scores, -1).masked_fill(nothing, 0.0)


def _of_some(y: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """y (B, H, T, any) with zeros where a query sees no key; NaN of what it sees stays."""
    return torch.where(seen.any(-1, keepdim=True), y, y.new_zeros(()))


def _hidden_as_zeros(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Tokens of x that no query sees, seen (T, keys) or (B, H, T, keys), as zeros: of NaN even a weight of 0 makes NaN."""
    some = seen.any(-2, keepdim=True)
    some = (some.any(1, keepdim=True) if some.dim() == 4 else some).mT
    return torch.where(some, x, x.new_zeros(()))


#: Elements of the scores that `_of_both` holds at once.
SCORES = 1 << 26


def _of_both(
    q: torch.Tensor, stored: Pair, computed: Pair, window: Window, length: torch.Tensor, mask: torch.Tensor | None,
    scale: float, softcap: float,
) -> torch.Tensor:  # fmt: skip
    """Several causal queries, each of which sees other tokens as computed; some queries at a time."""
    queries, keys = q.shape[2], stored[0].shape[2]
    at = torch.arange(keys, device=q.device)
    each = max(1, SCORES // max(1, q.shape[0] * q.shape[1] * keys))
    parts = []
    for first in range(0, queries, each):
        part = q[:, :, first : first + each]
        last = min(queries, first + each)
        ends = (length - queries + torch.arange(first + 1, last + 1, device=q.device))[:, None]
        near = (at < window.sinks) | (at >= window.first(ends))
        scores = torch.where(near, *(_by_heads(part, x[0].mT) for x in (computed, stored))) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        some = mask if mask is None or mask.shape[2] == 1 else mask[:, :, first:last]
        seen, bias = _visible(length - (queries - last), last - first, some, True, keys, q.device)
        scores = torch.where(seen, scores if bias is None else scores + bias, -math.inf)
        weights = _softmax(scores)
        sums = _of_values(weights, computed[1], seen & near) + _of_values(weights, stored[1], seen & ~near)
        parts.append(sums.to(q.dtype))
    return torch.cat(parts, 2)


def _of_values(weights: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Weighted values of the tokens that queries see; what none of them sees may be NaN."""
    return _by_heads(torch.where(seen, weights, weights.new_zeros(())), _hidden_as_zeros(values, seen))


def _window(k: StoredTokens, v: StoredTokens) -> Window:
    """Of what is stored in low precision; both have the same."""
    return k.window if k.scheme else v.window


__all__ = ["attention"]
