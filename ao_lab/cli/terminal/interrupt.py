"""Ctrl-C and SIGTERM: one line that says what was kept and how to go on, and the exit code that shells expect.

A thread that computes cannot be interrupted. What commands keep is on disk whenever they are stopped, so the process ends at
once, without waiting for such threads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

#: 128 and the signal's number, as shells count.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """SIGTERM came. Like KeyboardInterrupt it is no Exception, so that nothing on the way takes it for a failure."""


class Stopped(Exception):
    """A command was stopped; the message says what was kept, `code` is the exit code."""

    def __init__(self, kept: str, code: int) -> None:
        super().__init__(f"stopped; {kept}")
        self.code = code


@contextmanager
def when_stopped(kept: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM inside become Stopped, with what `kept` says then."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Stopped(kept(), INTERRUPTED) from error
    except Terminated as error:
        raise Stopped(kept(), TERMINATED) from error


@contextmanager
def heeding_sigterm() -> Iterator[None]:
    """SIGTERM raises Terminated inside; only the main thread can have it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def leave(code: int) -> NoReturn:
    """End the process; at once where it was stopped."""
    if code in (INTERRUPTED, TERMINATED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


__all__ = ["INTERRUPTED", "TERMINATED", "Stopped", "Terminated", "heeding_sigterm", "leave", "when_stopped"]
