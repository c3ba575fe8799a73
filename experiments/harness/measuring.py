"""How measurements run and become rows: values with the status ``ok``, or a status that says why there are none.

Methods are measured one thread each on the CPU, one after the other on a GPU (`measure_all`). NumPy and torch release Python's
lock while they compute, so threads share the cores; inside, torch runs on one thread, which makes a result independent of the
number of cores. A result is handed over as soon as it is there, so that an interruption loses only what was under way.

Trainings run one after the other in this process, or several at once, each in a process of its own (`measure_each`). A process
is started anew ("spawn", nothing of this one is in it) and measures one thing at a time. It computes on as many threads as this
one, and trainings draw from generators that they seed themselves: results are the same bits. Rows come back to this process,
which alone writes them down. A process that dies, or a measurement that fails in it, loses its own measurement and no other's.
However this process ends, the others end with it; Ctrl-C is for this one to heed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import TypeVar

import numpy as np
import torch

from ao_lab.cli import terminal
from ao_lab.cli.terminal import say
from experiments.harness import revision
from experiments.harness.rows import Journal, Row

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


def bits_that_differ(mine: np.ndarray, right: np.ndarray, other: str) -> str:
    """How many codes of two arrays of unsigned integers differ, and the first of them; "" where none does.

    other: whose the second array's are, as "the reference".
    """
    if mine.shape != right.shape or mine.dtype != right.dtype:
        return f"{mine.dtype}{list(mine.shape)}, {other} has {right.dtype}{list(right.shape)}"
    wrong = np.flatnonzero(mine != right)
    if not wrong.size:
        return ""
    at = int(wrong[0])
    return f"{wrong.size} of {mine.size} differ, first at {at}: {mine.flat[at]:#x}, {other} has {right.flat[at]:#x}"


class Late(Exception):
    """The deadline came while something was under way, which ends where it asks (`Deadline.check`)."""


def keep(journal: Journal, failed: list[Row], rows: list[Row]) -> None:
    """Rows of what went well into the journal, others beside it."""
    if is_ok(rows):
        journal.add(rows)
    else:
        failed += rows


def is_ok(rows: Iterable[Row]) -> bool:
    """Whether what was measured together went well."""
    return any(row.metric == "status: ok" for row in rows)


def status(word: str) -> Values:
    """The row that says how it went; what it says is in its name, as rows hold numbers."""
    return {f"status: {' '.join(word.split())[:200]}": (float(word == "ok"), "")}


def attempt(work: Callable[[], Values]) -> Values:
    """What work finds, with a status; of a failure only that."""
    try:
        return {**work(), **status("ok")}
    except Wrong as error:
        return status(f"wrong: {error}")
    except Late as error:
        return status(str(error))
    except Exception as error:  # noqa: BLE001
        return status(f"error: {type(error).__name__}: {str(error).partition(ADVICE)[0]}")
    finally:
        free()


class DeviceLost(OSError):
    """A kernel failed so that the GPU does nothing more in this process."""


def free() -> None:
    """Give memory back, so that the next case has all of it. DeviceLost where the GPU does nothing more."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        said = str(error).strip().partition("\n")[0]
        raise DeviceLost(
            f"a kernel failed, and the GPU does nothing more in this process ({said}); what was measured before is kept: "
            "run the rest by --only, without the measurement that was under way"
        ) from error


def forget() -> None:
    """The same of what only compiled programs and cycles of objects hold."""
    torch.compiler.reset()
    gc.collect()
    free()


# When a run starts nothing more, so that it ends in time and publishes what it has.

#: How the reason ends.
LATE = "s of this run did not reach it"
#: What stands in it before what was then under way.
STOPPED = "stopped at"
#: Characters of what was under way, so that the reason's end is never cut.
MOST_OF_DOING = 100


@dataclass
class Deadline:
    """Seconds from now on; None: no end. `clock` is the host's."""

    seconds: float | None
    clock: Callable[[], float] = time.perf_counter
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = float("inf") if self.seconds is None else self.clock() + self.seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What takes place inside is not counted, and not ended."""
        started, until = self.clock(), self.until
        self.until = float("inf")
        try:
            yield
        finally:
            self.until = until + self.clock() - started

    def left(self) -> float:
        """Seconds that are left, negative after the end."""
        return self.until - self.clock()

    def reason(self, needed: float = 0.0) -> str | None:
        """Why something that takes about `needed` seconds does not start; None where it does."""
        if self.left() > needed:
            return None
        return f"not run: the {self.seconds:.0f} {LATE}"

    def check(self, doing: str) -> None:
        """Late after the end, with the status of what is then under way; doing: what, in a few words."""
        if self.left() <= 0:
            raise Late(f"not run: {STOPPED} {doing[:MOST_OF_DOING]}; the {self.seconds:.0f} {LATE}")


def in_time(deadline: Deadline, work: Callable[[], Values]) -> Values:
    """What work finds, with a status; where the deadline came before it, only that."""
    reason = deadline.reason()
    return status(reason) if reason else attempt(work)


#: Seconds after the end within which what begins before it may last.
GRACE = 10.0


@dataclass
class Stages:
    """Stages of what is measured at once: a line each with its seconds on stderr, where no bar moves, so that the log of a run
    that is ended says where its time went. about: what is measured; told: whether there are lines."""

    about: str
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    told: bool = True
    longest: float = 0.0
    last: float = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.deadline.clock()

    def done(self, word: str) -> None:
        """A stage ends, and the next one begins."""
        now = self.deadline.clock()
        if self.told and not terminal.is_live():
            say(f"{self.about}: {word}, {now - self.last:.1f} s")
        self.last = now

    def method(self, work: Callable[[], Values]) -> Values:
        """What the work of one of several methods finds, with a status; where it would not end GRACE after the deadline, by the
        longest method so far, only that."""
        started = self.deadline.clock()
        reason = self.deadline.reason(max(0.0, self.longest - GRACE))
        values = status(reason) if reason else attempt(work)
        self.longest = max(self.longest, self.deadline.clock() - started)
        return values


def is_late(metric: str) -> bool:
    """Whether the metric of a status says that a deadline came first."""
    return metric.startswith("status: ") and metric.endswith(LATE)


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


Work = Callable[[], list[Row]]
#: What a process sends back: the rows, or what went wrong.
Answer = list[Row] | str
SPAWN = multiprocessing.get_context("spawn")
#: Seconds after which a line says what is measured, where nothing was finished.
TELL = 30.0
#: Seconds that a process gets to end by itself.
PATIENCE = 5.0
#: Names of what was lost: a run publishes what it has, and then ends as one that failed.
LOST: list[str] = []


def measure_each(
    title: str, works: Mapping[str, Work], workers: int, deadline: Deadline, keep: Callable[[str, list[Row]], None]
) -> None:  # fmt: skip
    """Call `keep` with name and rows of each measurement as it is finished; nothing starts that the deadline would not reach,
    by the longest one so far, and of several workers none goes on GRACE seconds beyond it. With one worker all run here, and an
    error is raised; with more they are pickled, and what is lost is said on stderr and remembered in LOST."""
    made = at_once(works, workers, deadline) if workers > 1 else one_by_one(works, deadline)
    with bar(title, len(works)) as step, closing(made):
        for name, rows in made:
            keep(name, rows)
            step(name)


def one_by_one(works: Mapping[str, Work], deadline: Deadline) -> Generator[tuple[str, list[Row]], None, None]:
    """In this process, in their order."""
    longest = 0.0
    for name, work in works.items():
        if deadline.reason(longest):
            return
        started = time.perf_counter()
        yield name, work()
        longest = max(longest, time.perf_counter() - started)


def at_once(
    works: Mapping[str, Work], workers: int, deadline: Deadline
) -> Generator[tuple[str, list[Row]], None, None]:
    """In so many processes, begun in their order."""
    names, longest, pool = iter(works), 0.0, Pool()
    with closing(pool):
        if not deadline.reason():
            # All at once: a process reads nothing before it has started, and what it is sent is larger than a pipe.
            pool.start(min(workers, len(works)))
        while True:
            while len(pool.busy) < workers and not deadline.reason(longest) and (name := next(names, "")):
                pool.begin(name, works[name])
            if not pool.busy:
                return
            done = pool.finished(min(deadline.left() + GRACE, TELL))
            if not done:
                late = deadline.left() <= -GRACE
                say(f"{'stopped, as the end has come' if late else 'under way'}: {pool}")
                if late:
                    return
            for name, answer, seconds in done:
                longest = max(longest, seconds)
                if isinstance(answer, str):
                    LOST.append(name)
                    say(f"lost: {name}: {answer}; the next run goes on with it")
                else:
                    yield name, answer


@dataclass
class Pool:
    """Processes that wait for work, and those that measure, by the pipes to them."""

    idle: list[Worker] = field(default_factory=list)
    busy: dict[Connection, Worker] = field(default_factory=dict)

    def start(self, count: int) -> None:
        """Start processes, which wait for work."""
        for _ in range(count):
            self.idle.append(Worker())

    def begin(self, name: str, work: Work) -> None:
        """Let a process measure something: one that waits, or a new one where one has died."""
        worker = self.idle.pop(0) if self.idle else Worker()
        worker.begin(name, work)
        self.busy[worker.pipe] = worker

    def __str__(self) -> str:
        now = time.perf_counter()
        return "; ".join(f"{one.name}, {now - one.started:.0f} s" for one in self.busy.values())

    def finished(self, seconds: float) -> list[tuple[str, Answer, float]]:
        """Wait until a process has an answer or has died, so many seconds at most: names, answers and seconds of those."""
        ready = wait(list(self.busy), max(seconds, 0.0))
        done = [self.busy.pop(pipe) for pipe in list(self.busy) if pipe in ready]
        found = [(one.name, one.answer(), time.perf_counter() - one.started) for one in done]
        self.idle += [one for one in done if one.process.is_alive()]
        return found

    def close(self) -> None:
        """End all processes, whatever they do."""
        everyone = (*self.idle, *self.busy.values())
        for worker in everyone:
            worker.process.terminate()
        for worker in everyone:
            worker.stop()


@dataclass(eq=False)
class Worker:
    """A process that measures, seen from this one."""

    name: str = ""
    started: float = 0.0
    pipe: Connection = field(init=False)
    process: multiprocessing.process.BaseProcess = field(init=False)

    def __post_init__(self) -> None:
        import torch

        self.pipe, far = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(far, torch.get_num_threads()))
        self.process.start()
        far.close()

    def begin(self, name: str, work: Work) -> None:
        """Let it measure something. A process that has died shows when its answer is asked for."""
        self.name, self.started = name, time.perf_counter()
        try:
            self.pipe.send(work)
        except (BrokenPipeError, ConnectionResetError):
            return

    def answer(self) -> Answer:
        """What it found; its end where it found nothing."""
        try:
            found: Answer = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(PATIENCE)
            code = self.process.exitcode
            self.stop()
            return f"its process ended with exit code {code}"
        return found

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.terminate()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()


def serve(pipe: Connection, threads: int) -> None:
    """In the process: measure what comes, until this process is ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # Bars of several processes would draw over each other; plain lines do not.
    os.environ["TERM"] = "dumb"
    # The commit as it is before its code is imported with the first measurement: it is in the rows.
    revision.state()
    import torch

    torch.set_num_threads(threads)
    while True:
        pipe.send(answer_of(pipe.recv()))


def answer_of(work: Work) -> Answer:
    """Rows, or the last line of an error, whose whole text goes to stderr."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, however it ends, and end."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
