"""A limit of time for Python code that runs on data of others: lists that a number in a configuration makes too long, say."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: How often a thread is looked at, in seconds.
EVERY = 0.05
#: How long after an error the next one is raised, where a bare `except` has kept the first.
AGAIN = 1.0
#: Turns of a loop, at each of which an error arrives.
ARRIVES = 1000


class _OverTime(BaseException):
    """Raised inside the code that takes too long; no `except Exception` on the way keeps it."""


@contextmanager
def limited_time(seconds: float, error: Exception) -> Iterator[None]:
    """What runs inside may take so many seconds of its thread's own time; the error beyond.

    The time is the processor's where the system tells it of a thread (Linux), else the wall's: a busy machine stops nothing.
    The code is stopped between two steps of Python; one long call of C ends first.
    """
    owner, clock = threading.get_ident(), _clock()
    lock, ended, raised = threading.Lock(), threading.Event(), threading.Event()
    started = clock()

    def watch() -> None:
        pause = EVERY
        while not ended.wait(pause):
            with lock:
                if not ended.is_set() and clock() - started > seconds:
                    raised.set()
                    _raise_in(owner, _OverTime)
                    pause = AGAIN

    watcher = threading.Thread(target=watch, name="ao_lab.limited_time", daemon=True)
    watcher.start()
    try:
        try:
            yield
        finally:
            with lock:
                ended.set()
            _arrive(raised)
    except _OverTime:
        ended.set()
        raise error from None


def _arrive(raised: threading.Event) -> None:
    """Steps in which an error that was raised and has not arrived does so. It cannot be taken back: CPython 3.11 to 3.13 would
    look for one before each call and each turn of a loop from then on, as long as the process lives."""
    for _ in range(ARRIVES if raised.is_set() else 0):
        pass


def _clock() -> Callable[[], float]:
    """Seconds of this thread, to be asked by another."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    number = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(number)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an error in another thread at its next step."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


__all__ = ["limited_time"]
