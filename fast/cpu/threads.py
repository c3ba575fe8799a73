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


def in_parts(work: Callable[[int, int], None], rows: int, elements: int) -> None:
    """Call work(first, last) for ranges that cover all rows of a matrix of so many elements, on torch's number of threads.

    work must let Python's lock go. Ranges that get no thread (the interpreter is ending, or the system has none left) run here.
    The first error of any range is raised, once those that began have ended.
    """
    count = max(1, min(torch.get_num_threads(), rows, elements // WORTH))
    ends = [rows * part // count for part in range(count + 1)]
    ranges = list(pairwise(ends[1:]))
    others = _begun(work, ranges)
    try:
        for first, last in [(0, ends[1]), *ranges[len(others) :]]:
            work(first, last)
    finally:
        errors = [other.exception() for other in others]
    for error in errors:
        if error is not None:
            raise error


def _begun(work: Callable[[int, int], None], ranges: list[tuple[int, int]]) -> list[Future[None]]:
    """The first ranges, as many as there are threads for."""
    begun: list[Future[None]] = []
    try:
        for first, last in ranges:
            begun.append(_pool(len(ranges)).submit(work, first, last))
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
