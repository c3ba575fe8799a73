"""Ranges of rows on as many threads as torch uses. Results do not depend on how many there are: a row is one thread's."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import torch

#: Elements below which another thread costs more than it saves (some 20 us to wake it; 1 us decodes about 10,000).
WORTH = 1 << 19
#: Ranges for each thread.
EACH = 4


def in_parts(work: Callable[[int, int], None], rows: int, elements: int) -> None:
    """Call work(first, last) for ranges that cover all rows of a matrix of so many elements, on torch's number of threads.

    work must let Python's lock go. Threads take the next range when they are through with one, so one that gets no core
    (torch's own threads wait for work at full speed) keeps nobody waiting; where there is no thread (the interpreter is ending,
    or the system has none left) all run here. The first error of any range is raised, once those that began have ended.
    """
    count = max(1, min(torch.get_num_threads(), rows, elements // WORTH))
    parts = 1 if count == 1 else min(rows, count * EACH)
    ends = [rows * part // parts for part in range(parts + 1)]
    ranges = iter(list(pairwise(ends)))

    def take() -> None:
        for first, last in ranges:
            work(first, last)

    others = _begun(take, count - 1)
    try:
        take()
    finally:
        errors = [other.exception() for other in others if not other.cancel()]
    for error in errors:
        if error is not None:
            raise error


def _begun(take: Callable[[], None], count: int) -> list[Future[None]]:
    """The threads that help, as many as there are."""
    begun: list[Future[None]] = []
    try:
        begun += [_pool(count).submit(take) for _ in range(count)]
    except RuntimeError:
        return begun
    return begun


@lru_cache(maxsize=4)
def _pool(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="ao_lab")


if hasattr(os, "register_at_fork"):
    # A forked process has none of these threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)

__all__ = ["in_parts"]
