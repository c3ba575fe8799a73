"""Files of a model's folder: which are its own, and how they are written.

What lies in a folder that somebody else made is its own, what a link out of it leads to is not. The Hub's cache, whose folders
are links into blobs of the same repository, counts as one folder.

What the disk refuses is an OSError. Files are written into a new folder beside those that they replace, on the same file
system, and renamed at the end; a write that fails, or that is interrupted, leaves the folder as it was.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Names of models on the Hub, and of their repositories: owner/name.
ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
#: Bytes of a page of text, such as a model card: the longest have some hundred thousand.
LARGEST_PAGE = 16 * 2**20


def without(folder: Path, what: str, writers: str) -> str:
    """What to say of a folder that lacks `what`, which `writers` write; of a name on the Hub, the command that fetches it."""
    if folder.is_file():
        return f"{folder} is a file; give the folder that it lies in, {folder.parent}"
    if folder.exists():
        return f"{folder} has {what}; give a folder that {writers} wrote"
    if not ON_HUB.fullmatch(str(folder)):
        named = "" if len(folder.parts) > 1 else ", or one that ao-lab pretrained NAME made"
        return f"there is no folder {folder}; give a folder that {writers} wrote{named}"
    return (
        f"there is no folder {folder}; names on the Hub are not fetched: hf download {folder} --local-dir {folder.name} does, "
        f"then give {folder.name}"
    )


def hub_name(folder: Path) -> str | None:
    """owner/name of a snapshot in the Hub's cache; None for other folders."""
    place = folder.resolve()
    kind, *parts = place.parent.parent.name.split("--")
    return "/".join(parts) if place.parent.name == "snapshots" and kind == "models" and parts else None


def roots(folder: Path) -> tuple[Path, ...]:
    """Where the files of a folder may lie: in it, and for a snapshot of the Hub's cache in the blobs of its repository."""
    place = folder.resolve()
    blobs = place.parent.parent / "blobs"
    return (place, blobs) if place.parent.name == "snapshots" and blobs.is_dir() else (place,)


def resolved(path: Path) -> Path | None:
    """Where a path leads; None for a link that leads in a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        # RuntimeError up to Python 3.12; from 3.13 on there is no error, and nothing at the end of the path.
        return None


def leads_out(path: Path, places: tuple[Path, ...]) -> bool:
    """Whether a file lies outside of all of these folders; what leads nowhere does not."""
    place = resolved(path)
    return place is not None and not any(place.is_relative_to(root) for root in places)


def links_out(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of a folder's files that are links out of it."""
    places = roots(folder)
    return [name for name in names if (folder / name).is_symlink() and leads_out(folder / name, places)]


def page(path: Path) -> str | None:
    """The text of a folder's own file, such as its card; None where there is none, for what is no page of text, and for a link
    out of the folder, whose text is not the folder's."""
    if not path.is_file() or links_out(path.parent, [path.name]):
        return None
    status = path.stat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST_PAGE:
        return None
    return path.read_text(encoding="utf-8", errors="replace")


#: How folders of unfinished files begin.
PARTIAL = ".ao_lab-partial-"


def save_file(
    tensors: dict[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, contiguous and apart from each other, to one file; OSError that names it where that fails.

    safetensors makes files that their owner alone may read; who may read this one says the umask, as of files beside it. File
    systems that have one mode for all files, and refuse to change it, are asked nothing.
    """
    import safetensors.torch
    from safetensors import SafetensorError

    try:
        path.touch()
        mode = stat.S_IMODE(path.stat().st_mode)
        safetensors.torch.save_file(tensors, path, metadata=None if metadata is None else dict(metadata))
        if stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other process or thread replaces files of a folder meanwhile; they wait. Where the system, or its file system, has no
    such locks, nobody waits."""
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def staged(folder: Path, then: Callable[[set[str]], None] | None = None) -> Iterator[Path]:
    """An empty folder for new files of `folder`; when the block ends they replace those of the same names, weights first.

    A block that raises changes nothing. Sub-folders are merged. Each file is replaced at once, the index and the configuration
    after the weights that they describe. `then` is called with their names before another process replaces files: two that
    removed what the other has just written would leave nothing.
    """
    place = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))
    try:
        yield place
        files = [path.relative_to(place) for path in place.rglob("*") if path.is_file()]
        refuse_folders(folder / name for name in files)
        with locked(folder):
            for name in sorted(files, key=lambda name: (name.suffix == ".json", str(name))):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).replace(folder / name)
            if then is not None:
                then({str(name) for name in files})
    finally:
        shutil.rmtree(place, ignore_errors=True)


def refuse_folders(paths: Iterable[Path]) -> None:
    """IsADirectoryError where a folder lies in the place of a file that is to be written or replaced."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            raise IsADirectoryError(f"{path} is a folder, and a file is to be written there; move it away")


def file_to_write(path: str | Path) -> Path:
    """The path of one file that is to be written. ValueError where its folder is not there: a mistyped one would be made;
    IsADirectoryError where the path is a folder."""
    path = Path(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder, so {path.name} cannot be written there; make it first")
    refuse_folders([path])
    return path


def refuse_file(folder: Path) -> None:
    """NotADirectoryError where a file lies in the place of a folder that is to be written."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(
            f"{folder} is a file, and a folder is to be written there; give another name, or move it away"
        )


def write_text(path: Path, text: str) -> None:
    """Write a file of text in one step: readers find the earlier one or all of the new one."""
    with staged(path.parent) as place:
        (place / path.name).write_text(text, encoding="utf-8")


def rewrite_text(path: Path, made: Callable[[], str]) -> None:
    """The same of a text that is made from what the file holds: what another process wrote before is read, and none writes
    meanwhile."""
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=path.parent) as place, locked(path.parent):
        refuse_folders([path])
        new = Path(place) / path.name
        new.write_text(made(), encoding="utf-8")
        new.replace(path)
