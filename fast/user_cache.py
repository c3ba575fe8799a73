"""The user's cache: where it is, whether its files are the user's own, and what tells files of other versions apart.

Compiled kernels are read from it and run, so a file is read only if nobody else can have written it: it and its folder belong
to the user or to root, and no other user may write to them. Folders that are made here are the user's alone (mode 0700).
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import warnings
from functools import lru_cache
from hashlib import sha256
from pathlib import Path


class NoCacheFolder(FileNotFoundError):
    """There is no place for a cache: the user has no home folder, and no variable names another."""


class UntrustedFile(PermissionError):
    """Another user could have written a file of the cache."""


def cache_folder() -> Path:
    """`AO_LAB_CACHE`, else `ao_lab` in `XDG_CACHE_HOME`, else in `.cache` of the home folder; it need not exist.

    An XDG_CACHE_HOME that is no absolute path is ignored, as its specification wants. NoCacheFolder (an OSError, as for a file
    that is not there) where neither is set and the user has no home, or one that is no absolute path: kernels that lie in
    whatever folder one works in are not to be run.
    """
    if own := os.environ.get("AO_LAB_CACHE"):
        return Path(own)
    if (caches := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return caches / "ao_lab"
    try:
        home = Path.home()
    except RuntimeError:
        home = Path()
    if not home.is_absolute():
        raise NoCacheFolder(
            "there is no home folder to keep a cache in; set AO_LAB_CACHE to a folder that you alone can write to"
        )
    return home / ".cache" / "ao_lab"


def read_own(path: Path) -> bytes:
    """The bytes of a file that nobody else can have written; UntrustedFile otherwise, other OSErrors as `open` raises them."""
    refuse_foreign(path.parent)
    with open(path, "rb", opener=_without_waiting) as file:
        # Of the open file, which cannot be exchanged any more.
        status = os.fstat(file.fileno())
        _refuse(status, path)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedFile(f"{path} is no regular file")
        return file.read()


def _without_waiting(path: str, flags: int) -> int:
    """Open a file; a pipe that nobody writes to would hold up the process."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def write_own(path: Path, content: bytes) -> None:
    """Write a file that is the user's alone, all or nothing, its folder made where it is missing; OSError where that fails."""
    for folder in (*reversed(path.parent.parents), path.parent):
        # Whatever the umask is, also those above: mkdir(parents=True) gives them its default mode.
        folder.mkdir(mode=0o700, exist_ok=True)
    refuse_foreign(path.parent)
    # Made with mode 0600.
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def refuse_foreign(path: Path) -> None:
    """UntrustedFile where another user owns a file or folder or may write to it; FileNotFoundError where it is missing."""
    _refuse(path.stat(), path)


def _refuse(status: os.stat_result, path: Path) -> None:
    if not hasattr(os, "geteuid"):  # Windows: a user's folders are closed to others by their access lists
        return
    if status.st_uid not in (os.geteuid(), 0):
        raise UntrustedFile(f"{path} belongs to another user (uid {status.st_uid})")
    shared = status.st_mode & stat.S_IWGRP and not _is_private(status.st_gid)
    if shared or status.st_mode & stat.S_IWOTH:
        raise UntrustedFile(f"{path} can be written by other users (chmod go-w closes it)")


def _is_private(gid: int) -> bool:
    """Whether a group is the user's own, with nobody else in it: many systems give each user one and a umask of 002."""
    import grp
    import pwd

    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


#: What packages are made of: programs and their tables.
SOURCES = (".py", ".toml")


@lru_cache(maxsize=4)
def sources_key(*packages: str) -> str:
    """A hash of the sources of imported packages (17 ms for the three here), for what is kept on disk and has to be made again
    by others; the same on every machine."""
    found = sha256()
    for package in packages:
        root = Path(str(sys.modules[package].__file__)).parent
        for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCES):
            found.update(f"{package}/{path.relative_to(root).as_posix()}\0".encode())
            found.update(sha256(path.read_bytes()).digest())
    return found.hexdigest()


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Say something about the cache as a UserWarning, once in a process."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, UserWarning, stacklevel=3)


__all__ = [
    "NoCacheFolder",
    "UntrustedFile",
    "cache_folder",
    "read_own",
    "refuse_foreign",
    "sources_key",
    "warn_once",
    "write_own",
]
