"""What every long command does: says that it goes on, and when it is stopped, what was saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ao_lab.cli.terminal.interrupt import when_stopped
from ao_lab.cli.terminal.progress import lines


@contextmanager
def work(name: str, kept: str, as_json: bool) -> Iterator[None]:
    """Lines about the command `name` (on a terminal too beside JSON, where there are no bars); `kept` where it is stopped."""
    with when_stopped(lambda: f"{kept}; the same command starts again"), lines(name, always=as_json):
        yield


__all__ = ["work"]
