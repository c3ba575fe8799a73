"""Progress on stderr, so that stdout holds results only: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ao_lab.cli.terminal import progress


@contextmanager
def bar(description: str, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; each call of the given function is one step, with a word about it."""
    with progress.track_progress(description, total) as work:
        yield work.step


@contextmanager
def share(description: str) -> Iterator[Callable[[float, str], None]]:
    """A bar of percents; each call of the given function says which share is done, from 0 to 1, with a word about it."""
    with progress.track_progress(description, 100) as work:
        yield lambda done, word: work.at(min(100, int(100 * done)), word)
