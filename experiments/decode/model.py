"""A Llama that generates one token at a time: the shapes of Llama-3.1-8B, or tiny ones, with random weights.

Written as gpt-fast does it, with which the published numbers were measured: every matrix is an ``nn.Linear`` without bias,
those of queries, keys and values are one (gate and up are not), keys and values go into a cache of fixed length, and nothing
depends on the host, so that a step can be compiled and captured. Unlike there, attention of a single token on a GPU is a kernel
(`decode_attention`). In a prompt, query heads that share keys are laid out as rows of one head, which makes grouped attention
plain attention over fewer heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.decode.attention import attend_one, takes


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a Llama, and how its rotary frequencies are stretched (factor 1: not at all)."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    feed_forward: int
    rope_base: float = 500000.0
    rope_factor: float = 8.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    epsilon: float = 1e-5

    @property
    def group(self) -> int:
        """Query heads per head of keys and values."""
        return self.heads // self.kv_heads


LLAMA_8B = Shape(
    name="llama-3.1-8b-random",
    vocabulary=128256,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_width=128,
    feed_forward=14336,
)
TINY = Shape(
    name="tiny-stand-in-random",
    vocabulary=512,
    width=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=64,
    feed_forward=512,
)


class Attention(nn.Module):
    """Grouped-query attention over a cache."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = shape.heads, shape.kv_heads, shape.head_width
        inside, kv_width = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.parts = [inside, kv_width, kv_width]
        self.qkv_proj = nn.Linear(shape.width, sum(self.parts), bias=False)
        self.o_proj = nn.Linear(inside, shape.width, bias=False)

    def forward(self, x: Tensor, where: Where, keys: Tensor, values: Tensor) -> Tensor:
        """Write this text's keys and values into the cache, attend to what the mask allows."""
        qkv = self.qkv_proj(x)
        if takes(qkv):
            return self.o_proj(attend_one(qkv, where.cosine, where.sine, where.position, keys, values))
        return self.o_proj(self._attend(qkv, where, keys, values))

    def _attend(self, qkv: Tensor, where: Where, keys: Tensor, values: Tensor) -> Tensor:
        """The same for a prompt, or on a CPU, by torch's attention."""
        q, k, v = (self._heads(part) for part in qkv.split(self.parts, -1))
        q, k = rotate(q, where), rotate(k, where)
        keys.index_copy_(2, where.position, k)
        values.index_copy_(2, where.position, v)
        # (heads, time) as (kv_heads, group * time): heads that share keys become rows.
        rows = q.reshape(q.shape[0], self.kv_heads, -1, self.head_width)
        y = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=where.mask)
        return y.reshape(q.shape).transpose(1, 2).flatten(2)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer. All of a model's are alike to the compiler, so that one compilation serves them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp = FeedForward(shape)

    def forward(
        self, x: Tensor, said: Tensor, where: Where, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The residual stream, and what is to be added to it: the next layer does, in the kernel that normalizes the sum."""
        x = x + said
        x = x + self.self_attn(self.input_layernorm(x), where, keys, values)
        return x, self.mlp(self.post_attention_layernorm(x))


class Layers(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.epsilon)


class Llama(nn.Module):
    """The model. Its output layer is not tied to the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Layers(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def linears(self) -> dict[str, nn.Linear]:
        """Every linear layer by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}


class Where(NamedTuple):
    """Positions of the tokens at hand, their rotations, and what they may attend to."""

    position: Tensor
    cosine: Tensor
    sine: Tensor
    mask: Tensor


@dataclass(frozen=True)
class Tables:
    """What is looked up by position: rotations, and the causal mask over the whole cache."""

    cosine: Tensor
    sine: Tensor
    causal: Tensor

    @classmethod
    def of(cls, shape: Shape, length: int, like: Tensor) -> Tables:
        """Tables of this many positions, in the dtype and on the device of `like`."""
        positions = torch.arange(length, dtype=torch.float32, device=like.device)
        turns = torch.outer(positions, frequencies(shape).to(like.device)).repeat(1, 2)
        causal = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
        return cls(turns.cos().to(like.dtype), turns.sin().to(like.dtype), causal)

    def at(self, position: Tensor, group: int) -> Where:
        """The rows of these positions; a row of the mask for each of the query heads that share keys."""
        mask = self.causal[position].repeat(group, 1)
        return Where(position, self.cosine[position], self.sine[position], mask)


def frequencies(shape: Shape) -> Tensor:
    """Llama 3.1's rotary frequencies: long waves are stretched by the factor, short ones stay, those between are blended."""
    half = torch.arange(0, shape.head_width, 2, dtype=torch.float64)
    plain = shape.rope_base ** (-half / shape.head_width)
    turns = shape.rope_context * plain / (2 * math.pi)
    blend = ((turns - shape.rope_low) / (shape.rope_high - shape.rope_low)).clamp(0, 1)
    return (plain * (blend + (1 - blend) / shape.rope_factor)).to(torch.float32)


def rotate(x: Tensor, where: Where) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the angle of its position."""
    first, second = x.chunk(2, dim=-1)
    return x * where.cosine + torch.cat((-second, first), dim=-1) * where.sine


def random_llama(shape: Shape, device: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> Llama:
    """A model with normal weights of variance 1 / inputs, made where it stays; never on the host first."""
    with torch.device("meta"):
        model = Llama(shape).to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=module.in_features**-0.5, generator=generator)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(generator=generator)
        elif isinstance(module, nn.RMSNorm):
            module.weight.data.fill_(1.0)
    return model.eval().requires_grad_(False)
