"""How the command line speaks: results to stdout, progress and errors to stderr, JSON without NaN.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ao_lab.install.extras import WrongInput as WrongInput
from ao_lab.progress import Work as Work
from ao_lab.progress import is_live as is_live
from ao_lab.progress import lines as lines
from ao_lab.progress import printable as printable
from ao_lab.progress import say as say
from ao_lab.progress import track_progress as track_progress

if TYPE_CHECKING:
    from rich.console import Console


# Output that goes to a file or a pipe is laid out for this width, whatever the terminal of the moment.
PIPE_WIDTH = 160
SHORT_NUMBER = 9
# A narrower terminal wraps whole lines, which reads better than words cut in two.
NARROWEST = 60
#: Wider than any table: what is measured at this width is not cut.
WHOLE = 10_000


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
