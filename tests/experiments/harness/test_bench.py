"""Timing on a scripted watch: turns, medians, spans, rotation, the host, and events around calls."""

import pytest
import torch

from experiments.harness import bench
from tests.experiments.harness.fake_watch import FakeWatch


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
