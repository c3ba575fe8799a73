"""One layer of decode attention, one query of every head over a stored cache: what is timed, by recipe and by peers.

A recipe's call is the library's own function over a cache that was filled with random tokens. Peers read bfloat16 keys and
values of exactly that length: torch's scaled_dot_product_attention by backend, FlexAttention compiled, FlashAttention-3
where it is installed, and transformers' own attention with the mask that its static cache has.
Results of all have the shape of q but transformers' and FlashAttention-3's, which have heads behind tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ao_lab.kv_cache.recipe import KVRecipe
from ao_lab.measure.turns import Call, cache_bytes, input_sets
from fast.attention.attention import attention
from fast.attention.stored import append_, room_for
from fast.layers.hadamard import hadamard
from fast.stored_tokens import StoredTokens

#: Tokens that are written at once, a multiple of every group.
AT_ONCE = 8192
#: Most caches in turn, together beyond the second-level cache.
MOST_SETS = 256


@dataclass(frozen=True)
class Heads:
    """Query heads, key heads, and channels of each."""

    queries: int = 32
    keys: int = 8
    width: int = 128


@dataclass(frozen=True)
class Size:
    """Sequences, and tokens of each in the cache."""

    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """As a setting of rows."""
        return f"{self.batch} x {self.tokens}"

    @classmethod
    def of(cls, name: str) -> Size:
        """The size of a name."""
        batch, tokens = name.split("x")
        return cls(int(batch), int(tokens))


class Stored(NamedTuple):
    """Keys, values, how many tokens there are, int64 on their device, and whether keys are rotated."""

    keys: StoredTokens
    values: StoredTokens
    length: Tensor
    rotate: bool

    @property
    def nbytes(self) -> int:
        """Of what attention reads."""
        return sum(part.nbytes for one in (self.keys, self.values) for part in one.tensors())


def rooms(recipe: KVRecipe, k: Tensor, v: Tensor, room: int) -> tuple[StoredTokens, StoredTokens]:
    """Memory of a recipe for `room` tokens like those of k and v (B, heads, any, width)."""
    keys, values = (
        room_for(x, room, scheme, axis=axis, window=recipe.window)
        for x, scheme, axis in zip((k, v), recipe.schemes, recipe.axes, strict=True)
    )
    return keys, values


def filled(recipe: KVRecipe, size: Size, heads: Heads, device: str) -> Stored:
    """A cache of a recipe with random bfloat16 tokens, exactly as many as it has room for."""

    def tokens(count: int) -> Tensor:
        return torch.randn((size.batch, heads.keys, count, heads.width), device=device, dtype=torch.bfloat16)

    keys, values = rooms(recipe, tokens(1), tokens(1), size.tokens)
    length = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, size.tokens, AT_ONCE):
        count = min(AT_ONCE, size.tokens - start)
        append_(keys, values, tokens(count), tokens(count), length, recipe.rotate)
    return Stored(keys, values, length, recipe.rotate)


def several(recipe: KVRecipe, size: Size, heads: Heads, device: str) -> list[Stored]:
    """Caches in turn: on a GPU together beyond its second-level cache, elsewhere one."""
    first = filled(recipe, size, heads, device)
    count = input_sets(first.nbytes, cache_bytes(), MOST_SETS) if device == "cuda" else 1
    return [first, *(filled(recipe, size, heads, device) for _ in range(count - 1))]


def queries(size: Size, heads: Heads, device: str) -> Tensor:
    """(B, heads, 1, width), a view of (B, 1, heads, width) as a projection leaves it."""
    shape = (size.batch, 1, heads.queries, heads.width)
    return torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2)


def ours(q: Tensor, held: Stored) -> Call:
    """Attention of the library over a cache; where keys are rotated the query is too, in each call."""
    if held.rotate:
        return lambda: attention(hadamard(q.contiguous(), q.shape[-1]), held.keys, held.values, held.length)
    return lambda: attention(q, held.keys, held.values, held.length)


#: Makes the call of a peer over the bfloat16 cache.
Peer = Callable[[Tensor, Stored], Call]


def by_backend(backend: SDPBackend) -> Peer:
    """torch's scaled_dot_product_attention by one of its backends alone."""

    def make(q: Tensor, held: Stored) -> Call:
        k, v = held.keys.codes, held.values.codes

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        return call

    return make


def by_flex(q: Tensor, held: Stored) -> Call:
    """FlexAttention, compiled for this length."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, held.keys.codes, held.values.codes, enable_gqa=True)


def by_flash3(q: Tensor, held: Stored) -> Call:
    """FlashAttention-3, whose tensors are (B, tokens, heads, width)."""
    function = import_module("flash_attn_interface").flash_attn_func
    k, v = (x.codes.transpose(1, 2) for x in (held.keys, held.values))
    return lambda: function(q.transpose(1, 2), k, v, causal=True)


def by_transformers(q: Tensor, held: Stored) -> Call:
    """transformers' sdpa attention as its static cache calls it: over the whole room, with a mask."""
    function: Any = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    k, v = held.keys.codes, held.values.codes
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    mask = torch.ones((q.shape[0], 1, 1, k.shape[2]), dtype=torch.bool, device=q.device)
    return lambda: function(module, q, k, v, mask, scaling=q.shape[-1] ** -0.5)[0]


FLEX, FLASH3, TRANSFORMERS = "FlexAttention, compiled", "FlashAttention-3", "transformers, static cache"
PEERS: Mapping[str, Peer] = {
    "SDPA, flash": by_backend(SDPBackend.FLASH_ATTENTION),
    "SDPA, cuDNN": by_backend(SDPBackend.CUDNN_ATTENTION),
    FLEX: by_flex,
    FLASH3: by_flash3,
    TRANSFORMERS: by_transformers,
}
#: The module that a peer needs.
NEEDS = {FLASH3: "flash_attn_interface"}

__all__ = ["NEEDS", "PEERS", "Heads", "Size", "Stored", "filled", "ours", "queries", "rooms", "several"]
