"""Progress on stderr: a bar on a terminal, elsewhere a plain line at least every ten seconds of work.

Logs, pipes, CI and editors (TERM=dumb) are no terminals, and silence there cannot be told from a program that hangs. The lines
are written by a thread of their own, so one long step does not silence them. Work of less than ten seconds says nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ao_lab.cli.terminal.output import printable

#: Seconds between two lines.
INTERVAL = 10.0
#: Values of TERM of terminals that cannot move the cursor.
DUMB = ("dumb", "unknown")


@dataclass(eq=False)
class Work:
    """One thing that is under way: its name, how much of it is done, and a word about it."""

    name: str
    total: int | None = None
    done: int = 0
    word: str = ""
    started: float = field(default_factory=time.monotonic)

    def step(self, word: str = "") -> None:
        """One more step is done."""
        self.at(self.done + 1, word)

    def at(self, done: int, word: str = "", total: int | None = None) -> None:
        """So many steps are done; a word stays until another comes."""
        self.done, self.word, self.total = done, word or self.word, total or self.total

    def __str__(self) -> str:
        """As a line says it."""
        count = "" if self.total is None else f" {self.done} of {self.total}"
        parts = [f"{self.name}{count}", self.word, f"{time.monotonic() - self.started:.0f} s"]
        return ", ".join(part for part in parts if part)


class Lines:
    """Writes a line about the innermost work every INTERVAL seconds, while there is any."""

    def __init__(self) -> None:
        self.under_way: list[Work] = []
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def begin(self, work: Work) -> None:
        """Add work; the first starts the thread."""
        with self.lock:
            self.under_way.append(work)
            if len(self.under_way) > 1:
                return
            self.stop = threading.Event()
            threading.Thread(target=self._write, args=(self.stop,), daemon=True, name="progress").start()

    def end(self, work: Work) -> None:
        """Take work away; with the last the thread ends."""
        with self.lock:
            self.under_way.remove(work)
            if not self.under_way:
                self.stop.set()

    def _write(self, stop: threading.Event) -> None:
        while not stop.wait(INTERVAL):
            with self.lock:
                line = str(self.under_way[-1]) if self.under_way else ""
            if line:
                say(line)


LINES = Lines()


def say(line: str) -> None:
    """A line on stderr now. A stderr that is closed does not end the work that it was to tell of."""
    try:
        sys.stderr.write(f"ao-lab: {printable(line)}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        return


def is_live() -> bool:
    """Whether stderr is a terminal on which a bar can move."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in DUMB


@contextmanager
def lines(name: str, total: int | None = None, *, always: bool = False) -> Iterator[Work]:
    """Plain lines about work, inside which there may be other work.

    On a terminal, where bars show what goes on, nothing unless `always`.
    """
    work = Work(name, total)
    if is_live() and not always:
        yield work
        return
    LINES.begin(work)
    try:
        yield work
    finally:
        LINES.end(work)


@contextmanager
def track_progress(
    name: str, total: int | None = None, *, plain: bool = False, transient: bool = False
) -> Iterator[Work]:
    """A bar on a terminal, else lines. The yielded work's `step(word)` and `at(done, word, total)` move it.

    plain: lines even on a terminal. transient: the bar leaves with the work. Bars do not lie inside each other.
    """
    if plain or not is_live():
        with lines(name, total, always=plain) as work:
            yield work
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        # Names of layers and methods hold brackets, which are no markup.
        TextColumn("{task.description:<24}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[word]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=transient) as shown:
        task = shown.add_task(name, total=total, word="")

        class Shown(Work):
            def at(self, done: int, word: str = "", total: int | None = None) -> None:
                super().at(done, word, total)
                shown.update(task, completed=self.done, total=self.total, word=printable(self.word))

        yield Shown(name, total)


__all__ = ["Work", "is_live", "lines", "say", "track_progress"]
