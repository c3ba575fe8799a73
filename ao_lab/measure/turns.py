"""Calls that are timed in turn in one process: by CUDA events, one by one or replayed from CUDA graphs, or by the host's clock.

What makes numbers comparable: what is compared is timed in turn, round by round, so that a drift of the clock reaches all; the
inputs rotate over sets that together exceed three times the L2 cache, so that none is found there; a span holds so many calls
that the cost of its two events disappears; work is queued before the first event, so that the GPU never waits for the host; and
the first call is timed again at the end of each round, which says how far to trust the rest.

A CUDA graph is recorded while nothing else of the process touches the GPU in a way that would break it (`recorded`).
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


@contextmanager
def recorded(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """`torch.cuda.graph` that other threads and the collector are kept from breaking, as far as that is possible.

    In CUDA's global mode a forbidden call of any thread, say of JAX, invalidates the recording; now only one that waits for the
    recording stream does. A collection in its middle may destroy older graphs and their memory, and comes at any time where
    torch, as 2.11, has not collected just before. A recording that breaks all the same raises torch's error, and what is
    recorded or drawn after it works, on the stream of before, unless the GPU itself is lost.
    """
    collects, before = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    except RuntimeError:
        # torch comes back from a broken recording on the recording's stream.
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):
            _mend_generator()
        raise
    finally:
        if collects:
            gc.enable()


def _mend_generator() -> None:
    """A broken recording leaves torch's random generator in the belief that it goes on; the end of a whole one ends that."""
    mark = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        mark.add_(1)


Call = Callable[[], Any]
#: Seconds by name, a round each.
Times = dict[str, list[float]]
#: An H200's L2, where torch does not say.
L2_BYTES = 60_000_000
#: Written between calls to empty the L2: several times its size.
FLUSH_BYTES = 256 * 2**20
#: How much slower than one thread all threads of a CPU may be before work is timed with one thread instead.
SLOWER = 2.0
#: The name under which the first call of a round is timed once more, and the metric of that over its first time.
AGAIN, REPEAT = "again", "time again over the first"


class NoDevice(OSError):
    """There is no GPU to time on."""


class Stopwatch(Protocol):
    """What times calls; `CudaWatch` on a GPU, a script in tests."""

    def seconds(self, calls: Sequence[Call], *, cold: bool = False) -> list[float]:
        """Device seconds of each call, in turn; with `cold` the L2 is emptied before each."""

    def sync(self) -> None:
        """Wait until all work is done."""


class Watch(Stopwatch, Protocol):
    """One that has CUDA graphs too."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """One call that does all of these, replayed from a CUDA graph."""


class CudaWatch:
    """A watch by CUDA events on the current device."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise NoDevice("kernels are timed on a GPU and torch sees none; `ao-lab doctor` says why")
        self._scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def sync(self) -> None:
        """Wait until all work is done."""
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Write more than the L2 holds."""
        self._scratch.zero_()

    def capture(self, calls: Sequence[Call]) -> Call:
        """Run once beside the main stream, as capture asks, then record."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with recorded(graph, stream):
            for call in calls:
                call()
        return graph.replay

    def seconds(self, calls: Sequence[Call], *, cold: bool = False) -> list[float]:
        """Events around each call; the flush before the first keeps the GPU busy while the host queues the rest.

        Where the L2 need not be cold the first call runs once before: otherwise it alone would wait for what the flush left
        there to be written back, 15 us, which is much for a small kernel.
        """
        marks = [(_mark(), _mark()) for _ in calls]
        self.flush()
        if not cold:
            calls[0]()
        for number, (call, (start, end)) in enumerate(zip(calls, marks, strict=True)):
            if cold and number:
                self.flush()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in marks]


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostWatch:
    """A stopwatch by the host's clock, for devices whose work is done when a call returns."""

    def sync(self) -> None:
        """Nothing to wait for."""

    def seconds(self, calls: Sequence[Call], *, cold: bool = False) -> list[float]:
        """Seconds of each call, in turn."""
        times = []
        for call in calls:
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return times

    def capture(self, calls: Sequence[Call]) -> Call:
        """One call that makes all of these."""
        return in_turn(calls)


@dataclass(frozen=True)
class Uncaptured:
    """A watch that captures nothing: what looks at the host is in no CUDA graph, and is called one by one."""

    watch: Watch

    def sync(self) -> None:
        """Wait until all work is done."""
        self.watch.sync()

    def seconds(self, calls: Sequence[Call], *, cold: bool = False) -> list[float]:
        """Seconds of each call."""
        return self.watch.seconds(calls, cold=cold)

    def capture(self, calls: Sequence[Call]) -> Call:
        """One call that makes all of these."""
        return in_turn(calls)


def watch_of(device: str) -> Watch:
    """The watch of a device."""
    return CudaWatch() if device == "cuda" else HostWatch()


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """torch computes with so many threads of a CPU meanwhile; None: with as many as it does."""
    threads = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        if count is not None:
            torch.set_num_threads(threads)


def timed_threads(device: str | torch.device, call: Call) -> int | None:
    """With how many threads of a CPU a call, and what it is compared with, is timed; None on other devices.

    All that torch uses, or one where all together take more than SLOWER times as long for the call as one alone: they wait
    for each other or for other programs then. The quicker of two calls counts, after one that warms up.
    """
    threads = torch.get_num_threads()
    if torch.device(device).type != "cpu":
        return None
    if threads == 1:
        return 1
    watch = HostWatch()
    call()
    together = min(watch.seconds([call] * 2))
    with with_threads(1):
        alone = min(watch.seconds([call] * 2))
    return 1 if together > SLOWER * alone else threads


@dataclass(frozen=True)
class Plan:
    """How long to look: rounds that count and rounds before them, seconds that a span should last, its most calls.

    seconds: what all rounds may take; what is too slow for that is looked at in fewer rounds, but in `fewest`. cold: a span
    is one call, after the L2 was emptied, instead of a rotation over input sets.
    """

    rounds: int = 40
    warmup: int = 3
    span: float = 400e-6
    most_calls: int = 64
    seconds: float = 2.0
    fewest: int = 5
    cold: bool = False


@dataclass(frozen=True)
class Span:
    """Calls that are timed together: how many they are, as a graph and one by one."""

    count: int
    graph: Call
    eager: Call


#: In a second.
UNITS = {"ms": 1e3, "us": 1e6}


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, 20 and 80 percent quantiles."""

    median: float
    low: float
    high: float

    def values(self, unit: str = "ms") -> dict[str, tuple[float, str]]:
        """As metrics of rows."""
        seconds = {"time": self.median, "time, 20%": self.low, "time, 80%": self.high}
        return {name: (value * UNITS[unit], unit) for name, value in seconds.items()}


def summary(times: Sequence[float]) -> Timing:
    """Median and quantiles."""
    low, middle, high = np.quantile(times, (0.2, 0.5, 0.8))
    return Timing(float(middle), float(low), float(high))


def input_sets(set_bytes: float, cache_bytes: int = L2_BYTES, most: int = 8) -> int:
    """How many input sets exceed three times the cache; one where `most` would not, because then the work is small."""
    wanted = max(1, math.ceil(3 * cache_bytes / set_bytes))
    return wanted if wanted <= most else 1


def cache_bytes() -> int:
    """The L2 of this GPU, as torch gives it."""
    if not torch.cuda.is_available():
        return L2_BYTES
    return (
        int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0))
        or L2_BYTES
    )


def prepare(watch: Watch, calls: Sequence[Call], plan: Plan) -> Span:
    """Compile and warm up, see how long the calls take, and make a span of them, each input set as often as the others."""
    for call in (*calls, *calls):
        call()
    watch.sync()
    if plan.cold:
        return Span(1, watch.capture(calls[:1]), calls[0])
    once = min(watch.seconds([in_turn(calls)] * 2))
    repeats = max(1, min(math.ceil(plan.span / max(once, 1e-9)), plan.most_calls // len(calls)))
    work = list(calls) * repeats
    return Span(len(work), watch.capture(work), in_turn(work))


def in_turn(calls: Sequence[Call]) -> Call:
    """One call that makes all of these."""

    def run() -> None:
        for call in calls:
            call()

    return run


def rounds_of(plan: Plan, once: float) -> int:
    """How many rounds the plan's seconds allow, at least its fewest, at most what it asks for."""
    allowed = int(plan.seconds / once) if once > 0 else plan.rounds
    return min(plan.rounds, max(plan.fewest, allowed))


def in_rounds(
    names: Iterable[str], plan: Plan, one_round: Callable[[], tuple[float, Sequence[float]]]
) -> Times:
    """Seconds of each name, round by round, and of the first once more under AGAIN. one_round: how long it took, and the
    seconds of all of these in turn."""
    warm = [one_round()[0] for _ in range(plan.warmup)]
    times: Times = {name: [] for name in (*names, AGAIN)}
    for _ in range(rounds_of(plan, min(warm, default=0.0))):
        for name, seconds in zip(times, one_round()[1], strict=True):
            times[name].append(seconds)
    return times


def first_again(names: Iterable[str]) -> list[str]:
    """The order of a round: all names, then the first once more."""
    names = list(names)
    return [*names, names[0]]


def a_call(spans: Mapping[str, Span], order: Sequence[str], seconds: Sequence[float]) -> list[float]:
    """Seconds a call of the spans of a round."""
    return [passed / spans[name].count for name, passed in zip(order, seconds, strict=True)]


def interleaved(watch: Watch, spans: Mapping[str, Span], plan: Plan, *, graph: bool = True) -> Times:
    """Seconds a call of every span, round by round in turn, and of the first once more under AGAIN."""
    order = first_again(spans)
    runs = [spans[name].graph if graph else spans[name].eager for name in order]

    def one_round() -> tuple[float, Sequence[float]]:
        seconds = watch.seconds(runs, cold=plan.cold)
        return sum(seconds), a_call(spans, order, seconds)

    return in_rounds(spans, plan, one_round)


def slow_threads(watch: Watch, spans: Mapping[str, Span], times: Mapping[str, Sequence[float]]) -> list[str]:
    """Of the layers of `times` those that all threads of a CPU compute far more slowly than one: the threads wait."""
    if torch.get_num_threads() == 1:
        return []
    layers = {name: spans[name] for name in times if name != AGAIN}
    with with_threads(1):
        alone = {name: min(watch.seconds([one.eager] * 3)) / one.count for name, one in layers.items()}
    return [name for name in layers if summary(times[name]).median > SLOWER * alone[name]]
