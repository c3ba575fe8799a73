"""Recording CUDA graphs: what must not happen meanwhile."""

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from experiments.capture import recorded

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def asked(monkeypatch):
    """What `torch.cuda.graph` is asked for, where there is none."""
    found: dict[str, Any] = {}

    @contextmanager
    def graph(graph, **options):
        found.update(options, graph=graph)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    return found


def test_no_garbage_is_collected_while_a_graph_is_recorded(asked):
    with recorded("graph", "stream"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert asked == {"graph": "graph", "stream": "stream", "capture_error_mode": "thread_local"}


def test_garbage_is_collected_again_after_an_error(asked):
    with pytest.raises(ValueError, match="no"), recorded("graph"):
        raise ValueError("no")
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(asked):
    gc.disable()
    try:
        with recorded("graph"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@needs_gpu
def test_a_forbidden_call_of_another_thread_does_not_break_a_recording():
    """A synchronization meanwhile; in CUDA's global mode it invalidates the recording."""
    x = torch.ones(1024, device="cuda")
    with ThreadPoolExecutor(1) as pool:
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            y = x + 1
            pool.submit(lambda: torch.ones(8, device="cuda").sum().item()).result()
    graph.replay()
    assert torch.equal(y.cpu(), torch.full((1024,), 2.0))
