"""How far long work is, on stderr: a bar on a terminal, elsewhere a plain line at least every ten seconds.

Logs, pipes, CI and editors (TERM=dumb) are no terminals, and silence there cannot be told from a program that hangs. The lines
are written by a thread of their own, so one long step does not silence them. Work of less than ten seconds writes none.

The command line tells of its works so (`ao_lab.cli.terminal`), and `quantize_` of a calibration (`ao_lab.transforms.telling`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


def printable(text: str) -> str:
    """A text without what terminals take for commands: control characters and half surrogates become their escapes.

    Names of layers, tensors and files may be anybody's.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


#: Seconds between two lines.
INTERVAL = 10.0
#: Seconds from which on an estimate is said in minutes.
IN_MINUTES = 120.0
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
    #: How much was done when a step was first finished after a count came, and when: what was kept of an earlier run has no
    #: pace, and the first step compiles and reads what later ones find.
    first: tuple[int, float] | None = None
    warm: bool = False
    #: When the last steps came, and how many at once. Where they come several at a time, each time after a pass that has a
    #: word of its own (a calibration's blocks), the pace is that of the passes after the first (`by_pass`).
    reached: float = 0.0
    together: int = 1
    by_pass: bool = False
    pass_began: int = 0
    #: Whether no later step does less than the first (the unquantized model, which is measured beside each configuration):
    #: its time, in `shortest`, then says from the second step on what the rest takes at least.
    first_is_least: bool = False
    shortest: float = 0.0

    def step(self, word: str = "") -> None:
        """One more step is done."""
        self.at(self.done + 1, word)

    def at(self, done: int, word: str = "", total: int | None = None) -> None:
        """So many steps are done; a word stays until another comes."""
        now, passes = time.monotonic(), done == self.done and word not in ("", self.word)
        if done > self.done:
            self.reached, self.together = now, done - (self.pass_began if self.by_pass else self.done)
        self.pass_began = done if passes else self.pass_began
        self.done, self.word, self.total = done, word or self.word, total or self.total
        if self.total and (self.first is None or (not self.warm and done > self.first[0])):
            self.warm = self.first is not None
            self.shortest = 0.0 if self.first is None else (now - self.first[1]) / (done - self.first[0])
            self.first = (done, now)
        elif self.warm and passes and not self.by_pass:
            self.first, self.reached, self.by_pass = (done, now), now, True

    def line(self, began: float) -> str:
        """As a line says it; began: when the command did, so that one clock runs through all of its works."""
        count = "" if self.total is None else f" {self.done} of {self.total}"
        now = time.monotonic()
        parts = [f"{self.name}{count}", self.word, f"{now - began:.0f} s", self.left(now)]
        return ", ".join(part for part in parts if part)

    def left(self, now: float) -> str:
        """About how long the rest takes, at the pace from the first count to the last; "" where there is none to judge by, and
        where the last step takes longer than that. While a step does, what is left stays as it is."""
        if self.total is None or self.first is None or not self.first[0] <= self.done < self.total:
            return ""
        if self.done == self.first[0]:
            return self._at_least(now) if self.first_is_least and self.warm else ""
        pace = (self.reached - self.first[1]) / (self.done - self.first[0])
        later, waited = self.total - self.done - self.together, now - self.reached
        this = max(pace * self.together - waited, 0.0)
        left = pace * max(later, 0) + this
        if round(left) < 1:  # "0 s" would be said of the whole command, which goes on to write
            return ""
        return f"about {left:.0f} s left" if left < IN_MINUTES else f"about {left / 60:.0f} min left"

    def _at_least(self, now: float) -> str:
        """The same while the second step runs, by the time of the first."""
        this = max(self.shortest - (now - self.reached), 0.0)
        left = this + self.shortest * ((self.total or 0) - self.done - 1)
        return f"at least {left:.0f} s left" if left < IN_MINUTES else f"at least {left / 60:.0f} min left"


class Lines:
    """Writes a line about the innermost work every INTERVAL seconds, while there is any."""

    def __init__(self) -> None:
        self.under_way: list[Work] = []
        self.lock = threading.Lock()
        self.stop = threading.Event()

    def begin(self, work: Work) -> None:
        """Add work; the first starts the thread."""
        with self.lock:
            if self.under_way:
                self.under_way[-1].word = ""  # what it was at is over
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
                line = self.under_way[-1].line(self.under_way[0].started) if self.under_way else ""
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
    name: str, total: int | None = None, *, plain: bool = False, transient: bool = False, after: float = 0.0
) -> Iterator[Work]:
    """A bar on a terminal, else lines. The yielded work's `step(word)` and `at(done, word, total)` move it.

    plain: lines even on a terminal. transient: the bar leaves with the work. after: seconds from which on a bar is shown. Bars
    do not lie inside each other.
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
    shown = Progress(*columns, console=Console(stderr=True), transient=transient)
    task = shown.add_task(name, total=total, word="")

    class Shown(Work):
        def at(self, done: int, word: str = "", total: int | None = None) -> None:
            super().at(done, word, total)
            shown.update(task, completed=self.done, total=self.total, word=printable(self.word))

    with _started(shown, after):
        yield Shown(name, total)


@contextmanager
def _started(shown: Any, after: float) -> Iterator[None]:
    """A bar of rich that is shown inside, from so many seconds on."""
    timer = threading.Timer(after, shown.start)
    timer.daemon = True
    if after:
        timer.start()
    else:
        shown.start()
    try:
        yield
    finally:
        timer.cancel()
        if after:
            timer.join()  # one that has just begun is stopped below
        shown.stop()
