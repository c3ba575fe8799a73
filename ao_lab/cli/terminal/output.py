"""How the command line speaks: results to stdout, progress and errors to stderr, JSON without NaN."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

# Output that goes to a file or a pipe is laid out for this width, whatever the terminal of the moment.
PIPE_WIDTH = 160
SHORT_NUMBER = 9
# A narrower terminal wraps whole lines, which reads better than columns of one letter.
NARROWEST = 100


class WrongInput(Exception):
    """The user asked for something that does not exist: one line, exit code 2."""


def printable(text: str) -> str:
    """A text without what terminals take for commands: control characters and half surrogates become their escapes.

    Names of layers, tensors and files may be anybody's.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def console() -> Console:
    """The terminal, at least as wide as tables need; of a fixed width where there is none. Text on it is `printable`."""
    from rich.console import Console

    class PlainConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)

    width = max(shutil.get_terminal_size().columns, NARROWEST) if sys.stdout.isatty() else PIPE_WIDTH
    # What is shown holds brackets and colons of its own, which are no markup.
    return PlainConsole(highlight=False, markup=False, emoji=False, width=width)


def log_to_stderr(verbose: int) -> None:
    """Show what the logger "ao_lab" says: steps, or from 2 on details as well; a second call changes the level alone."""
    import logging

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
    """A table on stdout; the columns named in `numbers` are set to the right."""
    from rich import box
    from rich.table import Table

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
    for row in rows:
        table.add_row(*map(printable, row))
    console().print(table)


def number(value: float) -> str:
    """A float32 value in as few digits as tell it from its neighbours."""
    import numpy as np

    return str(np.float32(value)).removesuffix(".0")


def short_number(value: float) -> str:
    """The same where it is short, and three significant digits otherwise."""
    exact = number(value)
    return exact if len(exact) <= SHORT_NUMBER else f"{value:.3g}"
