"""Generating token by token with the levers of a rung: one step as a call that nothing on the host waits for.

The cache is filled with random keys and values of the context before the steps, so that no prompt is read: a step's time does
not depend on their values, and at the largest batch eager attention over whole prompts would not fit. Greedy; an image's
tokens are chosen among those of images by guided logits, and both of its sequences get them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from ao_lab.install.versions import cache_argument
from ao_lab.measure.turns import recorded
from experiments.harness.measuring import Wrong
from experiments.ladder.rungs import Levers
from experiments.ladder.subjects import Decoder

#: Calls before a capture, and of a compiled program before it is timed.
WARMUP = 3
#: How far an image's logits are moved away from those without its prompt.
GUIDANCE = 3.0


class Step(nn.Module):
    """Logits (batch, vocabulary) of the next token of each unit of the batch."""

    def __init__(self, model: Any, image: bool) -> None:
        super().__init__()
        self.model, self.image = model, image
        self.cache_argument = cache_argument(model.model)
        if image:
            allowed = torch.zeros(model.config.vocab_size, dtype=torch.bool)
            allowed[list(model.model.vocabulary_mapping.image_tokens)] = True
            device = next(model.parameters()).device
            self.register_buffer("barred", (~allowed).to(device), persistent=False)

    def forward(self, ids: Tensor, cache: Any) -> Tensor:
        """Tokens (sequences, 1), written into the cache."""
        held = {self.cache_argument: cache}
        hidden = self.model.model(input_ids=ids, **held, use_cache=True).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden[:, -1]).float()
        if not self.image:
            return logits
        with_prompt, without = logits.chunk(2)
        guided = without + GUIDANCE * (with_prompt - without)
        return guided.masked_fill(self.barred, float("-inf"))


class Loop:
    """Steps of a decoder with the levers of a rung, at a batch, behind `context` tokens."""

    def __init__(
        self, subject: Decoder, model: Any, levers: Levers, batch: int, device: str, seed: int
    ) -> None:
        self.subject, self.model, self.levers, self.device, self.seed = subject, model, levers, device, seed
        self.batch, self.sequences = batch, batch * subject.sequences
        # A cache by a recipe registers its attention.
        self.cache = self.new_cache()
        model.set_attn_implementation(attention_of(levers))
        self.token = torch.zeros(self.sequences, 1, dtype=torch.int64, device=device)
        self.forward: Callable[[Tensor, Any], Tensor] = Step(model, subject.image)
        if levers.compiled:
            self.forward = compiled(self.forward, device)
        self.call: Callable[[], Tensor] = self.step
        self.captured = False

    def new_cache(self) -> Any:
        """An empty one, as the levers say."""
        import transformers

        config, positions = self.model.config, self.subject.positions
        if self.levers.cache:
            return ao_lab.KVCache(self.model, self.levers.cache, positions)
        if self.levers.fixed:
            return transformers.StaticCache(config=config, max_cache_len=positions)
        return transformers.DynamicCache(config=config)

    def begin(self) -> None:
        """The cache as it is behind the context, and the first token; memory of a cache of fixed length stays where it is."""
        if not self.levers.fixed:
            self.cache = self.new_cache()
        elif all(layer.is_initialized for layer in self.cache.layers):
            self.cache.reset()
        config = self.model.config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = (self.sequences, config.num_key_value_heads, self.subject.context, head)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        for layer in range(config.num_hidden_layers):
            states = [
                torch.randn(size, generator=generator, device=self.device, dtype=torch.bfloat16)
                for _ in range(2)
            ]
            self.cache.update(*states, layer)
        self.token.fill_(5)

    def step(self) -> Tensor:
        """One more token; its logits."""
        logits = self.forward(self.token, self.cache)
        self.token.copy_(logits.argmax(-1, keepdim=True).repeat(self.subject.sequences, 1))
        return logits

    def prepare(self) -> None:
        """Compile and record, as the levers say."""
        self.begin()
        for _ in range(WARMUP if self.levers.compiled or self.levers.graphs else 1):
            self.step()
        if self.levers.graphs:
            self.call, self.captured = captured(self.step, self.begin), True
        self.begin()

    def steps(self, count: int) -> None:
        """So many tokens from where it is."""
        for _ in range(count):
            self.call()

    def evidence(self) -> None:
        """Wrong where a lever is on and has changed nothing."""
        kinds = {type(layer).__name__ for layer in self.cache.layers}
        require_levers(
            self,
            attention=self.model.config._attn_implementation == attention_of(self.levers),
            cache=not self.levers.cache or kinds == {"KVLayer"},
        )


def require_levers(work: Any, **checks: bool) -> None:
    """Wrong where one of the checks, recording or quantization of the work is not as its levers say."""
    checks["graphs"] = work.captured == work.levers.graphs
    checks["weights"] = bool(work.levers.weights) == any(map(is_quantized, work.model.parameters()))
    if lost := [name for name, right in checks.items() if not right]:
        raise Wrong(f"{', '.join(lost)} did not change the model: the row would be of another rung")


def attention_of(levers: Levers) -> str:
    """The name of transformers' attention."""
    return "ao_lab" if levers.cache or levers.speculation else "sdpa" if levers.attention else "eager"


def is_quantized(parameter: Tensor) -> bool:
    """Whether a parameter is a weight in low precision."""
    return type(parameter.data) is not Tensor


def compiled(function: Any, device: str) -> Any:
    """The function compiled with the library's options; on a CPU traced alone, since compilers of C++ take minutes."""
    if device == "cpu":
        return torch.compile(function, dynamic=False, backend="aot_eager")
    return torch.compile(function, dynamic=False, options=ao_lab.compile_options())


def captured(call: Callable[[], Any], begin: Callable[[], None]) -> Callable[[], Any]:
    """A replay of the call, recorded from the state that `begin` leaves."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        begin()
        for _ in range(WARMUP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    begin()
    graph = torch.cuda.CUDAGraph()
    with recorded(graph):
        outputs = call()

    return partial(replayed, graph, outputs, call)


def replayed(graph: torch.cuda.CUDAGraph, outputs: Any, call: Callable[[], Any]) -> Any:
    """The outputs of a replay. call: holds the tensors that the graph reads, whose memory would be another's otherwise."""
    graph.replay()
    return outputs
