"""Times of several methods in turn: CUDA graphs over buffers that exceed the second-level cache; medians and spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Bytes that all buffers of a method have together: several times the cache.
COLD = 1 << 28


@dataclass
class Method:
    """A name, and what runs once on the i-th of its buffers."""

    name: str
    call: Callable[[int], Any]
    replay: Callable[[], Any] | None = None
    how: str = ""
    error: str = ""


def prepare(method: Method, count: int) -> None:
    """Warm up and capture `count` calls as a graph; where that is refused, calls one after the other."""
    try:
        for i in range(count):
            method.call(i)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  one that fails is reported, others go on
        method.error = f"{type(error).__name__}: {str(error)[:300]}"
        return
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(count):
                method.call(i)
        method.replay, method.how = graph.replay, "graph"
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        torch.cuda.synchronize()
        method.replay = lambda: [method.call(i) for i in range(count)]
        method.how = f"eager ({type(error).__name__})"


def times(methods: Sequence[Method], count: int, seconds: float) -> dict[str, tuple[float, float, float]]:
    """(median, 10th, 90th percentile) microseconds of a call of each method, in turn until `seconds` are over."""
    running = [method for method in methods if method.replay is not None]
    took: dict[str, list[float]] = {method.name: [] for method in running}
    end = time.monotonic() + seconds
    rounds = 0
    while running and (rounds < 5 or (time.monotonic() < end and rounds < 200)):
        rounds += 1
        for method in running:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            method.replay()  # type: ignore[misc]
            stop.record()
            stop.synchronize()
            took[method.name].append(start.elapsed_time(stop) * 1e3 / count)
    return {name: _summary(values) for name, values in took.items()}


def _summary(values: list[float]) -> tuple[float, float, float]:
    values = sorted(values)
    return statistics.median(values), values[len(values) // 10], values[-1 - len(values) // 10]


def host_time(call: Callable[[], Any], calls: int = 500) -> float:
    """Microseconds that the host takes for a call whose launch it does not wait for."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 5):
            call()
        best = min(best, (time.perf_counter() - start) / (calls // 5) * 1e6)
    torch.cuda.synchronize()
    return best


__all__ = ["COLD", "Method", "host_time", "prepare", "times"]
