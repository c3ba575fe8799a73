"""Timing on a scripted watch: turns, medians, spans, rotation, events around calls; and recordings that nothing breaks.

Peak memory on a CPU: what earlier work has left to the allocator is not taken for free.
"""

import ctypes
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import experiments
from ao_lab.measure import turns
from ao_lab.measure import turns as capture
from ao_lab.measure.memory import Peak, most_allocated, resident
from ao_lab.measure.turns import HostWatch, recorded, timed_threads, with_threads
from experiments.harness.bench import spread
from tests.experiments.harness.tiny import FakeWatch

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
    assert found == set()


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
        name: turns.Span(count, lambda name=name: order.append(name), list)
        for name, count in (("a", 1), ("b", 4))
    }
    times = turns.interleaved(watch, spans, turns.Plan(rounds=3, warmup=2))
    assert order == ["a", "b", "a"] * 5
    # The warm-up is dropped, and a span of four calls is four calls.
    assert times == {"a": [4.0] * 3, "b": [2.0] * 3, "again": [6.0] * 3}
    assert spread(times["a"], times["again"]) == 0.5


def test_what_is_slow_is_looked_at_less_often():
    plan = turns.Plan(rounds=40, seconds=2.0, fewest=5)
    assert [turns.rounds_of(plan, once) for once in (0.0, 0.001, 0.1, 10.0)] == [40, 40, 20, 5]


def test_medians_and_quantiles():
    made = turns.summary([float(value) for value in range(11)])
    assert (made.low, made.median, made.high) == (2.0, 5.0, 8.0)
    # One slow call moves no median.
    assert turns.summary([1.0] * 30 + [1e9]).median == 1.0


def test_spans_hold_every_input_set_equally_often():
    calls = [lambda: None] * 3
    watch = FakeWatch(iter([99.0, 30e-6]))
    span = turns.prepare(watch, calls, turns.Plan(span=100e-6, most_calls=64))
    assert (span.count, watch.captured) == (12, [12])
    few = turns.prepare(FakeWatch(iter([1e-6] * 2)), calls, turns.Plan(span=1.0, most_calls=64))
    assert few.count == 63
    cold = turns.prepare(FakeWatch(), calls, turns.Plan(cold=True))
    assert cold.count == 1


def test_inputs_rotate_over_three_times_the_cache():
    large, larger = 2 * 16384 * 4096, 2 * 16384 * 14336
    assert turns.input_sets(large, 60_000_000) == 2
    assert turns.input_sets(larger, 60_000_000) == 1
    assert turns.input_sets(large / 4, 60_000_000) == 6
    # A small tensor cannot leave the cache, and need not.
    assert turns.input_sets(2 * 16 * 4096, 60_000_000) == 1
    for size in (large, larger, large / 4):
        assert turns.input_sets(size, 60_000_000) * size > 3 * 60_000_000


def test_there_is_no_watch_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(turns.NoDevice, match="doctor"):
        turns.CudaWatch()


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
    watch = object.__new__(turns.CudaWatch)
    log = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("sync"))
    monkeypatch.setattr(turns.CudaWatch, "flush", lambda self: log.append("flush"))
    calls = [lambda: log.append("a"), lambda: log.append("b")]
    # elapsed_time is in milliseconds.
    assert watch.seconds(calls) == [1e-3, 1e-3]
    # The first once more before, to meet what the flush left.
    assert log == ["flush", "a", "a", "b", "sync"]
    log.clear()
    watch.seconds(calls, cold=True)
    assert log == ["flush", "a", "flush", "b", "sync"]


def test_what_tensors_take_is_their_bytes():
    """Exactly, at the same time and beyond what was there before; what is given back does not count twice."""

    def work():
        first = torch.ones(1000)
        del first
        kept = torch.ones(2000)
        return kept, torch.ones(500)

    assert most_allocated(torch.device("cpu"), work) == 4 * 2500
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert most_allocated(torch.device("cpu"), work) is None


#: Elements of a block that glibc takes from its heap: 64 kB.
BLOCK = 16384


@pytest.mark.skipif(resident("VmHWM") is None, reason="Linux says what is resident")
def test_what_the_allocator_kept_of_earlier_work_counts():
    blocks = [torch.ones(BLOCK) for _ in range(1000)]
    last = torch.ones(64)  # behind them, so that the heap does not shrink by itself
    del blocks
    peak = Peak(torch.device("cpu"))
    peak.begin()
    held = [torch.ones(BLOCK) for _ in range(200)]
    over = peak.over()
    assert over is not None
    assert over >= 0.8 * sum(one.nbytes for one in held)
    assert last.numel() == 64


def test_work_is_timed_with_one_thread_where_all_of_a_cpu_wait_for_each_other(monkeypatch):
    """Twice as long with all is the limit; what is called sees the threads, and those of before come back."""
    threads, seen = [2], []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    costs = {1: 1.0}
    monkeypatch.setattr(HostWatch, "seconds", lambda self, calls: [costs[threads[-1]] for call in calls])
    for together, count in ((0.6, 2), (2.0, 2), (2.1, 1)):
        costs[2] = together
        assert timed_threads("cpu", lambda: seen.append(threads[-1])) == count
        assert threads[-1] == 2
    assert seen == [2, 2, 2]
    threads.append(1)
    assert timed_threads("cpu", print) == 1
    assert timed_threads("cuda", print) is None
    with with_threads(None):
        assert threads[-1] == 1
