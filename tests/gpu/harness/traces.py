"""What a trace of torch.profiler says of some steps: GPU work and its gaps, inside and between graphs, and the host by names.

Events are those of a Chrome trace, times in microseconds; results are microseconds a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

Event = dict[str, Any]
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
STEP = "ProfilerStep#"


def complete(trace: dict[str, Any]) -> list[Event]:
    """Events that have a duration, in order of their begin, longer ones first."""
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "cat" in event]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def end(event: Event) -> float:
    """When it ended."""
    return float(event["ts"] + event["dur"])


def busy(events: Sequence[Event]) -> float:
    """How long at least one of them ran; they are in order."""
    total, until = 0.0, float("-inf")
    for event in events:
        total += max(0.0, end(event) - max(until, event["ts"]))
        until = max(until, end(event))
    return total


def span(events: Sequence[Event]) -> float:
    """From the first begin to the last end."""
    return max(map(end, events)) - events[0]["ts"] if events else 0.0


def gpu_times(events: Sequence[Event], steps: int) -> dict[str, float]:
    """GPU work a step. Kernels that overlap (dependent launches) count once in `busy`, each in `kernels_us`.

    graph_*: of the launches of graphs: how many, from first begin to last end, and what of that no kernel ran; between: from
    the end of a graph to the begin of the next one (of each, not a step). outside_*: work that no graph launched.
    """
    work = [event for event in events if event["cat"] in GPU]
    launched = {correlation(e) for e in events if e["name"].startswith("cudaGraphLaunch")} - {None}
    graphs: dict[Any, list[Event]] = defaultdict(list)
    for event in work:
        if correlation(event) in launched:
            graphs[correlation(event)].append(event)
    spans = [span(graph) for graph in graphs.values()]
    inside = [busy(graph) for graph in graphs.values()]
    outside = [event for event in work if correlation(event) not in launched]
    order = sorted(graphs.values(), key=lambda graph: graph[0]["ts"])
    between = [after[0]["ts"] - max(map(end, before)) for before, after in pairwise(order)]
    return {
        "count": len(work) / steps,
        "kernels_us": sum(event["dur"] for event in work) / steps,
        "busy_us": busy(work) / steps,
        "span_us": span(work) / steps,
        "graphs": len(graphs) / steps,
        "graph_count": sum(map(len, graphs.values())) / steps,
        "graph_span_us": sum(spans) / steps,
        "graph_busy_us": sum(inside) / steps,
        "graph_idle_us": (sum(spans) - sum(inside)) / steps,
        "between_us": sum(between) / max(len(between), 1),
        "outside_us": sum(event["dur"] for event in outside) / steps,
        "outside_count": len(outside) / steps,
    }


def correlation(event: Event) -> Any:
    """What a launch and the GPU work that it made share."""
    return event.get("args", {}).get("correlation")


def kernels(events: Iterable[Event], steps: int) -> dict[str, dict[str, float]]:
    """GPU work by name: launches and microseconds a step."""
    return _by_name((event for event in events if event["cat"] in GPU), steps)


def host(events: Iterable[Event], steps: int) -> dict[str, dict[str, float]]:
    """The host by name: calls, microseconds a step, and those that are in no event inside (`self_us`)."""
    chosen = [event for event in events if event["cat"] in HOST and not event["name"].startswith(STEP)]
    found = _by_name(chosen, steps)
    for name, time in own_times(chosen).items():
        found[name]["self_us"] = time / steps
    return found


def own_times(events: Sequence[Event]) -> dict[str, float]:
    """Microseconds of each name without those of the events inside, which a thread's stack tells."""
    own: dict[str, float] = defaultdict(float)
    stacks: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        stack = stacks[event.get("tid")]
        while stack and end(stack[-1]) <= event["ts"]:
            stack.pop()
        if stack:
            own[stack[-1]["name"]] -= event["dur"]
        own[event["name"]] += event["dur"]
        stack.append(event)
    return dict(own)


def _by_name(events: Iterable[Event], steps: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"count": 0.0, "us": 0.0})
    for event in events:
        found[event["name"]]["count"] += 1 / steps
        found[event["name"]]["us"] += event["dur"] / steps
    return dict(found)


__all__ = ["busy", "complete", "gpu_times", "host", "kernels", "own_times", "span"]
