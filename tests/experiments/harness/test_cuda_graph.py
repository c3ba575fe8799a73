"""Recording CUDA graphs: what must not happen meanwhile."""

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import experiments
from experiments.harness import cuda_graph as capture
from experiments.harness.cuda_graph import compiled_runs, demangled, joined, launched, recorded, short
from experiments.harness.measuring import Wrong

# Names of kernels as rows have them.


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blocks_kernel", "blocks_kernel"),
        ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT", "nvjet_sm90_tst_64x8_64x16_2x1_v_bz_TNT"),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
            "at::native::reduce_kernel",
        ),
        ("void (anonymous namespace)::copy<int>(int*)", "copy"),
        ("_ZN2at6native13reduce_kernelILi512EEEvT_", "at::native::reduce_kernel"),
        ("x" * 99, "x" * 60),
    ],
)
def test_names_lose_types_and_arguments(name, words):
    assert short(name) == words


def test_names_of_c_plus_plus_are_demangled_and_others_stay():
    assert demangled("_ZN3foo3barEi") == "foo::bar(int)"
    assert demangled("_Zbroken") == "_Zbroken"
    assert demangled("sm90_w4a16_gemv") == "sm90_w4a16_gemv"


def test_many_kernels_are_counted():
    assert joined([]) == ""
    assert joined(["a", "b", "c"]) == "a + b + c"
    assert joined(["a", "b", "c", "d", "e"]) == "a + b + c + 2 more"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_called():
    assert launched(lambda: pytest.fail("called")) == ""


def test_a_call_whose_kernels_cannot_be_named_says_so(monkeypatch, capsys):
    """Its times are kept, and the column stays empty."""

    def refused(call):
        raise AttributeError("no cuFuncGetName")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("experiments.harness.cuda_graph.captured", refused)
    assert launched(lambda: None) == ""
    assert "the kernels of a call are not named: AttributeError: no cuFuncGetName" in capsys.readouterr().err


# Rows are called compiled where a compiled program runs.


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


def run(net):
    net.compile(backend="eager")
    x = torch.ones(2, 8)
    net(x)
    with compiled_runs():
        net(x)


def test_a_program_of_another_model_is_one():
    torch.compiler.reset()
    run(Layer())
    run(Layer())


def test_what_runs_as_it_is_is_no_row():
    """torch's own containers run operation by operation, without a word."""
    torch.compiler.reset()
    with pytest.raises(Wrong, match="nothing was compiled"):
        run(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    with compiled_runs(wanted=False):
        nn.Linear(8, 8)(torch.ones(2, 8))


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
