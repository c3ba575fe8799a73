"""Generating with a model of transformers by a loop of our own, beside the library's `generate()`.

The loop is lean: greedy, one cache of fixed length, the model's own forward, nothing that looks at a token on the host. On a
GPU the step is captured in a CUDA graph, so that the host only launches; a model with sliding windows that are shorter than
the text decides on the host what its cache does, and is not captured. Nothing is compiled, so that a step has the bits of the
model's own forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ao_lab.cli.terminal import say
from ao_lab.install.extras import needed
from ao_lab.measure.memory import synchronize
from ao_lab.measure.recording import recorded

#: Steps before a capture, in which kernels and libraries allocate what they need.
WARMUP = 3


class OwnLoop:
    """Greedy generation of `new` tokens after a prompt, token ids (batch, length), on the model's device."""

    def __init__(self, model: nn.Module, prompt: Tensor, new: int) -> None:
        self.model: Any = model
        self.prompt, self.new = prompt, new
        self.length = prompt.shape[1] + new
        self.cache = needed("transformers").StaticCache(config=self.model.config, max_cache_len=self.length)
        self.token = torch.zeros_like(prompt[:, :1])
        #: Whether a step is replayed from a CUDA graph.
        self.captured = False
        self.replay: Callable[[], Tensor] = self.step

    @property
    def capturable(self) -> bool:
        """Whether a step is the same launches at every position."""
        layers = self.cache.layers
        short = any(layer.is_sliding and layer.max_cache_len < self.length for layer in layers)
        return bool(self.prompt.is_cuda) and not short

    @torch.no_grad()
    def prefill(self) -> Tensor:
        """Read the prompt into an empty cache; logits of its last token (batch, vocabulary), and the next token in `token`."""
        if all(layer.is_initialized for layer in self.cache.layers):
            self.cache.reset()
        return self._forward(self.prompt)

    @torch.no_grad()
    def step(self) -> Tensor:
        """Logits (batch, vocabulary) of one more token, which is in `token` afterwards."""
        return self._forward(self.token)

    def _forward(self, ids: Tensor) -> Tensor:
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[:, -1]
        self.token.copy_(logits.argmax(-1, keepdim=True))
        return logits

    def prepare(self) -> None:
        """Warm up, and capture the step where it can be; where a model waits for the GPU in it, that is said, and it is not."""
        self.prefill()
        if not self.capturable:
            self.step()
            return
        try:
            self._capture()
        except RuntimeError as error:
            say(f"a step of {type(self.model).__name__} is not captured in a CUDA graph: {error}")

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(min(WARMUP, self.new - 1)):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.prefill()
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            logits = self.step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        self.replay, self.captured = replay, True

    @torch.no_grad()
    def generate(self) -> tuple[float, float, Tensor]:
        """Seconds to the first token, seconds of the other tokens together, and all new tokens (batch, new)."""
        synchronize(self.prompt.device)
        started = time.perf_counter()
        self.prefill()
        synchronize(self.prompt.device)
        first = time.perf_counter()
        tokens = [self.token.clone()]
        for _ in range(self.new - 1):
            self.replay()
            tokens.append(self.token.clone())
        synchronize(self.prompt.device)
        return first - started, time.perf_counter() - first, torch.cat(tokens, 1)
