"""The bench: calls that are timed in turn (`ao_lab.measure.turns`) in the state that each brings about itself.

Near its power limit a GPU slows down under products of bfloat16 and speeds up under casts, which takes a tenth of a second.
There what is timed comes after calls of its own, until the clock is what these make of it.

Everything but the watches is arithmetic on what a watch reports, and runs anywhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ao_lab.measure.turns import (
    AGAIN,
    REPEAT,
    Call,
    Plan,
    Span,
    Stopwatch,
    Times,
    Watch,
    a_call,
    first_again,
    in_rounds,
    in_turn,
    interleaved,
    prepare,
    summary,
)

#: Seconds that a method's own calls last before the one that is timed, and how many they are at least.
SETTLE, FEWEST_CALLS = 0.1, 2
#: Seconds without work before a single call, and how many such calls there are.
IDLE, SINGLE = 0.05, 5


def spread(first: Sequence[float], again: Sequence[float]) -> float:
    """How far two timings of the same call lie apart, as a part of the first."""
    return abs(summary(again).median / summary(first).median - 1)


def repeated(times: Mapping[str, Sequence[float]], first: str) -> dict[str, tuple[float, str]]:
    """The second time of a round's first method over its first time, as a metric of its rows."""
    return {REPEAT: (summary(times[AGAIN]).median / summary(times[first]).median, "ratio")}


def steady(
    watch: Watch, spans: Mapping[str, Span], plan: Plan, settle: float = SETTLE, *, graph: bool = True
) -> Times:
    """As `interleaved`, but each after spans of its own that last `settle` seconds. 0: none."""
    order = first_again(spans)
    runs = {name: span.graph if graph else span.eager for name, span in spans.items()}
    before = {name: in_turn([run] * repeats(watch, run, settle)) for name, run in runs.items()}
    calls = [call for name in order for call in (before[name], runs[name])]

    def one_round() -> tuple[float, Sequence[float]]:
        seconds = watch.seconds(calls)
        return sum(seconds), a_call(spans, order, seconds[1::2])

    return in_rounds(spans, plan, one_round)


def steady_eager(watch: Watch, spans: Mapping[str, Span], plan: Plan, settle: float = SETTLE) -> Times:
    """As `steady` of launches one by one, where each method is over before the next one begins: launches that wait behind a
    slow method's would hide the host's time of the next, which then seems faster than it ever is alone."""
    order = first_again(spans)
    runs = {name: span.eager for name, span in spans.items()}
    before = {name: in_turn([run] * repeats(watch, run, settle)) for name, run in runs.items()}

    def after_own(name: str) -> float:
        before[name]()
        watch.sync()
        return watch.seconds([runs[name]] * 2)[-1]

    def one_round() -> tuple[float, Sequence[float]]:
        begin = time.perf_counter()
        seconds = list(map(after_own, order))
        # Of all calls, those before included.
        return time.perf_counter() - begin, a_call(spans, order, seconds)

    return in_rounds(spans, plan, one_round)


def repeats(watch: Watch, run: Call, settle: float) -> int:
    """How many calls last so many seconds, by two that are timed now; at least FEWEST."""
    if not settle:
        return 0
    once = min(watch.seconds([run] * 2))
    return max(FEWEST_CALLS, math.ceil(settle / max(once, 1e-6)))


def after_own_steps(watch: Stopwatch, steps: Mapping[str, Call], plan: Plan, before: int) -> Times:
    """Seconds of a step of training by each method, and of the first once more under AGAIN: each after so many of its own, as
    it trains. A GPU near its power limit runs faster after a step that needed less power."""
    calls = [steps[name] for name in first_again(steps) for _ in range(before + 1)]

    def one_round() -> tuple[float, Sequence[float]]:
        seconds = watch.seconds(calls)
        return sum(seconds), seconds[before :: before + 1]

    return in_rounds(steps, plan, one_round)


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


def host_times(
    calls: Mapping[str, Call],
    sync: Call,
    *,
    batches: int = 20,
    batch: int = 100,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds that the host spends on one of many calls in a row, for each of some calls in turn.

    The queue is drained between batches, so it never blocks for kernels that take no longer than their launch. Batches are
    long because the first launch after a wait is many times slower than those that follow; calls take turns because the
    host's clock and its neighbours change within a second.
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


def copy_rate(watch: Watch, elements: int, device: str, plan: Plan) -> float:
    """Bytes a second that a copy of so many float32 elements reads and writes."""
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    # A kernel: the copy engines of a GPU are slower than its multiprocessors.
    span = prepare(watch, [lambda: torch.neg(source, out=target)], plan)
    return 8 * elements / summary(interleaved(watch, {"copy": span}, plan)["copy"]).median


#: Side of the products that say what the matrix units do, and bytes of the copy.
SIDE, COPIED = 8192, 2**30
RATES_PLAN = Plan(rounds=10, warmup=2, seconds=0.5, span=1e-3)


@dataclass(frozen=True)
class Rates:
    """What this device was measured to do: operations a second of 8-bit floats and bfloat16, bytes a second of a copy."""

    float8: float
    bfloat16: float
    copy: float


def measure_rates(watch: Watch) -> Rates:
    """Rates on random data, each of its own steady state, as layers are timed."""
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device="cuda")
    source = torch.randn(COPIED // 4, device="cuda")
    target = torch.empty_like(source)

    def scaled() -> torch.Tensor:
        return torch._scaled_mm(
            a8, b8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    calls: dict[str, Callable[[], object]] = {
        "float8": scaled,
        "bfloat16": lambda: a @ b.t(),
        # A kernel: the copy engines of a GPU are slower than its multiprocessors.
        "copy": lambda: torch.neg(source, out=target),
    }
    spans = {name: prepare(watch, [call], RATES_PLAN) for name, call in calls.items()}
    times = {name: summary(one).median for name, one in steady(watch, spans, RATES_PLAN).items()}
    operations = 2 * SIDE**3
    return Rates(operations / times["float8"], operations / times["bfloat16"], 2 * COPIED / times["copy"])
