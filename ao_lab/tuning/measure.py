"""Time and error of the candidates for a product.

Candidates are timed in turns, so that clocks and temperature meet all of them alike; those that are clearly slower drop out.
On a GPU two times are taken of each call. `host`: until the host has launched all of it, the GPU idle. `gpu`: between events on
the GPU while the host is ahead of it (a kernel that waits was launched first), operands not in the L2 cache. In eager mode a
layer costs the larger one of the two, the host's with a margin; in a replayed CUDA graph, and nearly so in a compiled model,
`gpu`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ao_lab.gemm.choices import Problem, problem_of
from ao_lab.training.casts import STREAMS, Matrix, quantize_one
from ao_lab.training.products import scheme_key
from ao_lab.tuning.samples import TrainingSample
from reference.training.recipe import Product

# The operands of a layer's products, quantized and dense, from a sample.


@dataclass(frozen=True)
class Pair:
    """Both operands of a product as the tensor core gets them, and dense."""

    problem: Problem
    record: Product
    a: Matrix
    b: Matrix
    dense_a: torch.Tensor
    dense_b: torch.Tensor
    dtype: torch.dtype


def pairs_of(sample: TrainingSample) -> Iterator[Pair]:
    """The products that a layer's step makes."""
    x, w, g = sample.x, sample.w, sample.g
    tensors = {"output": (x, w)}
    if g is not None:
        tensors |= {"input_grad": (g, _turned(w)), "weight_grad": (_turned(g), _turned(x))}
    for name, (a, b) in tensors.items():
        record: Product = getattr(sample.recipe, name)
        stream = STREAMS.get({"input_grad": "g", "weight_grad": "g.T"}.get(name, ""), 0)
        left, right = quantize_one(a, record.a, 0, stream), quantize_one(b, record.b)
        shape = (a.shape[0], b.shape[0], a.shape[1])
        keys = scheme_key(left), scheme_key(right)
        problem = problem_of(name, *keys, shape, x.dtype, record.accumulation)
        yield Pair(problem, record, left, right, a, b, x.dtype)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """A dense matrix transposed, contiguous."""
    return x.t().contiguous()


Call = Callable[[], object]
#: Seconds of measuring a candidate.
SECONDS = 0.02
#: Calls of a candidate at least.
FEWEST = 5
#: Calls of a candidate at most.
MOST = 50
#: How often a call's host time is taken.
HOST_CALLS = 5
#: Seconds of a call beyond which its host time is not taken: launches are then hidden.
LONG = 0.02
#: A candidate drops out when its first call takes longer than the best candidate by this factor.
FIRST_DROP = 1.5
#: The same of its quickest call, later.
DROP = 1.15
#: Seconds: first calls shorter than this vary by more than FIRST_DROP.
SHORT = 1e-3
#: Read before each call on a GPU, so that operands come from memory as they do in a model: more than an L2 cache.
FLUSH_BYTES = 256 << 20
#: In eager mode the host's time counts so many times: it is that of an idle machine, and a loader of data beside a training, or
#: another process, doubles it. A choice that is as good as another one only while nothing else runs is none.
HOST_MARGIN = 1.5
#: Cycles a second of the waiting kernel, no fewer than any GPU has.
CYCLES = 2.0e9
#: Seconds that it waits beyond the host's time.
AHEAD = 50e-6
#: Rows of a product that errors are measured on.
ERROR_ROWS = 256
#: How a model is run.
LAUNCHES = ("eager", "graph")


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: what choices go by, its spread, and on a GPU both times."""

    seconds: float
    spread: float
    host: float | None = None
    gpu: float | None = None


def timings(
    calls: Mapping[str, Call], device: torch.device, launches: str = "eager", most: float = FIRST_DROP
) -> dict[str, Timing | str]:
    """The time of each call, by name; in words why not, where it dropped out. Each runs once before, untimed.

    most: a call drops out whose first time is longer than the quickest one's by this factor; infinity: none does.
    """
    walls, hosts = {}, {}
    for name, call in calls.items():
        call()
        walls[name] = hosts[name] = host_seconds(call, device)
    quickest = min(walls.values(), default=0.0)
    result: dict[str, Timing | str] = {
        name: f"took {wall * 1e6:.0f} us at first, the fastest {quickest * 1e6:.0f} us"
        for name, wall in walls.items()
        if wall > max(quickest * most, SHORT)
    }
    running = {name: call for name, call in calls.items() if name not in result}
    eager = device.type == "cuda" and launches == "eager"
    floors = {name: HOST_MARGIN * hosts[name] if eager else 0.0 for name in running}
    times = _in_turns(running, device, hosts, floors)
    for name, one in times.items():
        result[name] = _timing(one, hosts[name], device, launches)
    return {name: result[name] for name in calls}


def _in_turns(
    calls: dict[str, Call], device: torch.device, hosts: dict[str, float], floors: dict[str, float]
) -> dict[str, list[float]]:
    """Readings of each call, in rounds that begin with another one each time. floors: what a call costs at least."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    running, rounds, started = list(calls), 0, time.perf_counter()
    while running and rounds < MOST:
        for name in running[rounds % len(running) :] + running[: rounds % len(running)]:
            times[name].append(reading(calls[name], device, hosts[name]))
        rounds += 1
        if rounds >= FEWEST and time.perf_counter() - started > SECONDS * len(running):
            break
        if rounds >= FEWEST - 2:
            best = min(max(statistics.median(times[name]), floors[name]) for name in running)
            running = [name for name in running if max(min(times[name]), floors[name]) <= best * DROP]
    return times


def _timing(times: list[float], host: float, device: torch.device, launches: str) -> Timing:
    ordered, median = sorted(times), statistics.median(times)
    spread = (ordered[-1 - len(ordered) // 5] - ordered[len(ordered) // 5]) / 2
    if device.type != "cuda":
        return Timing(median, spread)
    seconds = median if launches == "graph" else max(median, HOST_MARGIN * host)
    return Timing(seconds, spread, host, median)


def host_seconds(call: Call, device: torch.device) -> float:
    """Median seconds until the host has launched a call, the GPU idle; once and to its end where the call is long."""
    wall = _until_done(call, device)
    if device.type != "cuda" or wall > LONG:
        return wall
    readings = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        call()
        readings.append(time.perf_counter() - started)
    return statistics.median(readings)


def _until_done(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def reading(call: Call, device: torch.device, host: float) -> float:
    """Seconds of a call; on a GPU those of the GPU alone, while the host, which takes `host` seconds, is ahead."""
    if device.type != "cuda":
        return _until_done(call, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(int((min(1.5 * host, LONG) + AHEAD) * CYCLES))  # type: ignore[no-untyped-call]
    _flush(device)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3


_buffers: dict[torch.device, torch.Tensor] = {}


def _flush(device: torch.device) -> None:
    """Read other memory: a cache full of what was written would be written back during the call."""
    if device not in _buffers:
        _buffers[device] = torch.zeros(FLUSH_BYTES // 4, device=device)
    _buffers[device].sum()


def release() -> None:
    """Free what measuring has allocated."""
    _buffers.clear()


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The norm of the difference over that of the exact result: outputs near zero do not decide it. 0 where both are zero."""
    difference = torch.linalg.vector_norm(found.double() - exact.double())
    norm = torch.linalg.vector_norm(exact.double())
    return 0.0 if not bool(difference) else float(difference / norm)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b.T of dense operands in float64, a few rows of a at most: what errors are measured against."""
    return a.double() @ b.double().t()


__all__ = [
    "ERROR_ROWS",
    "LAUNCHES",
    "Call",
    "Pair",
    "Timing",
    "exact_product",
    "host_seconds",
    "pairs_of",
    "reading",
    "relative_error",
    "release",
    "timings",
]
