"""How a measurement becomes rows: its values with the status ``ok``, or a status that says why there are none.

Measure many methods at once: one thread each on the CPU, one after the other on a GPU.

NumPy and torch release Python's lock while they compute, so threads share the cores. Inside, torch runs on one thread, which
makes a result independent of the number of cores. A result is handed over as soon as it is there, so that an interruption
loses only what was under way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ao_lab.cli import terminal
from experiments.harness.rows import Journal, Row

# When a run starts nothing more, so that it ends in time and publishes what it has.

#: How the reason ends.
LATE = "s of this run did not reach it"


@dataclass
class Deadline:
    """Seconds from now on; None: no end. `clock` is the host's."""

    seconds: float | None
    clock: Callable[[], float] = time.perf_counter
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = float("inf") if self.seconds is None else self.clock() + self.seconds

    def left(self) -> float:
        """Seconds that are left, negative after the end."""
        return self.until - self.clock()

    def reason(self, needed: float = 0.0) -> str | None:
        """Why something that takes about `needed` seconds does not start; None where it does."""
        if self.left() > needed:
            return None
        return f"not run: the {self.seconds:.0f} {LATE}"


def is_late(metric: str) -> bool:
    """Whether the metric of a status says that a deadline came first."""
    return metric.startswith("status: ") and metric.endswith(LATE)


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


# Progress on stderr, so that stdout holds results only: a bar on a terminal, a line every ten seconds elsewhere.


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; each call of the given function is one step, with a word about it."""
    with terminal.track_progress(description, total) as work:
        yield work.step


@contextmanager
def share(description: str) -> Iterator[Callable[[float, str], None]]:
    """A bar of percents; each call of the given function says which share is done, from 0 to 1, with a word about it."""
    with terminal.track_progress(description, 100) as work:
        yield lambda done, word: work.at(min(100, int(100 * done)), word)


#: Metrics of one measurement, with their units.
Values = dict[str, tuple[float, str]]


#: How the entry begins that names the kernel behind a method's values; it becomes a column of their rows.
KERNEL = "kernel: "


def kernel(name: str) -> Values:
    """The entry of values that names what computed them."""
    return {f"{KERNEL}{name}": (1.0, "")} if name else {}


#: What follows an error of CUDA in torch's text of it.
ADVICE = "\nSearch for `cuda"


class Wrong(Exception):
    """A result differs from the reference's."""


def keep(journal: Journal, failed: list[Row], rows: list[Row]) -> None:
    """Rows of what went well into the journal, others beside it."""
    if any(row.metric == "status: ok" for row in rows):
        journal.add(rows)
    else:
        failed += rows


def status(word: str) -> Values:
    """The row that says how it went; what it says is in its name, as rows hold numbers."""
    return {f"status: {' '.join(word.split())[:200]}": (float(word == "ok"), "")}


def attempt(work: Callable[[], Values]) -> Values:
    """What work finds, with a status; of a failure only that."""
    try:
        return {**work(), **status("ok")}
    except Wrong as error:
        return status(f"wrong: {error}")
    except Exception as error:  # noqa: BLE001
        return status(f"error: {type(error).__name__}: {str(error).partition(ADVICE)[0]}")
    finally:
        free()


def free() -> None:
    """Give memory back, so that the next case has all of it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
