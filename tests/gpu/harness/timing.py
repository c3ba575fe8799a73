"""Times on a GPU: rounds of all methods follow each other, so that a slow spell of the clock hits all of them.

A method is a call for each of several buffers that exceed the second-level cache together, captured as one CUDA graph, so that
reads come from the memory and the host is not seen. A row has the median of each method, its 10th and 90th percentile, and what
the methods that failed said.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
Methods = Mapping[str, Sequence[Call]]
Graph = tuple[torch.cuda.CUDAGraph, int]
#: Bytes that buffers in turn have together at least, three times the cache of an H200, and the most of them.
COLD, MOST = 200e6, 64
ROUNDS = 9
#: Rounds of calls that are not captured, before those that count.
WARM = 2


def rate() -> float:
    """Bytes a microsecond that a copy reaches: with them a row's floor, every byte once."""
    return 4.2e6 if "H200" in torch.cuda.get_device_name() else 3.0e6


def several(make: Callable[[], Any], size: float, cold: float = COLD) -> list[Any]:
    """Buffers in turn; size: bytes of one."""
    return [make() for _ in range(min(MOST, int(cold / size) + 2))]


def captured(calls: Sequence[Call]) -> Graph:
    """All calls in one graph, and how many they are; each ran before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph, len(calls)


def elapsed(call: Call) -> float:
    """Microseconds between events around a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def measured(methods: Methods, rounds: int = ROUNDS) -> dict[str, Any]:
    """Parts of a row: microseconds of a call by method, as graphs in turn; a method that fails is left out and named."""
    graphs, failed = dict[str, Graph](), dict[str, str]()
    for name, calls in methods.items():
        try:
            graphs[name] = captured(calls)
        except Exception as error:  # noqa: BLE001  others go on
            failed[name] = f"{type(error).__name__}: {str(error)[-200:]}"
    took: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, count) in graphs.items():
            took[name].append(elapsed(graph.replay) / count)
    return summed_up(took) | ({"failed": failed} if failed else {})


def launched(calls: Mapping[str, Call], rounds: int = ROUNDS) -> dict[str, Any]:
    """The same of calls that are launched one by one, each behind a wait of the GPU that hides the host."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + WARM):
        for name, call in calls.items():
            torch.cuda._sleep(200_000)
            us = elapsed(call)
            if turn >= WARM:
                took[name].append(us)
    return summed_up(took)


def summed_up(took: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians, and 10th and 90th percentiles."""
    ordered = {name: sorted(times) for name, times in took.items()}
    spread = {
        name: (round(each[len(each) // 10], 2), round(each[-1 - len(each) // 10], 2))
        for name, each in ordered.items()
    }
    return {
        "us": {name: round(statistics.median(each), 2) for name, each in ordered.items()},
        "spread": spread,
    }


def host_time(call: Call, calls: int = 300) -> float:
    """Microseconds of the host for the quickest of calls whose launches it does not wait for."""
    took = []
    for _ in range(calls):
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return min(took) * 1e6


__all__ = [
    "COLD",
    "ROUNDS",
    "Call",
    "captured",
    "elapsed",
    "host_time",
    "launched",
    "measured",
    "rate",
    "several",
]
