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
    """(task, result) in the order in which they are finished; the first error ends it, after what is under way.

    A stop (Ctrl-C, or that nobody asks for more) ends it at once: threads that compute are left to the end of the process.
    """
    if device != "cpu":
        yield from ((task, measure(task)) for task in tasks)
        return
    pool = ThreadPoolExecutor(max_workers=cores())
    with one_torch_thread():
        wait = False
        try:
            pending = {pool.submit(measure, task): task for task in tasks}
            for done in as_completed(pending):
                yield pending[done], done.result()
            wait = True
        except Exception:
            wait = True
            raise
        finally:
            pool.shutdown(wait=wait, cancel_futures=True)


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
