"""One run at a time in a folder: journals and published rows are read, changed and written as a whole.

The system lets go of a lock when its process ends, however that happens, so a kill leaves none behind. The file stays, and
says nothing where nobody holds it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = ".lock"
#: Where in the file Windows locks a byte: beyond the text, which others read.
BYTE = 1 << 20


class Busy(OSError):
    """Another process works in the folder."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Work in a folder that no other process works in this way; Busy, which names it and its process, where one does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(handle)
        except OSError as error:
            holder = path.read_text(encoding="utf-8").strip() or "another process"
            raise Busy(f"{holder} works in {folder}; wait for it, or choose another folder") from error
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()}\n".encode())
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    """Take the lock of an open file, or raise OSError at once."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, BYTE, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


__all__ = ["Busy", "alone"]
