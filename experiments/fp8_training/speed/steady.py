"""Times in a steady state: what is timed comes after calls of its own, until the GPU's clock is what these calls make of it.

Near its power limit a GPU slows down under products of bfloat16 and speeds up under casts, which takes a tenth of a second:
on an H200 bfloat16 at 16384 x 4096 x 14336 takes 7.4 ms a step after 15 ms of its own and 8.6 ms in a row of 70 ms, MXFP8
9.0 ms after other methods and 8.2 ms in such a row.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from experiments.harness.timing import AGAIN, Call, Plan, Span, Watch, in_turn, rounds_of

#: Seconds that a method's own calls last before the one that is timed, and how many they are at least.
SETTLE, FEWEST = 0.1, 2
#: Seconds without work before a single call, and how many such calls there are.
IDLE, SINGLE = 0.05, 5


def steady(
    watch: Watch, spans: Mapping[str, Span], plan: Plan, settle: float = SETTLE, *, graph: bool = True
) -> dict[str, list[float]]:
    """Seconds a call of every span, round by round in turn, and of the first once more under AGAIN, as
    `experiments.harness.timing.interleaved` has them; but each after spans of its own that last `settle` seconds. 0: none."""
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
    return max(FEWEST, math.ceil(settle / max(once, 1e-6)))


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


__all__ = ["IDLE", "SETTLE", "SINGLE", "after_pause", "steady", "steady_eager"]
