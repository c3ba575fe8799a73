"""Llama in training, with random weights: decoder layers alone, or a whole model with its loss.

The modules are those of `experiments.models.llama`: attention over the whole text, no cache, no dropout, no checkpointing.
Time and memory do not depend on the values of weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.models.llama import (
    DecoderLayer,
    LlamaConfig,
    random_weights,
    rotary_tables,
    scaled_frequencies,
)


class DecoderLayers(nn.Module):
    """Decoder layers one after the other, over texts of one length."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, config: LlamaConfig, length: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.empty(length, config.head_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The residual stream (batch, length, width) after all layers."""
        for layer in self.layers:
            x = layer(x, self.cosine, self.sine)
        return x

    def fill_tables(self, config: LlamaConfig) -> None:
        """Write the rotary tables into their buffers."""
        positions = torch.arange(len(self.cosine), dtype=torch.float32, device=self.cosine.device)
        cosine, sine = rotary_tables(positions, scaled_frequencies(config).to(positions.device))
        self.cosine.copy_(cosine)
        self.sine.copy_(sine)


class ModelWithLoss(nn.Module):
    """Embedding, decoder layers, norm and an output layer tied to the embedding; returns the loss of the next token."""

    def __init__(self, config: LlamaConfig, length: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.blocks = DecoderLayers(config, length)
        self.norm = nn.RMSNorm(config.width, eps=config.epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, length) to the mean loss, float32."""
        x = self.norm(self.blocks(self.embed_tokens(tokens)))
        logits = functional.linear(x[:, :-1], self.embed_tokens.weight).flatten(0, 1)
        return functional.cross_entropy(logits.float(), tokens[:, 1:].flatten())


def random_model(
    config: LlamaConfig,
    length: int,
    device: str,
    seed: int,
    *,
    whole: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> DecoderLayers | ModelWithLoss:
    """Decoder layers, or a whole model, with random normal weights, allocated where they stay."""
    build = ModelWithLoss if whole else DecoderLayers
    model: DecoderLayers | ModelWithLoss = random_weights(lambda: build(config, length), device, seed, dtype)
    layers_of(model).fill_tables(config)
    return model


def layers_of(model: DecoderLayers | ModelWithLoss) -> DecoderLayers:
    """The decoder layers of either."""
    return model.blocks if isinstance(model, ModelWithLoss) else model


__all__ = ["DecoderLayers", "ModelWithLoss", "layers_of", "random_model"]
