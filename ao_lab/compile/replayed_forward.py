"""A model's forward on inputs of one shape, again and again, as one CUDA graph: what evaluates a model window by window takes.

Launching the layers of one window takes the host longer than a GPU computes a model of a few billion parameters: a graph
launches all of them at once, with the kernels and so the bits of the eager forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ao_lab.compile.captured_forward import ONE_AT_A_TIME, TRIES, CUDAGraphs

LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """A recorded forward: where it reads ids, what replays it, and the logits that each replay overwrites."""

    ids: Tensor
    replay: Callable[[], None]
    logits: Tensor


class ReplayedForward:
    """Calls a function of one tensor; on a GPU, once it has not waited for the device in a call, by a recorded CUDA graph.

    call: from token ids (batch, tokens) to logits (batch, tokens, vocabulary), with the same kernels for all ids of a shape. A
    result is valid until the next call, which overwrites it. A model that waited in each of TRIES calls, as those do that route
    tokens on the host, and one that cannot be recorded, which is logged, are called eagerly; so are ids of another shape.
    """

    def __init__(self, call: Callable[[Tensor], Tensor], graphs: CUDAGraphs | None = None) -> None:
        self.call, self.graphs = call, graphs or CUDAGraphs()
        #: Calls that may still be tried; whether the host waited in the last one.
        self.left, self.waits = TRIES, True
        self.record: Record | None = None

    def __call__(self, ids: Tensor) -> Tensor:
        """The logits of ids."""
        if ids.device.type != self.graphs.device:
            return self.call(ids)
        if self.waits and self.left:
            return self._tried(ids)
        if self.record is None and self.left:
            self._take(ids)
        if self.record is None or (self.record.ids.shape, self.record.ids.device) != (ids.shape, ids.device):
            return self.call(ids)
        self.record.ids.copy_(ids)
        self.record.replay()
        return self.record.logits

    def _tried(self, ids: Tensor) -> Tensor:
        """An eager call, and whether the host waited in it, as it does while kernels are compiled."""
        self.left -= 1
        with ONE_AT_A_TIME:
            logits: Tensor
            logits, self.waits = self.graphs.watched(lambda: self.call(ids))
        if not self.waits:
            self.left = TRIES
        return logits

    def _take(self, ids: Tensor) -> None:
        """Record a call on such ids; where that fails, none is tried again."""
        given = torch.empty_like(ids).copy_(ids)
        try:
            with ONE_AT_A_TIME:
                self.record = Record(given, *self.graphs.record(lambda: self.call(given), ids.device))
        except RuntimeError as error:
            LOGGER.info("evaluated eagerly, since the forward could not be recorded: %s", error)
            self.left = 0
