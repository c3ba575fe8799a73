"""Recording a CUDA graph while nothing else of the process touches the GPU in a way that would break the recording."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """`torch.cuda.graph` that other threads and the collector are kept from breaking, as far as that is possible.

    In CUDA's global mode a forbidden call of any thread, say of JAX, invalidates the recording; now only one that waits for the
    recording stream does. A collection in its middle may destroy older graphs and their memory, and comes at any time where
    torch, as 2.11, has not collected just before. One broken recording leaves torch's random generator unusable for the rest
    of the process.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


__all__ = ["recorded"]
