"""Measure many methods at once: one thread each on the CPU, one after the other on a GPU.

NumPy and torch release Python's lock while they compute, so threads share the cores. Inside, torch runs on one thread, which
makes a result independent of the number of cores. A result is handed over as soon as it is there, so that an interruption
loses only what was under way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

Task = TypeVar("Task")
Result = TypeVar("Result")


def measure_all(
    tasks: Sequence[Task], measure: Callable[[Task], Result], device: str
) -> Iterator[tuple[Task, Result]]:
    """(task, result) in the order in which they are finished; the first error ends it."""
    if device != "cpu":
        yield from ((task, measure(task)) for task in tasks)
        return
    with one_torch_thread(), ThreadPoolExecutor(max_workers=cores()) as pool:
        pending = {pool.submit(measure, task): task for task in tasks}
        try:
            for done in as_completed(pending):
                yield pending[done], done.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def cores() -> int:
    """Cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch computes on one thread, here and in threads that start inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
