"""Keys or values of a cache of fixed size: tensors that are written in place, token by token.

`StoredTokens` is what a `Quantized` along head_dim or along tokens holds, with room for tokens to come. `append_` quantizes new
tokens as `fast.quantize` does and puts them behind those that are there; how many these are is a number on the device, so that
nothing waits for it and a CUDA graph replays. Tokens that a `Window` reads as computed have slots of their own beside.

Groups along tokens are quantized when they are full, from the slots; before, nothing reads their codes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fast.dispatch import has_kernels, runs_eagerly
from fast.layers.hadamard import hadamard
from fast.quantize.quantize import dequantize, quantize
from fast.stored_tokens import NewTokens, StoredTokens
from reference import Quantized, Scheme
from reference.attention.window import ALL_STORED, Window
from reference.quantize.stored import Scales
from reference.schemes.schemes import record_of


def quantized_tokens(stored: StoredTokens, length: int | None = None) -> Quantized:
    """The first tokens as a `Quantized` of copies, whole groups of those along tokens; of a scheme alone."""
    scheme = record_of(stored.scheme)
    block = scheme.scale.block if stored.axis == 2 else 1
    assert isinstance(block, int)
    groups = stored.codes.shape[2] // block if length is None else length // block
    codes = stored.codes[:, :, : groups * block].contiguous()
    shape = (*codes.shape[:3], stored.width)
    scale, zero = (
        None if t is None else t[:, :, :groups].contiguous() for t in (_by_token(stored), stored.zero)
    )
    return Quantized(codes, scale, None, zero, shape, stored.axis, scheme, packed=True)


def _by_token(stored: StoredTokens) -> torch.Tensor | None:
    """Scales token by token, those of all tokens repeated."""
    if stored.scale is None or not stored.static:
        return stored.scale
    batch, heads, length, _ = stored.shape
    return stored.scale.reshape(1, -1, 1, 1).expand(batch, heads, length, 1)


def token_values(
    stored: StoredTokens, length: int | None = None, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """What the first tokens stand for: (B, heads, length, width); zeros for those of a group that is not full."""
    if not stored.scheme:
        return stored.codes[:, :, :length].to(dtype)
    values = dequantize(quantized_tokens(stored, length), dtype)
    length = stored.codes.shape[2] if length is None else length
    missing = length - values.shape[2]
    return torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values


def computed_values(stored: StoredTokens, values: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Copies of `values` (B, heads, any, width), positions from 0 on, with the tokens that are at hand as computed in place.

    length: of the cache, 0-d on its device, a call's own tokens included.
    """
    if stored.computed is None:
        return values
    window, keys = stored.window, values.shape[2]
    at = torch.arange(keys, device=values.device)
    ring = window.sinks + (at - window.sinks) % window.ring if window.ring else at
    slot = torch.where(at < window.sinks, at, ring).clamp(max=window.slots - 1)
    held = stored.computed[:, :, slot].to(values.dtype)
    here = ((at < window.sinks) | (at >= length - window.ring)) & (at < length)
    result = torch.where(here[:, None], held, values)
    if stored.recent is None:
        return result
    index = at - (length - stored.recent.shape[2])
    recent = stored.recent[:, :, index.clamp(0, stored.recent.shape[2] - 1)].to(values.dtype)
    late = (index >= 0) & (at < length) & (at >= window.sinks)
    return torch.where(late[:, None], recent, result)


def recent_tokens(stored: StoredTokens, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """The last `window.ring` tokens of `length` that are there, and x behind: what queries of x see as computed."""
    assert stored.computed is not None
    window = stored.window
    if not window.ring:
        return x
    at = length - window.ring + torch.arange(window.ring, device=x.device)
    slot = window.sinks + (at - window.sinks) % window.ring
    slot = torch.where((at >= 0) & (at < window.sinks), at, slot)
    return torch.cat([stored.computed[:, :, slot], x], 2)


def room_for(
    x: torch.Tensor,
    length: int,
    scheme: Scheme | None,
    *,
    axis: int = 3,
    window: Window = ALL_STORED,
    scale: torch.Tensor | None = None,
) -> StoredTokens:
    """Zeroed memory for tokens like those of x (B, heads, any, width): finite whatever is read of it.

    scale: float32 (heads,) or (1,), of all tokens; the scheme has one scale a token then.
    """
    batch, heads, _, width = x.shape
    if scheme is None:
        return StoredTokens(x.new_zeros((batch, heads, length, width)), None, None, "", width)
    block = scheme.scale.block if axis == 2 else 1
    assert isinstance(block, int)
    # A group beyond: the open one is written whole.
    length = (-(-length // block) + 1) * block if axis == 2 else length
    one = quantize(x.new_zeros((1, 1, block, width)), scheme, axis=axis, packed=True)

    def room(part: torch.Tensor | None, tokens: int) -> torch.Tensor | None:
        return None if part is None else part.new_zeros((batch, heads, tokens, part.shape[-1]))

    codes = room(one.codes, length)
    assert codes is not None
    computed = x.new_zeros((batch, heads, window.slots, width)) if window.slots else None
    scales = room(one.scale, length // block) if scale is None else scale
    return StoredTokens(
        codes, scales, room(one.zero, length // block), scheme.key, width, axis, window, computed
    )


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
    if runs_eagerly(k, v, keys.codes):
        _append(NewTokens(keys, values, k, v, length, rotate))
        return
    torch.ops.ao_lab.append_tokens_(
        k, v, keys.codes, keys.scale, keys.zero, keys.computed, keys.scheme, keys.axis, values.codes, values.scale, values.zero,
        values.computed, values.scheme, values.axis, window_numbers((keys if keys.scheme else values).window), length, rotate,
    )  # fmt: skip


def window_numbers(window: Window) -> list[int]:
    """A window as an operator takes it."""
    return [window.residual, window.sinks, window.group]


@torch.library.custom_op(
    "ao_lab::append_tokens_",
    mutates_args=(
        "k_codes",
        "k_scale",
        "k_zero",
        "k_computed",
        "v_codes",
        "v_scale",
        "v_zero",
        "v_computed",
        "length",
    ),
)
def append_tokens_(
    k: torch.Tensor,
    v: torch.Tensor,
    k_codes: torch.Tensor,
    k_scale: torch.Tensor | None,
    k_zero: torch.Tensor | None,
    k_computed: torch.Tensor | None,
    k_scheme: str,
    k_axis: int,
    v_codes: torch.Tensor,
    v_scale: torch.Tensor | None,
    v_zero: torch.Tensor | None,
    v_computed: torch.Tensor | None,
    v_scheme: str,
    v_axis: int,
    window: Sequence[int],
    length: torch.Tensor,
    rotate: bool,
) -> None:
    """`append_` as an operator, which compiled programs call."""
    seen = Window(*window)
    keys = StoredTokens(k_codes, k_scale, k_zero, k_scheme, k.shape[-1], k_axis, seen, k_computed)
    values = StoredTokens(v_codes, v_scale, v_zero, v_scheme, v.shape[-1], v_axis, seen, v_computed)
    _append(NewTokens(keys, values, k, v, length, rotate))


def _append(new: NewTokens) -> None:
    """By the kernel, or operations of torch."""
    keys, values, k, v, length, rotate = new
    if k.is_cuda and has_kernels(k):
        from fast.kernels.attention import append

        with torch.cuda.device_of(k):  # Triton launches on the current one
            if append.append(new):
                return
    _write(keys, hadamard(k.contiguous(), k.shape[-1]) if rotate else k, length)
    _write(values, v, length)
    length.add_(k.shape[2])


@append_tokens_.register_fake
def _append_fake(*args: object) -> None:
    return None


def _write(stored: StoredTokens, x: torch.Tensor, length: torch.Tensor) -> None:
    """Tokens x behind `length`."""
    at = torch.arange(x.shape[2], device=x.device) + length
    if not stored.scheme:
        stored.codes.index_copy_(2, at, x.to(stored.codes.dtype))
        return
    scheme = record_of(stored.scheme)
    if stored.axis == 2:
        _write_groups(stored, x, length, scheme)
    else:
        static = _by_token(stored) if stored.static else None
        scales = None if static is None else Scales(static[:, :, : x.shape[2]].contiguous())
        _put(stored, quantize(x.contiguous(), scheme, scales=scales, packed=True), at, at)
    if stored.computed is not None:
        _write_computed(stored, x, length)


def _put(stored: StoredTokens, q: Quantized, at: torch.Tensor, blocks: torch.Tensor) -> None:
    """Codes at positions, scales of their blocks."""
    scale = None if stored.static else stored.scale
    for held, new, where in (
        (stored.codes, q.codes, at),
        (scale, q.scale, blocks),
        (stored.zero, q.zero, blocks),
    ):
        if held is not None:
            signed(held).index_copy_(2, where, signed(new))


def _write_groups(stored: StoredTokens, x: torch.Tensor, length: torch.Tensor, scheme: Scheme) -> None:
    """Groups along tokens that x has part of; what is missing of the last one is zeros, and nobody reads its codes."""
    block, new = scheme.scale.block, x.shape[2]
    assert isinstance(block, int)
    count = (block - 1 + new + block - 1) // block
    first = length - length % block
    blocks = first // block + torch.arange(count, device=x.device)
    at = first + torch.arange(count * block, device=x.device)
    tokens = recent_tokens(stored, x, length)
    index = at - (length + new - tokens.shape[2])
    index, inside = index.clamp(0, tokens.shape[2] - 1), at < length + new
    group = torch.where(inside[:, None], tokens[:, :, index], x.new_zeros(()))
    _put(stored, quantize(group.contiguous(), scheme, axis=2, packed=True), at, blocks)


def _write_computed(stored: StoredTokens, x: torch.Tensor, length: torch.Tensor) -> None:
    """Tokens x into those slots that hold their positions afterwards."""
    assert stored.computed is not None
    slots = torch.arange(stored.window.slots, device=x.device)
    index = stored.window.position(slots, length + x.shape[2]) - length
    inside = (index >= 0) & (index < x.shape[2])
    # A position among the sinks has a slot of its own.
    inside &= (slots < stored.window.sinks) | (index + length >= stored.window.sinks)
    new = x[:, :, index.clamp(0, x.shape[2] - 1)].to(stored.computed.dtype)
    stored.computed.copy_(torch.where(inside[:, None], new, stored.computed))


def restore_(stored: StoredTokens, before: torch.Tensor, length: torch.Tensor) -> None:
    """After tokens behind `length` were forgotten: those that left the slots for them come back as they are stored.

    before, length: tokens that were there and that remain, 0-d on their device. Of a group that is open again and was full its
    codes are what is left, too.
    """
    if stored.computed is None:
        return
    window = stored.window
    slots = torch.arange(window.slots, device=stored.computed.device)
    at = window.position(slots, length)
    lost = (slots >= window.sinks) & (at >= window.sinks) & (at < before - window.ring)
    held = _values_at(stored, at.clamp(0, stored.codes.shape[2] - 1), length).to(stored.computed.dtype)
    stored.computed.copy_(torch.where(lost[:, None], held, stored.computed))


def _values_at(stored: StoredTokens, at: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """What the last `window.ring` tokens of `length` are stored as, of them those at these positions; of others anything."""
    block = stored.window.group if stored.axis == 2 else 1
    first = (length - stored.window.ring).clamp(min=0) // block
    count = -(-stored.window.ring // block) + 1
    blocks = (first + torch.arange(count, device=at.device)).clamp(max=stored.codes.shape[2] // block - 1)
    tokens = (blocks[:, None] * block + torch.arange(block, device=at.device)).reshape(-1)
    codes = stored.codes[:, :, tokens]
    scale, zero = (
        t if t is None or t.dim() == 1 else signed(t)[:, :, blocks].view(t.dtype)
        for t in (stored.scale, stored.zero)
    )
    few = StoredTokens(codes, scale, zero, stored.scheme, stored.width, stored.axis)
    return token_values(few)[:, :, (at - first * block).clamp(0, count * block - 1)]


def signed(x: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that torch indexes: bfloat16 scales are stored as uint16."""
    return x.view(torch.int16) if x.dtype == torch.uint16 else x


__all__ = [
    "append_", "computed_values", "quantized_tokens", "recent_tokens", "restore_", "room_for", "signed", "token_values",
    "window_numbers",
]  # fmt: skip
