"""A Llama that generates one token at a time, with random weights.

Written as gpt-fast does it, with which the published numbers were measured, and so with an attention and a layer of its own
beside the modules of `experiments.models.llama`:

* queries, keys and values are one linear layer (gate and up are not);
* keys and values go into a cache of fixed length, and nothing depends on the host, so a step can be compiled and captured;
* a layer hands its feed-forward output on unadded (`pending`): the next layer adds it in the kernel that normalizes the sum.

Unlike there, attention of a single token on a GPU is a kernel (`fast.layers.decode_attention`). For a prompt, query heads that
share keys are laid out as rows of one head, which makes grouped attention plain attention over fewer heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.llama import (
    CausalLM,
    DecoderLayer,
    LlamaConfig,
    apply_rotary,
    random_weights,
    rotary_tables,
    scaled_frequencies,
    split_heads,
)
from fast.layers.decode_attention import attend_one, supports


class Positions(NamedTuple):
    """Positions (time) of the current tokens, their rotary tables (time, head_dim), and the mask (group * time, length)."""

    index: Tensor
    cosine: Tensor
    sine: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PositionTables:
    """Looked up by position: rotary tables (length, head_dim), and the causal mask (length, length) over the cache."""

    cosine: Tensor
    sine: Tensor
    causal: Tensor

    @classmethod
    def of(cls, config: LlamaConfig, length: int, like: Tensor) -> PositionTables:
        """Tables of `length` positions, in the dtype and on the device of `like`."""
        positions = torch.arange(length, dtype=torch.float32, device=like.device)
        cosine, sine = rotary_tables(positions, scaled_frequencies(config).to(like.device))
        causal = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
        return cls(cosine.to(like.dtype), sine.to(like.dtype), causal)

    def at(self, index: Tensor, group: int) -> Positions:
        """The rows of these positions; the mask once for each of the `group` query heads that share keys."""
        mask = self.causal[index].repeat(group, 1)
        return Positions(index, self.cosine[index], self.sine[index], mask)


class CachedAttention(nn.Module):
    """Grouped-query attention over a key-value cache."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.kv_heads, self.head_dim = config.kv_heads, config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.widths = [config.width, kv_width, kv_width]
        self.qkv_proj = nn.Linear(config.width, sum(self.widths), bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, positions: Positions, keys: Tensor, values: Tensor) -> Tensor:
        """Write these tokens' keys and values into the cache, attend to what the mask allows."""
        qkv = self.qkv_proj(x)
        if supports(qkv):
            y = attend_one(qkv, positions.cosine, positions.sine, positions.index, keys, values)
            return self.o_proj(y)
        return self.o_proj(self._attend(qkv, positions, keys, values))

    def _attend(self, qkv: Tensor, positions: Positions, keys: Tensor, values: Tensor) -> Tensor:
        """The same for a prompt, or on a CPU, by torch's attention."""
        q, k, v = (split_heads(part, self.head_dim) for part in qkv.split(self.widths, -1))
        q, k = (apply_rotary(part, positions.cosine, positions.sine) for part in (q, k))
        keys.index_copy_(2, positions.index, k)
        values.index_copy_(2, positions.index, v)
        # (heads, time) as (kv_heads, group * time): heads that share keys become rows.
        rows = q.reshape(q.shape[0], self.kv_heads, -1, self.head_dim)
        y = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=positions.mask)
        return y.reshape(q.shape).transpose(1, 2).flatten(2)


class CachedDecoderLayer(DecoderLayer):
    """A decoder layer with a cache. All of a model's are alike to the compiler, so one compilation serves them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, CachedAttention)

    def forward(  # type: ignore[override]
        self, x: Tensor, pending: Tensor, positions: Positions, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual stream, and the feed-forward output that the next layer adds to it."""
        x = x + pending
        x = x + self.self_attn(self.input_layernorm(x), positions, keys, values)
        return x, self.mlp(self.post_attention_layernorm(x))


class CachedLlama(CausalLM):
    """The model; `experiments.decode.generation` has the functions of a step."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, CachedDecoderLayer)


def random_llama(
    config: LlamaConfig, device: str, seed: int, dtype: torch.dtype = torch.bfloat16
) -> CachedLlama:
    """A model with random normal weights, allocated where it stays, for inference."""
    model = random_weights(lambda: CachedLlama(config), device, seed, dtype, embedding_std=1.0)
    return model.eval().requires_grad_(False)


__all__ = [
    "CachedAttention",
    "CachedDecoderLayer",
    "CachedLlama",
    "PositionTables",
    "Positions",
    "random_llama",
]
