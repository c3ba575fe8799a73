"""Recording CUDA graphs: what must not happen meanwhile."""

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import experiments
from experiments.harness import cuda_graph as capture
from experiments.harness.cuda_graph import recorded

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
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "main stream")
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


@pytest.mark.parametrize("lost", [False, True], ids=["a recording broke", "the GPU is lost"])
def test_a_broken_recording_is_told_of_and_mended(asked, monkeypatch, lost):
    done = []

    def mend():
        done.append("mended")
        if lost:
            raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch.cuda, "set_stream", done.append)
    monkeypatch.setattr(capture, "_mend_generator", mend)
    with pytest.raises(RuntimeError, match="captured"), recorded("graph"):
        raise RuntimeError("captured")
    assert done == ["main stream", "mended"]
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off(asked):
    gc.disable()
    try:
        with recorded("graph"):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_every_recording_of_an_experiment_is_kept_from_others():
    folder = Path(experiments.__file__).parent
    found = {path.name for path in folder.rglob("*.py") if "cuda.graph(" in path.read_text(encoding="utf-8")}
    assert found == {"cuda_graph.py"}


@needs_gpu
def test_a_broken_recording_breaks_nothing_after_it():
    """Reading a number waits for the stream that records, which no recording survives."""
    x = torch.ones(1024, device="cuda")
    with pytest.raises(RuntimeError, match="captur"), recorded(torch.cuda.CUDAGraph()):
        (x + 1).sum().item()
    assert gc.isenabled()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(8, device="cuda").lt(1).all()
    graph = torch.cuda.CUDAGraph()
    with recorded(graph):
        y = x + 1
    graph.replay()
    assert torch.equal(y.cpu(), torch.full((1024,), 2.0))


@needs_gpu
def test_a_forbidden_call_of_another_thread_does_not_break_a_recording():
    """An allocation past torch's allocator, which CUDA's global mode forbids every thread meanwhile."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    runtime = ctypes.CDLL(next(line.split()[-1] for line in maps if "libcudart" in line))
    x, address = torch.ones(1024, device="cuda"), ctypes.c_void_p()
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as pool, recorded(graph):
        y = x + 1
        code = pool.submit(runtime.cudaMalloc, ctypes.byref(address), ctypes.c_size_t(1 << 20)).result()
    graph.replay()
    assert (code, runtime.cudaFree(address)) == (0, 0)
    assert torch.equal(y.cpu(), torch.full((1024,), 2.0))
