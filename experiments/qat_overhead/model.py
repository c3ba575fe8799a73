"""Llama in training: blocks alone, or a whole model, with the shapes of Llama-3-8B and Llama-3.2-3B or tiny ones.

Plain PyTorch under the names of transformers' Llama: fused attention over the whole text, no cache, no dropout, no
checkpointing. Weights are random: time and memory do not depend on the numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.decode.model import LLAMA_8B, TINY, FeedForward, Shape, frequencies
from experiments.models.language_model import Attention, ModelSettings

#: Two blocks of Llama-3-8B, as issues and pages name them; no embedding, no output layer.
TWO_BLOCKS = replace(LLAMA_8B, name="llama-3-8b-two-blocks-random", layers=2)
LLAMA_3B = Shape(
    name="llama-3.2-3b-random",
    vocabulary=128256,
    width=3072,
    layers=28,
    heads=24,
    kv_heads=8,
    head_width=128,
    feed_forward=8192,
    rope_factor=32.0,
)
#: Stand-ins as small as groups of 128 allow.
TINY_BLOCKS = replace(
    TINY, name="two-tiny-blocks-stand-in-random", width=128, heads=2, kv_heads=1, feed_forward=256
)
TINY_WHOLE = replace(TINY_BLOCKS, name="tiny-model-stand-in-random", layers=1)


class Block(nn.Module):
    """One decoder layer; all of a model's are alike to the compiler."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.self_attn = Attention(
            ModelSettings(width=shape.width, heads=shape.heads, kv_heads=shape.kv_heads)
        )
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Add what attention and feed-forward say to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), (cosine, sine), None)
        return x + self.mlp(self.post_attention_layernorm(x))


class Blocks(nn.Module):
    """Blocks one after the other over texts of one length."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(length, shape.head_width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream after all blocks."""
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return x

    def fill(self, shape: Shape) -> None:
        """The rotations by position."""
        positions = torch.arange(len(self.cosine), dtype=torch.float32, device=self.cosine.device)
        turns = torch.outer(positions, frequencies(shape).to(positions.device)).repeat(1, 2)
        self.cosine.copy_(turns.cos())
        self.sine.copy_(turns.sin())


class Whole(nn.Module):
    """Embedding, blocks, norm and an output layer tied to the embedding; gives the loss of the next token."""

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = Blocks(shape, length)
        self.norm = nn.RMSNorm(shape.width, eps=shape.epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss, float32."""
        x = self.norm(self.blocks(self.embed_tokens(tokens)))
        logits = functional.linear(x[:, :-1], self.embed_tokens.weight).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def random_model(
    shape: Shape, length: int, device: str, seed: int, *, whole: bool, dtype: torch.dtype = torch.bfloat16
) -> Blocks | Whole:
    """Blocks, or a whole model, with normal weights of variance 1 / inputs, made where they stay."""
    with torch.device("meta"):
        model: Blocks | Whole = (Whole if whole else Blocks)(shape, length)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(std=module.weight.shape[1] ** -0.5, generator=generator)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, Blocks):
                module.fill(shape)
    return model


def blocks_of(model: Blocks | Whole) -> Blocks:
    """The blocks of either."""
    return model.blocks if isinstance(model, Whole) else model


__all__ = [
    "LLAMA_3B",
    "TINY_BLOCKS",
    "TINY_WHOLE",
    "TWO_BLOCKS",
    "Blocks",
    "Whole",
    "blocks_of",
    "random_model",
]
