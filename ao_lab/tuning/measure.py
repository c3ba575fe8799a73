"""Time and error of the candidates for a product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

#: Seconds of measuring a candidate, and the fewest and most calls; the first ones warm up.
SECONDS, FEWEST, MOST, WARMUP = 0.05, 5, 50, 2
#: Written over before each call on a GPU, so that operands come from memory as they do in a model: more than an L2 cache.
FLUSH_BYTES = 256 << 20


def seconds_of(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The median time of a call and half of what lies between the 20% and 80% quantiles."""
    for _ in range(WARMUP):
        call()
    times: list[float] = []
    while len(times) < FEWEST or (sum(times) < SECONDS and len(times) < MOST):
        times.append(_once_on_gpu(call, device) if device.type == "cuda" else _once(call))
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 5], ordered[-1 - len(ordered) // 5]
    return statistics.median(times), (high - low) / 2


def _once(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _once_on_gpu(call: Callable[[], object], device: torch.device) -> float:
    """Time on the GPU, host time included where the host is the slower one: the GPU waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    _flush(device)
    torch.cuda.synchronize(device)
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1e3


_buffers: dict[torch.device, torch.Tensor] = {}


def _flush(device: torch.device) -> None:
    if device not in _buffers:
        _buffers[device] = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    _buffers[device].zero_()


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


__all__ = ["exact_product", "relative_error", "release", "seconds_of"]
