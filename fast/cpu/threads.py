"""Ranges of rows on as many threads as torch uses. Results do not depend on how many there are: a row is one thread's.

`scratch`: memory for what lies between two operations on a tile, kept by each thread from one call to the next. The system
hands out large new memory page by page, at first touch: of a tile of 2 MiB that takes as long as its arithmetic.
"""

from __future__ import annotations

import ctypes
import glob
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise
from math import prod

import torch

#: Elements below which to wake another thread costs more than it saves (times: reports/LOG.md).
WORTH = 1 << 19
#: Ranges for each thread.
EACH = 4
#: Filled in a process that was forked.
FORKED: list[bool] = []


def in_parts(work: Callable[[int, int], None], rows: int, elements: int) -> None:
    """Call work(first, last) for ranges that cover all rows of a matrix of so many elements, on torch's number of threads.

    work must let Python's lock go. Threads take the next range when they are through with one, so one that gets no core keeps
    nobody waiting. They are torch's own where its OpenMP runtime is found: those wait for work at full speed for a while after
    each of torch's products, so that others would get no core. The first error of any range is raised, once those that began
    have ended.
    """
    count = max(1, min(torch.get_num_threads(), rows, elements // WORTH))
    parts = 1 if count == 1 else min(rows, count * EACH)
    ends = [rows * part // parts for part in range(parts + 1)]
    ranges = iter(list(pairwise(ends)))
    errors: list[BaseException] = []

    def take() -> None:
        try:
            for first, last in ranges:
                work(first, last)
        except BaseException as error:  # noqa: BLE001  raised below, in the thread that asked
            errors.append(error)

    if count == 1 or sys.is_finalizing():  # other threads would wait for Python's lock for ever
        take()
    elif (parallel := _openmp()) is not None:
        # As many as torch's own regions have: fewer would end some of its threads, which it would have to begin again.
        parallel(take, torch.get_num_threads())
        take()
    else:
        _by_pool(take, count)
    if errors:
        raise errors[0]


def _by_pool(take: Callable[[], None], count: int) -> None:
    """Call take here and on other threads; where there is none (the interpreter is ending, or the system has none left) all is
    done here."""
    others = _begun(take, count - 1)
    take()
    for other in others:
        if not other.cancel():
            other.result()


def _begun(take: Callable[[], None], count: int) -> list[Future[None]]:
    """The threads that help, as many as there are."""
    begun: list[Future[None]] = []
    try:
        begun += [_pool(count).submit(take) for _ in range(count)]
    except RuntimeError:
        return begun
    return begun


@lru_cache(maxsize=1)
def _openmp() -> Callable[[Callable[[], None], int], None] | None:
    """Calls a function on as many threads as it is told, this one among them, by GNU's OpenMP runtime in torch's wheel; None
    where that is not what torch has, and in processes that may have been forked, where its threads are not."""
    libraries = glob.glob(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp*.so*"))
    if len(libraries) != 1 or FORKED or multiprocessing.parent_process() is not None:
        return None
    region = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    try:
        parallel = ctypes.CDLL(libraries[0]).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [region, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return lambda take, count: parallel(region(lambda _: take()), None, count, 0)


@lru_cache(maxsize=4)
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="ao_lab")


def _forget_threads() -> None:
    """A forked process has none of these threads."""
    FORKED.append(True)
    _pool.cache_clear()
    _openmp.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


#: Bytes that a thread keeps under one name; what is larger is made for one call.
KEPT = 1 << 22


class _Kept(threading.local):
    def __init__(self) -> None:
        self.parts: dict[str, torch.Tensor] = {}


_KEPT = _Kept()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor of the CPU whose memory is that of the last one of this name in this thread; its values are any."""
    size = prod(shape) * dtype.itemsize
    if size > KEPT:
        return torch.empty(shape, dtype=dtype, device="cpu")
    kept = _KEPT.parts.get(name)
    if kept is None or kept.numel() < size:
        # Memory that was made in inference mode could not be written outside it.
        with torch.inference_mode(False):
            kept = _KEPT.parts[name] = torch.empty(size, dtype=torch.uint8, device="cpu")
    return kept[:size].view(dtype).view(shape)


__all__ = ["in_parts", "scratch"]
