"""Timing on a GPU: several calls in turn in one process, by CUDA events, launched one by one and replayed from CUDA graphs.

What makes numbers comparable: the sides of a ratio are timed in turn, round by round, so that a drift of the clock reaches
both; the inputs rotate over sets that together exceed three times the L2 cache, so that none is found there; a span holds so
many calls that the cost of its two events disappears; work is queued before the first event, so that the GPU never waits for
the host; and the first call is timed again at the end of each round, which says how far to trust the rest.

Everything but `CudaWatch` is arithmetic on what a watch reports, and runs anywhere.

Times in a steady state: what is timed comes after calls of its own, until the GPU's clock is what these calls make of it.

Near its power limit a GPU slows down under products of bfloat16 and speeds up under casts, which takes a tenth of a second:
on an H200 bfloat16 at 16384 x 4096 x 14336 takes 7.4 ms a step after 15 ms of its own and 8.6 ms in a row of 70 ms, MXFP8
9.0 ms after other methods and 8.2 ms in such a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from experiments.harness.cuda_graph import recorded

#: Seconds that a method's own calls last before the one that is timed, and how many they are at least.
SETTLE, FEWEST_CALLS = 0.1, 2
#: Seconds without work before a single call, and how many such calls there are.
IDLE, SINGLE = 0.05, 5


def steady(
    watch: Watch, spans: Mapping[str, Span], plan: Plan, settle: float = SETTLE, *, graph: bool = True
) -> dict[str, list[float]]:
    """Seconds a call of every span, round by round in turn, and of the first once more under AGAIN, as
    `experiments.harness.bench.interleaved` has them; but each after spans of its own that last `settle` seconds. 0: none."""
    runs = {name: span.graph if graph else span.eager for name, span in spans.items()}
    before = {name: in_turn([run] * repeats(watch, run, settle)) for name, run in runs.items()}
    order = [*runs, next(iter(runs))]
    calls = [call for name in order for call in (before[name], runs[name])]
    warm = [sum(watch.seconds(calls)) for _ in range(plan.warmup)]
    times: dict[str, list[float]] = {name: [] for name in (*runs, AGAIN)}
    for _ in range(rounds_of(plan, min(warm, default=0.0))):
        passed = watch.seconds(calls)[1::2]
        for key, name, seconds in zip(times, order, passed, strict=True):
            times[key].append(seconds / spans[name].count)
    return times


def steady_eager(
    watch: Watch, spans: Mapping[str, Span], plan: Plan, settle: float = SETTLE
) -> dict[str, list[float]]:
    """As `steady` of launches one by one, where each method is over before the next one begins: launches that wait behind a
    slow method's would hide the host's time of the next, which then seems faster than it ever is alone."""
    runs = {name: span.eager for name, span in spans.items()}
    before = {name: in_turn([run] * repeats(watch, run, settle)) for name, run in runs.items()}
    order = [*runs, next(iter(runs))]

    def after_own(name: str) -> float:
        before[name]()
        watch.sync()
        return watch.seconds([runs[name]] * 2)[-1]

    def passed() -> list[float]:
        return list(map(after_own, order))

    warm = []
    for _ in range(plan.warmup):
        begin = time.perf_counter()
        passed()
        warm.append(time.perf_counter() - begin)  # of all calls, those before included
    times: dict[str, list[float]] = {name: [] for name in (*runs, AGAIN)}
    for _ in range(rounds_of(plan, min(warm, default=0.0))):
        for key, name, seconds in zip(times, order, passed(), strict=True):
            times[key].append(seconds / spans[name].count)
    return times


def repeats(watch: Watch, run: Call, settle: float) -> int:
    """How many calls last so many seconds, by two that are timed now; at least FEWEST."""
    if not settle:
        return 0
    once = min(watch.seconds([run] * 2))
    return max(FEWEST_CALLS, math.ceil(settle / max(once, 1e-6)))


def after_pause(
    watch: Watch, calls: Mapping[str, Call], idle: float = IDLE, sleep: Callable[[float], object] = time.sleep
) -> dict[str, list[float]]:
    """Seconds of SINGLE calls of each, in turn, each after all work was done and `idle` seconds without any: the other state,
    of a GPU that is cool and at its highest clock, with nothing in its L2, and launches not queued. idle 0: one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(SINGLE if idle else 1):
        for name, call in calls.items():
            watch.sync()
            sleep(idle)
            times[name] += watch.seconds([call], cold=True)
    return times


Call = Callable[[], Any]

#: An H200's L2, where torch does not say.
L2_BYTES = 60_000_000
#: Written between calls to empty the L2: several times its size.
FLUSH_BYTES = 256 * 2**20
#: The name under which the first call of a round is timed once more.
AGAIN = "again"


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
        stream = torch.cuda.Stream()
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
        marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
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


def watch_of(device: str) -> Watch:
    """The watch of a device."""
    return CudaWatch() if device == "cuda" else HostWatch()


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


@dataclass(frozen=True)
class Timing:
    """Seconds a call: median, 20 and 80 percent quantiles."""

    median: float
    low: float
    high: float


def input_sets(set_bytes: float, cache_bytes: int = L2_BYTES, most: int = 8) -> int:
    """How many input sets exceed three times the cache; one where `most` would not, because then the work is small."""
    wanted = max(1, math.ceil(3 * cache_bytes / set_bytes))
    return wanted if wanted <= most else 1


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


def interleaved(
    watch: Watch, spans: Mapping[str, Span], plan: Plan, *, graph: bool = True
) -> dict[str, list[float]]:
    """Seconds a call of every span, round by round in turn, and of the first once more under AGAIN."""
    names = list(spans)
    order = [*names, names[0]]
    runs = [spans[name].graph if graph else spans[name].eager for name in order]
    warm = [watch.seconds(runs, cold=plan.cold) for _ in range(plan.warmup)]
    times: dict[str, list[float]] = {name: [] for name in (*names, AGAIN)}
    for _ in range(rounds_of(plan, min((sum(seconds) for seconds in warm), default=0.0))):
        seconds = watch.seconds(runs, cold=plan.cold)
        for key, name, passed in zip((*names, AGAIN), order, seconds, strict=True):
            times[key].append(passed / spans[name].count)
    return times


def rounds_of(plan: Plan, once: float) -> int:
    """How many rounds the plan's seconds allow, at least its fewest, at most what it asks for."""
    allowed = int(plan.seconds / once) if once > 0 else plan.rounds
    return min(plan.rounds, max(plan.fewest, allowed))


def summary(times: Sequence[float]) -> Timing:
    """Median and quantiles."""
    low, middle, high = np.quantile(times, (0.2, 0.5, 0.8))
    return Timing(float(middle), float(low), float(high))


def spread(first: Sequence[float], again: Sequence[float]) -> float:
    """How far two timings of the same call lie apart, as a part of the first."""
    return abs(summary(again).median / summary(first).median - 1)


def host_times(
    calls: Mapping[str, Call],
    sync: Call,
    *,
    batches: int = 20,
    batch: int = 100,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds that the host spends on one of many calls in a row, for each of some calls in turn.

    The queue is drained between batches, so it never blocks for kernels that take no longer than their launch. Batches are long
    because the first launch after a wait is many times slower than those that follow; calls take turns because the host's
    clock and its neighbours change within a second.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(batches + 1):
        for name, call in calls.items():
            sync()
            started = clock()
            for _ in range(batch):
                call()
            if number:
                found[name].append((clock() - started) / batch)
    sync()
    return {name: float(np.median(times)) for name, times in found.items()}


def cache_bytes() -> int:
    """The L2 of this GPU, as torch gives it."""
    if not torch.cuda.is_available():
        return L2_BYTES
    return (
        int(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0))
        or L2_BYTES
    )
