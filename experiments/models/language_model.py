"""A small byte-level language model of the Llama family, in plain PyTorch.

Root-mean-square norms, rotary positions, grouped-query attention and SwiGLU; every matrix is an ``nn.Linear`` without
bias, so that whatever quantizes linear layers quantizes this model. Tokens are bytes, so bits per byte need no
tokenizer. Module names follow the Llama of transformers (``model.layers.0.self_attn.q_proj`` and so on, the same
rotary convention), so that a checkpoint reads there without renaming.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Sizes. Widths are multiples of 256, so that every block size of every scheme divides every layer."""

    width: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 512
    context: int = 256
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}: heads must divide width into even "
                "parts and kv_heads must divide heads"
            )

    @property
    def head_width(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        width, kv_width = settings.width, settings.kv_heads * settings.head_width
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Attend causally, or as the boolean mask (query, key) says."""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, rotation), rotate(k, rotation)
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.settings.head_width)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(settings.width, settings.feed_forward, bias=False)
        self.up_proj = nn.Linear(settings.width, settings.feed_forward, bias=False)
        self.down_proj = nn.Linear(settings.feed_forward, settings.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each behind a norm and around a residual."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(settings.width, eps=1e-6)
        self.self_attn = Attention(settings)
        self.post_attention_layernorm = nn.RMSNorm(settings.width, eps=1e-6)
        self.mlp = FeedForward(settings)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """Add what attention and feed-forward say to the residual stream."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, settings.width)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-6)


class LanguageModel(nn.Module):
    """Logits of the next byte at every position."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.model = Decoder(settings)
        self.lm_head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # Residual branches start small, so that the depth does not set the scale of the stream.
                nn.init.normal_(parameter, std=0.02 / (2 * settings.layers) ** 0.5)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Tokens (batch, time) to logits (batch, time, 256).

        `positions` (time) default to 0, 1, 2 ...; `mask` (time, time) is true where a query may look, causal by default.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[-1], device=tokens.device)
        rotation = angles(positions, self.settings)
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x, rotation, mask)
        return self.lm_head(self.model.norm(x))

    def linears(self) -> dict[str, nn.Linear]:
        """Every linear layer by name, in order of execution, lm_head last."""
        return {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}


def angles(positions: Tensor, settings: ModelSettings) -> tuple[Tensor, Tensor]:
    """Cosine and sine (time, head_width) of the rotary angles."""
    half = torch.arange(0, settings.head_width, 2, device=positions.device, dtype=torch.float32)
    frequencies = settings.rope_base ** (-half / settings.head_width)
    turns = torch.outer(positions.to(torch.float32), frequencies).repeat(1, 2)
    return turns.cos(), turns.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the angle of its position."""
    cosine, sine = (table.to(x.dtype) for table in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _initialize(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
