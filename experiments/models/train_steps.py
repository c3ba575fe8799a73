"""Training steps, one after the other: on a GPU the launches of a step are captured in a CUDA graph once and replayed.

Quantization-aware training of a small model is limited by its host: 25 ms a step, of which the GPU works a few. A CUDA graph
removes the host and changes no kernel, order or input. Learning rates are in tensors, which the host fills between steps. Steps
that read values on the host cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.harness.cuda_graph import recorded

#: Steps before the capture, in which libraries, kernels and optimizers allocate their state.
WARMUP = 3


class Steps:
    """Calls `step(batch) -> loss`; batches are of one shape and dtype. captured: whether by a CUDA graph."""

    def __init__(self, step: Callable[[Tensor], Tensor], *, captured: bool) -> None:
        self.step, self.captured = step, captured
        self.taken = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch = self.loss = torch.empty(0)

    def __call__(self, batch: Tensor) -> Tensor:
        """The loss of one more step, in new memory."""
        if not self.captured:
            return self.step(batch)
        self.taken += 1
        if self.taken <= WARMUP:
            return self._warm_up(batch)
        self.graph = self.graph or self._capture(batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.loss.clone()

    def _warm_up(self, batch: Tensor) -> Tensor:
        """A step on a side stream, as capture requires of the steps before it."""
        stream, main = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            loss = self.step(batch)
        main.wait_stream(stream)
        return loss

    def _capture(self, batch: Tensor) -> torch.cuda.CUDAGraph:
        self.batch, graph = batch.clone(), torch.cuda.CUDAGraph()
        with recorded(graph):
            self.loss = self.step(self.batch)
        return graph


__all__ = ["WARMUP", "Steps"]
