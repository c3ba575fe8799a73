"""How the command line speaks: results to stdout, progress and errors to stderr, JSON without NaN.

Progress is a bar on a terminal, elsewhere a plain line at least every ten seconds of work: logs, pipes, CI and editors
(TERM=dumb) are no terminals, and silence there cannot be told from a program that hangs. The lines are written by a thread of
their own, so one long step does not silence them. Work of less than ten seconds says nothing.

Ctrl-C and SIGTERM give one line that says what was kept and how to go on, and the exit code that shells expect. A thread that
computes cannot be interrupted. What commands keep is on disk whenever they are stopped, so the process ends at once.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ao_lab.install.extras import WrongInput as WrongInput

if TYPE_CHECKING:
    from rich.console import Console


# Output that goes to a file or a pipe is laid out for this width, whatever the terminal of the moment.
PIPE_WIDTH = 160
SHORT_NUMBER = 9
# A narrower terminal wraps whole lines, which reads better than words cut in two.
NARROWEST = 60
#: Wider than any table: what is measured at this width is not cut.
WHOLE = 10_000


def printable(text: str) -> str:
    """A text without what terminals take for commands: control characters and half surrogates become their escapes.

    Names of layers, tensors and files may be anybody's.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def console() -> Console:
    """The terminal; of a fixed width where there is none. Text on it is `printable`."""
    from rich.console import Console

    class PlainConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)

        def on_broken_pipe(self) -> None:
            """Rich would end the program, as if its work had failed: `whole_or_nothing` would delete a result."""
            self.quiet = True
            raise BrokenPipeError

    width = max(shutil.get_terminal_size().columns, NARROWEST) if sys.stdout.isatty() else PIPE_WIDTH
    # What is shown holds brackets and colons of its own, which are no markup.
    return PlainConsole(highlight=False, markup=False, emoji=False, width=width)


#: Loggers of libraries that warn, while transformers imports them, of parts that ao_lab does not use: torchao's kernels that
#: this machine cannot load, and how torchao registers its enumerations.
OTHERS = ("torchao", "torch.utils._pytree")


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Errors alone of OTHERS, unless the command line asks for more (-v); their levels come back."""
    import logging

    loggers = [logging.getLogger(name) for name in OTHERS]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.level, logging.ERROR))
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


#: How the line about a version is switched off, as of any warning of Python.
SILENCED = "PYTHONWARNINGS='ignore:ao_lab was tested' hides this"


@contextmanager
def short_warnings() -> Iterator[None]:
    """Of libraries that are older or newer than tested one line each, without file and source; other warnings as ever."""
    import warnings

    from ao_lab.install.versions import UntestedVersion

    before = warnings.showwarning

    def show(message: Any, category: Any, *where: Any, **more: Any) -> None:
        if issubclass(category, UntestedVersion):
            say(f"{message} ({SILENCED})")
        else:
            before(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def log_to_stderr(verbose: int) -> None:
    """Show what the logger "ao_lab" says: steps, or from 2 on details as well; a second call changes the level alone. Warnings
    of OTHERS are shown again."""
    import logging

    for name in OTHERS:
        logging.getLogger(name).setLevel(logging.NOTSET)
    logger = logging.getLogger("ao_lab")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


def print_json(value: Any) -> None:
    """One JSON document on stdout. Numbers that JSON lacks become the strings "nan", "inf" and "-inf"."""
    sys.stdout.write(json.dumps(strict(value), indent=2, allow_nan=False) + "\n")


def strict(value: Any) -> Any:
    """The same value from what JSON has: NaN and infinities as strings, tuples as lists, keys as strings."""
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[str] = ()
) -> None:
    """A table on stdout; the columns named in `numbers` are set to the right.

    Where a terminal is too narrow for its words, each row is its first cell and a paragraph of the others.
    """
    from rich import box
    from rich.measure import Measurement
    from rich.table import Table

    out, cells = console(), [[printable(cell) for cell in row] for row in rows]
    right = set(numbers)
    table = Table(
        title=printable(title),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        # Names stay whole, however narrow the terminal.
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column == columns[0])
    for row in cells:
        table.add_row(*row)
    if Measurement.get(out, out.options.update(max_width=WHOLE), table).minimum > out.width:
        print_paragraphs(out, title, columns, cells)
        return
    out.print(table)


def print_paragraphs(out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table as text: the first cell of a row, and below it "column: value" of those that say something."""
    from rich.padding import Padding

    out.print(f"{printable(title)}\n")
    for first, *others in rows:
        told = "; ".join(
            f"{name}: {cell.removesuffix('.')}"
            for name, cell in zip(columns[1:], others, strict=True)
            if cell not in ("", "-")
        )
        out.print(first)
        out.print(Padding(told, (0, 0, 0, 4)))


def number(value: float) -> str:
    """A float32 value in as few digits as tell it from its neighbours."""
    import numpy as np

    return str(np.float32(value)).removesuffix(".0")


def short_number(value: float) -> str:
    """The same where it is short, and three significant digits otherwise."""
    exact = number(value)
    return exact if len(exact) <= SHORT_NUMBER else f"{value:.3g}"


# What is asked of a machine before work begins: a device that is there, a folder that can be written, room for the result.


def check_device(device: str | None) -> None:
    """WrongInput where CUDA is asked for and torch sees no GPU."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise WrongInput(
                "--device cuda: torch sees no GPU here; use --device cpu, or see why with ao-lab doctor"
            )


def check_writable(folder: Path, what: str) -> None:
    """WrongInput unless files can be made in a folder, which need not exist yet; nothing stays behind.

    what: how the message calls the folder, for instance "OUT_DIR".
    """
    if folder.is_symlink() and not folder.exists():
        raise WrongInput(f"{what} {folder} is a link that leads nowhere; remove it, or choose another folder")
    place = nearest(folder)
    if not place.is_dir():
        raise WrongInput(f"{what} {folder}: {place} is a file, and a folder is needed there; choose another")
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".ao_lab-") as result:
            (Path(result) / "written").write_bytes(b"x")
    except OSError as error:
        raise WrongInput(
            f"{what} {folder} cannot be written: {error.strerror or error}; choose another folder"
        ) from error


def nearest(folder: Path) -> Path:
    """The folder, or the nearest of those above it that exists."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def check_room(folder: Path, least: int, what: str) -> None:
    """WrongInput where a disk has fewer bytes left than a result takes at least."""
    free = shutil.disk_usage(nearest(folder)).free
    if free < least:
        raise WrongInput(
            f"{what} {folder}: {free} bytes are free on its disk and the result takes at least {least}; make room, or choose "
            "another disk"
        )


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[None]:
    """A folder that was not there, or empty, is so again when what goes on inside fails or is stopped.

    A reader of stdout that goes away (`| head`) is no failure: what is printed there is about a folder that is whole.
    """
    was_there = folder.is_dir()
    ours = not folder.exists() or (was_there and not any(folder.iterdir()))
    try:
        yield
    except BrokenPipeError:
        raise
    except BaseException:
        if ours and folder.is_dir():
            empty(folder)
            if not was_there:
                folder.rmdir()
        raise


def check_new_folder(folder: Path) -> None:
    """WrongInput where a result would fall among other files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WrongInput(f"{folder} is there already and not an empty folder; choose another one")


def empty(folder: Path) -> None:
    """Delete what lies in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


# What every long command does: says that it goes on, and when it is stopped, what was saved.


@contextmanager
def work(
    name: str, kept: str, as_json: bool, resume: Path | None = None, calibrated: Path | None = None
) -> Iterator[None]:
    """Lines about the command `name` (on a terminal too beside JSON, where there are no bars); where it is stopped, `kept`.
    resume: the folder where it keeps blocks that are finished; how many there are is said first, and where it is stopped.
    calibrated: the folder of a model that is calibrated, which says how many blocks there are; without `resume` an option
    that keeps them is named where it is stopped."""
    blocks = None if calibrated is None else blocks_of(calibrated)
    of = "" if blocks is None else f" of {blocks}"
    hint = "" if calibrated is None or resume is not None else KEEPS
    if before := finished_blocks(resume):
        say(f"resuming: {before}{of} finished blocks in {resume}")

    def told() -> str:
        if done := finished_blocks(resume):
            return (
                f"{kept}; {done}{of} finished blocks are in {resume}, the same command continues after them"
            )
        return f"{kept}; the same command starts again{hint}"

    with when_stopped(told), lines(name, always=as_json) as whole:
        whole.word = "starting"
        yield


#: What a stopped calibration says that kept nothing.
KEEPS = " from the beginning; with --resume FOLDER finished blocks are kept, and it continues after them"


def blocks_of(model: Path) -> int | None:
    """Transformer blocks of a model's folder, as its config.json counts them; None where it does not say."""
    try:
        fields = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return None
    count = fields.get("num_hidden_layers") if isinstance(fields, dict) else None
    return count if isinstance(count, int) else None


def finished_blocks(folder: Path | None) -> int:
    """Files of blocks that a calibration has finished."""
    return 0 if folder is None else sum(1 for _ in folder.glob("block-*.pt"))


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
        if self.total is None or self.first is None or not self.first[0] < self.done < self.total:
            return ""
        pace = (self.reached - self.first[1]) / (self.done - self.first[0])
        later, waited = self.total - self.done - self.together, now - self.reached
        this = max(pace * self.together - waited, 0.0)
        left = pace * max(later, 0) + this
        if round(left) < 1:  # "0 s" would be said of the whole command, which goes on to write
            return ""
        return f"about {left:.0f} s left" if left < IN_MINUTES else f"about {left / 60:.0f} min left"


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


def kept_in(folder: Path | None, file: str) -> str:
    """What a stopped command says that writes what it has measured into a file of --out."""
    if folder is None:
        return "nothing was kept (--out DIR does)"
    if (folder / file).is_file():
        return f"what was measured is in {folder}; the same command goes on from there"
    return "nothing was measured yet; the same command starts again"


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
