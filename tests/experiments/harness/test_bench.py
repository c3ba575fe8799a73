"""Timing on a scripted watch: turns, medians, spans, rotation, the host, and events around calls."""

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
from experiments.harness import bench
from experiments.harness import cuda_graph as capture
from experiments.harness.cuda_graph import compiled_runs, demangled, joined, launched, recorded, short
from experiments.harness.measuring import Wrong
from tests.experiments.harness.tiny import FakeWatch

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


def test_calls_are_timed_in_turn_and_the_first_again():
    order = []
    watch = FakeWatch(iter([0.1, 0.2, 0.3] * 2 + [4.0, 8.0, 6.0] * 3))
    spans = {
        name: bench.Span(count, lambda name=name: order.append(name), list)
        for name, count in (("a", 1), ("b", 4))
    }
    times = bench.interleaved(watch, spans, bench.Plan(rounds=3, warmup=2))
    assert order == ["a", "b", "a"] * 5
    # The warm-up is dropped, and a span of four calls is four calls.
    assert times == {"a": [4.0] * 3, "b": [2.0] * 3, "again": [6.0] * 3}
    assert bench.spread(times["a"], times["again"]) == 0.5


def test_what_is_slow_is_looked_at_less_often():
    plan = bench.Plan(rounds=40, seconds=2.0, fewest=5)
    assert [bench.rounds_of(plan, once) for once in (0.0, 0.001, 0.1, 10.0)] == [40, 40, 20, 5]


def test_medians_and_quantiles():
    made = bench.summary([float(value) for value in range(11)])
    assert (made.low, made.median, made.high) == (2.0, 5.0, 8.0)
    # One slow call moves no median.
    assert bench.summary([1.0] * 30 + [1e9]).median == 1.0


def test_spans_hold_every_input_set_equally_often():
    calls = [lambda: None] * 3
    watch = FakeWatch(iter([99.0, 30e-6]))
    span = bench.prepare(watch, calls, bench.Plan(span=100e-6, most_calls=64))
    assert (span.count, watch.captured) == (12, [12])
    few = bench.prepare(FakeWatch(iter([1e-6] * 2)), calls, bench.Plan(span=1.0, most_calls=64))
    assert few.count == 63
    cold = bench.prepare(FakeWatch(), calls, bench.Plan(cold=True))
    assert cold.count == 1


def test_inputs_rotate_over_three_times_the_cache():
    large, larger = 2 * 16384 * 4096, 2 * 16384 * 14336
    assert bench.input_sets(large, 60_000_000) == 2
    assert bench.input_sets(larger, 60_000_000) == 1
    assert bench.input_sets(large / 4, 60_000_000) == 6
    # A small tensor cannot leave the cache, and need not.
    assert bench.input_sets(2 * 16 * 4096, 60_000_000) == 1
    for size in (large, larger, large / 4):
        assert bench.input_sets(size, 60_000_000) * size > 3 * 60_000_000


def test_the_host_is_timed_without_the_queue():
    now, log = [0.0], []

    def call(seconds=5e-6):
        now[0] += seconds
        log.append("call")

    def sync():
        now[0] += 1.0
        log.append("sync")

    calls = {"one": call, "other": lambda: call(7e-6)}
    found = bench.host_times(calls, sync, batches=20, batch=4, clock=lambda: now[0])
    assert found == {"one": pytest.approx(5e-6), "other": pytest.approx(7e-6)}
    assert log.count("call") == 2 * 84
    assert "".join(word[0] for word in log).find("c" * 9) == -1


def test_there_is_no_watch_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(bench.NoDevice, match="doctor"):
        bench.CudaWatch()


class FakeEvent:
    clock = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.clock += 1.0
        self.at = FakeEvent.clock

    def elapsed_time(self, end):
        return end.at - self.at


def test_the_gpu_watch_puts_events_around_each_call(monkeypatch):
    watch = object.__new__(bench.CudaWatch)
    log = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("sync"))
    monkeypatch.setattr(bench.CudaWatch, "flush", lambda self: log.append("flush"))
    calls = [lambda: log.append("a"), lambda: log.append("b")]
    # elapsed_time is in milliseconds.
    assert watch.seconds(calls) == [1e-3, 1e-3]
    # The first once more before, to meet what the flush left.
    assert log == ["flush", "a", "a", "b", "sync"]
    log.clear()
    watch.seconds(calls, cold=True)
    assert log == ["flush", "a", "flush", "b", "sync"]
