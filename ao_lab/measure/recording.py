"""Recording a CUDA graph while nothing else of the process touches the GPU in a way that would break the recording."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """`torch.cuda.graph` that other threads and the collector are kept from breaking, as far as that is possible.

    In CUDA's global mode a forbidden call of any thread, say of JAX, invalidates the recording; now only one that waits for the
    recording stream does. A collection in its middle may destroy older graphs and their memory, and comes at any time where
    torch, as 2.11, has not collected just before. A recording that breaks all the same raises torch's error, and what is
    recorded or drawn after it works, on the stream of before, unless the GPU itself is lost.
    """
    collects, before = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        # torch comes back from a broken recording on the recording's stream.
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):
            _mend_generator()
        raise
    finally:
        if collects:
            gc.enable()


def _mend_generator() -> None:
    """A broken recording leaves torch's random generator in the belief that it goes on; the end of a whole one ends that."""
    mark = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        mark.add_(1)
