"""Times of calls as CUDA graphs, in turn: a graph has a call for each of several inputs, so that reads come from memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
Graph = tuple[torch.cuda.CUDAGraph, int]


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


def in_turn(graphs: dict[str, Graph], rounds: int) -> dict[str, float]:
    """Median microseconds of a call, by name: rounds of all graphs follow each other."""
    took: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, (graph, count) in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            took[name].append(start.elapsed_time(end) * 1e3 / count)
    return {name: statistics.median(times) for name, times in took.items()}
