"""A Llama that generates one token at a time, with random weights.

Written as gpt-fast does it, with which the published numbers were measured, and so with an attention and a layer of its own
beside the modules of `experiments.models.llama`:

* queries, keys and values are one linear layer (gate and up are not);
* keys and values go into a cache of fixed length, and nothing depends on the host, so a step can be compiled and captured;
* a layer hands its feed-forward output on unadded (`pending`): the next layer adds it in the kernel that normalizes the sum.

Unlike there, attention of a single token on a GPU is a kernel (`fast.layers.attention`). For a prompt, query heads that
share keys are laid out as rows of one head, which makes grouped attention plain attention over fewer heads.

Generation, token by token: a step of three compiled functions, captured in a CUDA graph where there is a GPU.

The step is embed (embedding, rotary tables, mask), one decoder layer after the other, and predict (logits, sampling). Layers
are alike, so a single compilation serves all of them; `whole` compiles the step as one program instead. Sampling is
gpt-fast's: temperature, top k, and the exponential trick that needs no synchronization. State lives in tensors whose addresses
never change: the token, its position, the key-value cache, and the tokens generated so far, so the host only launches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ao_lab.measure.turns import recorded
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
from fast.layers.attention import attend_one, supports


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
    """The model; `experiments.decode.model` has the functions of a step."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, CachedDecoderLayer)


def random_llama(
    config: LlamaConfig, device: str, seed: int, dtype: torch.dtype = torch.bfloat16
) -> CachedLlama:
    """A model with random normal weights, allocated where it stays, for inference."""
    model = random_weights(lambda: CachedLlama(config), device, seed, dtype, embedding_std=1.0)
    return model.eval().requires_grad_(False)


WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How generation is run and timed.

    prompt: tokens of the prompt. new: tokens of one generation. rounds: generations of each side. backend: of torch.compile.
    graph: whether the step is captured in a CUDA graph.
    """

    prompt: int = 32
    new: int = 200
    rounds: int = 3
    top_k: int = 200
    temperature: float = 0.8
    backend: str = "inductor"
    graph: bool = True

    @property
    def length(self) -> int:
        """Positions of the cache: a multiple of eight, which torch's attention wants of its mask."""
        return -(-(self.prompt + self.new) // 8) * 8


@dataclass(frozen=True)
class State:
    """Where a generation is; written by the step. token, position: (1), int64; generated: (length), int64; keys, values: one
    (1, kv_heads, length, head_dim) a layer."""

    token: Tensor
    position: Tensor
    generated: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    @classmethod
    def of(cls, model: CachedLlama, plan: Plan) -> State:
        """An empty cache, on the device and in the dtype of the model's weights."""
        config, table = model.config, model.model.embed_tokens.weight
        size = (1, config.kv_heads, plan.length, config.head_dim)
        keys, values = (
            [torch.zeros(size, dtype=table.dtype, device=table.device) for _ in range(config.layers)]
            for _ in range(2)
        )
        token, position, generated = (
            torch.zeros(count, dtype=torch.int64, device=table.device) for count in (1, 1, plan.length)
        )
        return cls(token, position, generated, keys, values)


def embed(
    model: CachedLlama, tables: PositionTables, tokens: Tensor, index: Tensor
) -> tuple[Tensor, Tensor, Positions]:
    """What enters the first layer: the residual stream, what is to be added to it (zeros), and the positions."""
    x = model.model.embed_tokens(tokens)[None]
    return x, torch.zeros_like(x), tables.at(index, model.config.group)


def run_layer(
    layer: CachedDecoderLayer, x: Tensor, pending: Tensor, positions: Positions, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """One layer."""
    return layer(x, pending, positions, keys, values)


def logits_of(model: CachedLlama, x: Tensor, pending: Tensor) -> Tensor:
    """Logits (time, vocabulary)."""
    return model.lm_head(model.model.norm(x + pending))[0]


def predict(model: CachedLlama, plan: Plan, state: State, x: Tensor, pending: Tensor) -> Tensor:
    """Logits of the next token; samples it, stores it in the state and moves to the next position."""
    logits = logits_of(model, x, pending)
    token = sample(logits[-1], plan)
    state.position.add_(1)
    state.token.copy_(token)
    state.generated.index_copy_(0, state.position.clamp(max=state.generated.shape[0] - 1), token)
    return logits


def sample(logits: Tensor, plan: Plan) -> Tensor:
    """A token (1) of the top k, by its probability at this temperature."""
    top, tokens = torch.topk(logits, min(plan.top_k, logits.shape[-1]), sorted=False)
    probabilities = torch.softmax(top.float() / plan.temperature, dim=-1)
    # The largest of p / e, e exponentially distributed, is token i with probability p(i).
    noise = torch.empty_like(probabilities).exponential_(1.0)
    return tokens[torch.argmax(probabilities / noise, dim=-1, keepdim=True)]


class Decoding:
    """A model with a cache, its step compiled; `generate` returns seconds of each token."""

    def __init__(
        self, model: CachedLlama, plan: Plan, prompt: Tensor, *, compiled: bool = True, whole: bool = False
    ) -> None:
        self.model, self.plan, self.prompt = model, plan, prompt
        self.state = State.of(model, plan)
        self.tables = PositionTables.of(model.config, plan.length, model.model.embed_tokens.weight)
        parts = (embed, run_layer, predict)
        self._embed, self._run_layer, self._predict = (
            self._compiled(part) if compiled and not whole else part for part in parts
        )
        self._step = self._compiled(self._eager_step) if compiled and whole else self._eager_step
        self.replay: Callable[[], Tensor] = self._step
        # What the captured step runs: a graph does not hold the code of its kernels, and the compiler forgets programs.
        self.programs: list[object] = []

    def _compiled(self, function: Callable) -> Callable:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self.plan.backend)

    def _eager_step(self) -> Tensor:
        state = self.state
        x, pending, positions = self._embed(self.model, self.tables, state.token, state.position)
        for layer, keys, values in zip(self.model.model.layers, state.keys, state.values, strict=True):
            x, pending = self._run_layer(layer, x, pending, positions, keys, values)
        return self._predict(self.model, self.plan, state, x, pending)

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Logits of the whole prompt, not compiled; fills the cache. The next step takes the prompt's last token again."""
        index = torch.arange(self.prompt.shape[0], device=self.prompt.device)
        x, pending, positions = embed(self.model, self.tables, self.prompt, index)
        for layer, keys, values in zip(
            self.model.model.layers, self.state.keys, self.state.values, strict=True
        ):
            x, pending = layer(x, pending, positions, keys, values)
        self.rewind()
        return logits_of(self.model, x, pending)

    def rewind(self) -> None:
        """Back to the prompt's last token."""
        self.state.position.fill_(self.prompt.shape[0] - 1)
        self.state.token.copy_(self.prompt[-1:])

    @torch.no_grad()
    def prepare(self) -> Tensor:
        """Compile, and capture where the plan says so; returns the logits of the first step."""
        if self.plan.graph:
            self._capture()
        self.rewind()
        return self.replay().clone()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARMUP):
                self.rewind()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self.rewind()
        with recorded(graph):
            logits = self._step()
        self.programs = compiled_programs()

        def replay() -> Tensor:
            graph.replay()
            return logits

        self.replay = replay

    @torch.no_grad()
    def generate(self) -> list[float]:
        """Seconds of each new token."""
        self.rewind()
        return cuda_times(self.replay, self.plan.new) if self.prompt.is_cuda else host_times(self)

    @property
    def tokens(self) -> list[int]:
        """The tokens of the last generation."""
        first = self.prompt.shape[0]
        return self.state.generated[first : first + self.plan.new].tolist()


def compiled_programs() -> list[object]:
    """All programs that the compiler holds; whoever holds them too keeps their kernels loaded."""
    from torch._inductor.codecache import PyCodeCache

    return list(PyCodeCache.modules)


def cuda_times(replay: Callable[[], object], count: int) -> list[float]:
    """Seconds between events around each launch; the host runs ahead."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        replay()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def host_times(decoding: Decoding) -> list[float]:
    """Seconds of each call on a CPU."""
    times = []
    for _ in range(decoding.plan.new):
        started = time.perf_counter()
        decoding.replay()
        times.append(time.perf_counter() - started)
    return times
