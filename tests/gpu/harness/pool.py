"""Jobs on processes of their own: each has its CUDA context, compiles its kernels and runs its NumPy.

A pool of the standard library would wait forever for a process that died of a wrong pointer. Here a job whose process dies or
exceeds its time is recorded as failed, and a fresh process takes the next one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.gpu.harness.run import Check, DeviceLost, Run, Settings

TIMEOUT = 300.0  # seconds for one job
GRACE = 20.0  # seconds for jobs that run when the time for all of them is over


@dataclass(frozen=True)
class Job:
    """`call(run, *arguments)` in some process; heavier ones start first."""

    family: str
    label: str
    function: str
    call: Callable[..., None]
    arguments: tuple[Any, ...] = ()
    weight: float = 1.0


@dataclass
class Done:
    """A finished job: its checks, and whether its process can go on."""

    job: Job
    checks: list[Check]
    seconds: float
    lost: bool = False
    #: Whether the time for all jobs was over before it was done: it says nothing of the job.
    late: bool = False


def perform(job: Job, settings: Settings, fast: Any = None) -> Done:
    """Run a job here. Whatever it raises is a failed check."""
    run, start, lost = Run(settings, fast), time.perf_counter(), False
    try:
        job.call(run, *job.arguments)
    except DeviceLost as error:
        run.record(job.function, job.label, 1, 1, [str(error)], status="error")
        lost = True
    except Exception:  # noqa: BLE001  a broken test is a result too
        text = traceback.format_exc().splitlines()[-8:]
        run.record(job.function, job.label, 1, 1, text, status="error")
    checks = [_labelled(check, job.label) for check in run.checks]
    return Done(job, checks, time.perf_counter() - start, lost)


def _labelled(check: Check, label: str) -> Check:
    check.label = f"{label} {check.label}".strip() if check.label != label else label
    return check


#: How processes begin: with nothing of this one.
CONTEXT = multiprocessing.get_context("spawn")


def serve(connection: Connection, settings: Settings) -> None:
    """A process: jobs come, results go, until None comes."""
    import torch

    torch.set_num_threads(1)
    while (job := connection.recv()) is not None:
        done = perform(job, settings)
        connection.send(done)
        if done.lost:
            return


class Worker:
    """A process and the job it has."""

    def __init__(self, settings: Settings) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, settings))
        self.process.start()
        theirs.close()
        self.job: Job | None = None
        self.since = 0.0

    def give(self, job: Job) -> None:
        """Start a job."""
        self.job, self.since = job, time.perf_counter()
        # A process that died cannot be sent anything; `take` will find out.
        with suppress(OSError):
            self.connection.send(job)

    def take(self, deadline: float) -> Done | None:
        """The finished job, a failed one if the process died or is late, or None if it still works."""
        assert self.job is not None
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return self._failed(f"the process ended with exit code {self.process.exitcode}")
        if time.perf_counter() > min(self.since + TIMEOUT, deadline + GRACE):
            done = self._failed(f"no result after {time.perf_counter() - self.since:.0f} s")
            done.late = time.perf_counter() > deadline
            return done
        return None

    def _failed(self, reason: str) -> Done:
        job = self.job
        assert job is not None
        check = Check(job.function, job.label, 1, 1, [reason], "error")
        return Done(job, [check], time.perf_counter() - self.since, lost=True)

    def stop(self) -> None:
        """End the process."""
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.connection.close()


def run_jobs(jobs: list[Job], settings: Settings, workers: int, seconds: float = inf) -> Iterator[Done]:
    """Results as they come; `workers` 0 runs everything in this process. After `seconds` no job starts, and all fail."""
    if not workers:
        yield from (perform(job, settings) for job in jobs)
        return
    queue = sorted(jobs, key=lambda job: -job.weight)
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    pool = [Worker(settings) for _ in range(min(workers, len(queue)))]
    deadline = time.perf_counter() + seconds
    try:
        while queue or any(worker.job for worker in pool):
            yield from _round(pool, queue, settings, deadline)
            if time.perf_counter() > deadline:
                yield from (_not_started(job) for job in queue)
                queue.clear()
    finally:
        for worker in pool:
            worker.stop()


def _not_started(job: Job) -> Done:
    """What is left when the time is over has failed: nobody may take it for tested."""
    check = Check(job.function, job.label, 0, 0, ["not started: the time was over"], "error")
    return Done(job, [check], 0.0, late=True)


def _round(pool: list[Worker], queue: list[Job], settings: Settings, deadline: float) -> Iterator[Done]:
    """Give work to the idle, wait a moment, collect what is done."""
    for worker in pool:
        if worker.job is None and queue:
            worker.give(queue.pop(0))
    busy = [worker for worker in pool if worker.job]
    wait([worker.connection for worker in busy], timeout=1.0)
    for worker in busy:
        done = worker.take(deadline)
        if done is None:
            continue
        worker.job = None
        if done.lost:
            worker.stop()
            pool[pool.index(worker)] = Worker(settings)
        yield done
