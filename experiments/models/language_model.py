"""A small byte-level language model of the Llama family, which experiments train from scratch.

Tokens are bytes, so bits per byte need no tokenizer. Its modules are those of `experiments.models.llama`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.models.llama import CausalLM, LlamaConfig, rotary_tables

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class ModelSettings(LlamaConfig):
    """Sizes of the byte-level model; `context` is the length of the texts it is trained on.

    Widths are multiples of 256, so that every block size of every scheme divides every layer.
    """

    name: str = "byte-level"
    vocabulary: int = VOCABULARY
    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 512
    context: int = 256
    rope_base: float = 10000.0
    rope_factor: float = 1.0
    epsilon: float = 1e-6


class LanguageModel(CausalLM):
    """Logits of the next byte at every position."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__(settings)
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # Residual branches start small, so that the depth does not set the scale of the stream.
                nn.init.normal_(parameter, std=0.02 / (2 * settings.layers) ** 0.5)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Tokens (batch, time) to logits (batch, time, 256).

        `positions` (time) default to 0, 1, 2 ...; `mask` (time, time) is true where a query may attend, causal by default.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        cosine, sine = rotary_tables(positions, frequencies(self.config, positions.device))
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cosine, sine, mask)
        return self.lm_head(self.model.norm(x))


def frequencies(config: LlamaConfig, device: torch.device) -> Tensor:
    """Unscaled rotary frequencies (head_dim / 2). In float32 throughout, unlike `scaled_frequencies`, whose last bits differ:
    published rows are of models that were trained with these."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    return config.rope_base ** (-half / config.head_dim)


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
