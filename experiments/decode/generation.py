"""Generation, token by token: a step of three compiled functions, captured in a CUDA graph where there is a GPU.

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

import torch
from torch import Tensor

from experiments.decode.model import CachedDecoderLayer, CachedLlama, Positions, PositionTables
from experiments.harness.cuda_graph import recorded

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
