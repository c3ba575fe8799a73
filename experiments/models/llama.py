"""The Llama that the experiments share: sizes, modules, rotary positions and random weights.

Plain PyTorch: every matrix is an ``nn.Linear`` without bias, so that whatever quantizes linear layers quantizes the model.
Module names follow transformers' Llama (``model.layers.0.self_attn.q_proj`` and so on, the same rotary convention), so a
checkpoint loads there without renaming. Three models are built from it:

* `experiments.models.llama`: bytes in, logits out; trained from scratch;
* `experiments.qat_overhead.step`: decoder layers alone, or a model with its loss; one training step is timed;
* `experiments.decode.model`: one token at a time through a key-value cache, with an attention of its own.

A small byte-level language model of the Llama family, which experiments train from scratch.

Tokens are bytes, so bits per byte need no tokenizer. Its modules are those of `experiments.models.llama`.

The check before a model is timed: its outputs are finite and near those of the model that it is compared with.

Both limits are coarse on purpose: rounding moves outputs by percents, a product that reads its weights wrongly by their whole
size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from experiments.harness.measuring import Wrong


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama and its rotary embedding. `name` is what rows call a model of random weights in these shapes.

    rope_factor: by how much Llama 3.1 stretches the long wavelengths (1: not at all); those shorter than rope_context /
    rope_high stay, those between are blended. ValueError where heads do not divide the width or kv_heads the heads.
    """

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    rope_base: float = 500000.0
    rope_factor: float = 8.0
    rope_low: float = 1.0
    rope_high: float = 4.0
    rope_context: int = 8192
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % self.heads or self.heads % self.kv_heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width {self.width}, heads {self.heads}, kv_heads {self.kv_heads}: heads must divide width into even "
                "parts and kv_heads must divide heads"
            )

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.width // self.heads

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions, without a cache."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, time, width) to the same shape; causal, or as the boolean mask (query, key) says.

        cosine, sine: (time, head_dim), of `rotary_tables`, cast to the dtype of queries and keys.
        """
        q, k, v = (
            split_heads(project(x), self.head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (apply_rotary(part, cosine.to(part.dtype), sine.to(part.dtype)) for part in (q, k))
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        return self.o_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.feed_forward, bias=False)
        self.up_proj = nn.Linear(config.width, config.feed_forward, bias=False)
        self.down_proj = nn.Linear(config.feed_forward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(batch, time, heads * head_dim) to (batch, heads, time, head_dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of each head by the angle of its position; tables in the dtype of x."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm and around a residual. All of a model's are alike to the compiler."""

    def __init__(
        self, config: LlamaConfig, attention: Callable[[LlamaConfig], nn.Module] = Attention
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.epsilon)
        self.self_attn = attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None = None) -> Tensor:
        """The residual stream (batch, time, width) after the layer; other arguments as for `Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, decoder layers and final norm."""

    def __init__(self, config: LlamaConfig, layer: Callable[[LlamaConfig], nn.Module] = DecoderLayer) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.epsilon)


class CausalLM(nn.Module):
    """Decoder and output layer, which is not tied to the embedding. Subclasses say how they run."""

    def __init__(self, config: LlamaConfig, layer: Callable[[LlamaConfig], nn.Module] = DecoderLayer) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, layer)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)

    def linears(self) -> dict[str, nn.Linear]:
        """Every linear layer by name, in order of execution, lm_head last."""
        return {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}


def rotary_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (positions, head_dim), float32, of the rotary angles."""
    turns = torch.outer(positions.to(torch.float32), frequencies).repeat(1, 2)
    return turns.cos(), turns.sin()


def scaled_frequencies(config: LlamaConfig) -> Tensor:
    """Llama 3.1's rotary frequencies (head_dim / 2), float32: long wavelengths are stretched by the factor."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    unscaled = config.rope_base ** (-half / config.head_dim)
    turns = config.rope_context * unscaled / (2 * math.pi)
    blend = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
    return (unscaled * (blend + (1 - blend) / config.rope_factor)).to(torch.float32)


Model = TypeVar("Model", bound=nn.Module)


def random_weights(
    build: Callable[[], Model],
    device: str,
    seed: int,
    dtype: torch.dtype,
    *,
    embedding_std: float | None = None,
) -> Model:
    """The model of `build` with normal weights, allocated where it stays, never on the host first; buffers are not filled.

    Linear weights have variance 1 / inputs, norms are 1. embedding_std: of the embedding; as of a linear layer by default.
    """
    with torch.device("meta"):
        model = build().to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=module.in_features**-0.5, generator=generator)
            elif isinstance(module, nn.Embedding):
                std = module.embedding_dim**-0.5 if embedding_std is None else embedding_std
                module.weight.normal_(std=std, generator=generator)
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
    return model


# Shapes of published Llamas, and of stand-ins that two cores can run. Names are keys of committed rows.

LLAMA_3_1_8B = LlamaConfig(
    name="llama-3.1-8b-random",
    vocabulary=128256,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    feed_forward=14336,
)
#: Two decoder layers of Llama-3-8B, as pages of other projects name them. It differs from 3.1 in the rotary factor
#: alone, which costs nothing, so that of 3.1 stays.
LLAMA_3_8B_TWO_LAYERS = replace(LLAMA_3_1_8B, name="llama-3-8b-two-blocks-random", layers=2)
LLAMA_3_2_3B = LlamaConfig(
    name="llama-3.2-3b-random",
    vocabulary=128256,
    width=3072,
    layers=28,
    heads=24,
    kv_heads=8,
    feed_forward=8192,
    rope_factor=32.0,
)
#: Stand-in of `decode`.
TINY = LlamaConfig(
    name="tiny-stand-in-random", vocabulary=512, width=256, layers=2, heads=4, kv_heads=2, feed_forward=512
)
#: Stand-ins of `qat_overhead`, as small as groups of 128 allow.
TINY_TWO_LAYERS = replace(
    TINY, name="two-tiny-blocks-stand-in-random", width=128, heads=2, kv_heads=1, feed_forward=256
)
TINY_ONE_LAYER = replace(TINY_TWO_LAYERS, name="tiny-model-stand-in-random", layers=1)


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


#: Largest relative change of outputs: by a scheme (4 bits change the logits of 32 random layers by 0.46), and by compiling.
SCHEME_LIMIT, COMPILED_LIMIT = 0.7, 0.3


def relative_change(outputs: Tensor, expected: Tensor | None, limit: float, cause: str) -> tuple[float, str]:
    """Norm of the difference over the norm of `expected`, with its unit; 0 where nothing is expected.

    `Wrong` where outputs are not finite, or change by more than `limit`; `cause` ends its sentence.
    """
    if not torch.isfinite(outputs).all():
        raise Wrong("outputs are not finite")
    if expected is None:
        return 0.0, "ratio"
    change = float((outputs - expected).norm() / expected.norm())
    if not change <= limit:  # nor where what is expected is zero
        raise Wrong(f"outputs differ by {change:.3f} of their size {cause}, more than {limit}")
    return change, "ratio"
