"""Generation, token by token: a step of three compiled functions, captured in a CUDA graph where there is a GPU.

The step is front (embedding, rotations, mask), one block after the other, and tail (logits, sampling). Blocks are alike, so a
single compilation serves all of them; `whole` compiles the step as one program instead. Sampling is gpt-fast's: temperature,
top k, and the exponential trick that needs no synchronization. State lives in tensors that keep their place: the token, its
position, the cache, and the tokens made so far, so the host only launches.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.decode.model import Block, Llama, Tables, Where
from experiments.harness.cuda_graph import recorded

WARMUP = 3


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How generation is run and timed."""

    #: Tokens of the prompt, tokens made by one generation, generations of each side.
    prompt: int = 32
    new: int = 200
    rounds: int = 3
    top_k: int = 200
    temperature: float = 0.8
    #: Of torch.compile.
    backend: str = "inductor"
    #: Whether the step is captured in a CUDA graph.
    graph: bool = True

    @property
    def length(self) -> int:
        """Positions of the cache, in whole eights as torch's attention wants its mask."""
        return -(-(self.prompt + self.new) // 8) * 8


@dataclass(frozen=True)
class State:
    """Where a generation is; written by the step."""

    token: Tensor
    position: Tensor
    made: Tensor
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    @classmethod
    def of(cls, model: Llama, plan: Plan) -> State:
        """An empty cache, beside a model's weights."""
        shape, table = model.shape, model.model.embed_tokens.weight
        size = (1, shape.kv_heads, plan.length, shape.head_width)
        keys, values = (
            [torch.zeros(size, dtype=table.dtype, device=table.device) for _ in range(shape.layers)]
            for _ in range(2)
        )
        token, position, made = (
            torch.zeros(count, dtype=torch.int64, device=table.device) for count in (1, 1, plan.length)
        )
        return cls(token, position, made, keys, values)


def front(model: Llama, tables: Tables, tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Where]:
    """What enters the first block: the residual stream, what is to be added to it, and where it is."""
    x = model.model.embed_tokens(tokens)[None]
    return x, torch.zeros_like(x), tables.at(position, model.shape.group)


def block(
    layer: Block, x: Tensor, said: Tensor, where: Where, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """One layer."""
    return layer(x, said, where, keys, values)


def head(model: Llama, x: Tensor, said: Tensor) -> Tensor:
    """Logits (time, vocabulary)."""
    return model.lm_head(model.model.norm(x + said))[0]


def tail(model: Llama, plan: Plan, state: State, x: Tensor, said: Tensor) -> Tensor:
    """Logits of the next token; samples it, notes it down and moves on."""
    logits = head(model, x, said)
    token = sample(logits[-1], plan)
    state.position.add_(1)
    state.token.copy_(token)
    state.made.index_copy_(0, state.position.clamp(max=state.made.shape[0] - 1), token)
    return logits


def sample(logits: Tensor, plan: Plan) -> Tensor:
    """A token (1) of the top k, by its probability at this temperature."""
    best, tokens = torch.topk(logits, min(plan.top_k, logits.shape[-1]), sorted=False)
    chances = torch.softmax(best.float() / plan.temperature, dim=-1)
    # The largest of p / e, e exponentially distributed, is token i with probability p(i).
    chosen = torch.argmax(chances / torch.empty_like(chances).exponential_(1.0), dim=-1, keepdim=True)
    return tokens[chosen]


class Decoding:
    """A model with a cache, its step compiled; `generate` returns seconds of each token."""

    def __init__(
        self, model: Llama, plan: Plan, prompt: Tensor, *, compiled: bool = True, whole: bool = False
    ) -> None:
        self.model, self.plan, self.prompt = model, plan, prompt
        self.state = State.of(model, plan)
        self.tables = Tables.of(model.shape, plan.length, model.model.embed_tokens.weight)
        self._front, self._block, self._tail = self._parts(compiled and not whole)
        self._step = self._compiled(self._eager_step) if compiled and whole else self._eager_step
        self.replay: Callable[[], Tensor] = self._step
        # What the captured step runs: a graph does not keep the code of its kernels, and the compiler forgets programs.
        self.programs: list[object] = []

    def _compiled(self, function: Callable) -> Callable:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=self.plan.backend)

    def _parts(self, compiled: bool) -> list[Callable]:
        parts = (front, block, tail)
        return [self._compiled(part) if compiled else part for part in parts]

    def _eager_step(self) -> Tensor:
        state = self.state
        x, said, where = self._front(self.model, self.tables, state.token, state.position)
        for layer, keys, values in zip(self.model.model.layers, state.keys, state.values, strict=True):
            x, said = self._block(layer, x, said, where, keys, values)
        return self._tail(self.model, self.plan, state, x, said)

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Logits of the whole prompt, not compiled; fills the cache. The next step takes the prompt's last token again."""
        position = torch.arange(self.prompt.shape[0], device=self.prompt.device)
        x, said, where = front(self.model, self.tables, self.prompt, position)
        for layer, keys, values in zip(
            self.model.model.layers, self.state.keys, self.state.values, strict=True
        ):
            x, said = layer(x, said, where, keys, values)
        self.rewind()
        return head(self.model, x, said)

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
        """What the last generation made."""
        first = self.prompt.shape[0]
        return self.state.made[first : first + self.plan.new].tolist()


def compiled_programs() -> list[object]:
    """All programs that the compiler has made so far and holds; whoever holds them too keeps their kernels loaded."""
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
