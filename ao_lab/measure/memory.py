"""Peak memory of what runs between two places, on a GPU or in this process, and transformers' `generate()` timed."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: How torch's profiler names what the allocator gives and takes back.
ALLOCATION = "[memory]"
#: What errors without a class of their own say: of a CPU's allocator, of CUDA beside torch's allocator, of cuBLAS.
FULL = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a GPU, this process or the allocator of a CPU has no room left."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(one in str(error) for one in FULL)


def held_bytes(model: nn.Module) -> int:
    """The bytes of a model's parameters and buffers as they are in memory, shared ones once."""
    return sum(one.nbytes for one in (*model.parameters(), *model.buffers()))


def most_allocated(device: torch.device, work: Callable[[], object]) -> int | None:
    """The most bytes that torch's allocator had in use while `work` ran, beyond those in use before: what tensors took. Call
    `work` once before, so that what a first call alone allocates is not counted.

    On a GPU torch counts them; on a CPU they are added up from torch's profiler, so that they repeat exactly, whatever else the
    process holds. Memory beside torch's allocator (arrays of NumPy, buffers inside of libraries) is in neither. None where a
    profiler is at work already.
    """
    if device.type == "cuda":
        peak = Peak(device)
        peak.begin()
        work()
        return peak.over()
    autograd: Any = torch.autograd
    if autograd._profiler_enabled():
        return None
    gc.collect()
    profiler: Any = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    )
    with without_stderr():
        profiler.start()
    try:
        work()
    finally:
        with without_stderr():
            profiler.stop()
    events = profiler.profiler.kineto_results.events()
    changes: list[tuple[int, int]] = sorted(
        (one.start_ns(), one.nbytes()) for one in events if one.name() == ALLOCATION
    )
    return max(accumulate((size for _, size in changes), initial=0))


@contextmanager
def without_stderr() -> Iterator[None]:
    """The process's standard error goes nowhere inside: torch's profiler writes there when it begins and ends, unasked."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Peak:
    """The most memory in use since `begin` beyond what was in use there: allocated on a GPU, else resident of this process.

    Resident memory is what Linux says: of kernels since 6.2 inexact by up to max(32, 2 n) pages for each of n processors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.before = device, 0

    def begin(self) -> None:
        """Forget earlier peaks."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            gc.collect()
            _give_back()
            _forget_resident()
            self.before = resident("VmRSS") or 0

    def over(self) -> int | None:
        """Bytes; None where the system does not say."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return torch.cuda.max_memory_allocated(self.device) - self.before
        peak = resident("VmHWM")
        return None if peak is None or not self.before else max(peak - self.before, 0)


#: Where Linux tells of this process's memory, and forgets its peak.
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _give_back() -> None:
    """Give the system what the allocator holds of earlier work, where what comes next would seem to take nothing."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library than glibc
        return


def _forget_resident() -> None:
    try:
        CLEAR.write_text("5", encoding="ascii")
    except OSError:
        return


def resident(name: str) -> int | None:
    """Bytes that Linux gives under a name; None elsewhere."""
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = [line.split() for line in lines if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else None


def by_transformers(model: Any, prompt: Tensor, new: int, **options: Any) -> tuple[float, Tensor]:
    """Seconds of transformers' `generate()` as it is called, greedy, no fewer or more than `new` tokens, and these tokens.

    options: of `generate()`, beside those that make it greedy and of that length.
    """
    synchronize(prompt.device)
    started = time.perf_counter()
    made: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=new,
        min_new_tokens=new,
        # Named since transformers else speaks of it at every call.
        pad_token_id=0,
        **options,
    )
    synchronize(prompt.device)
    return time.perf_counter() - started, made[:, prompt.shape[1] :]
