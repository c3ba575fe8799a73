"""What is asked of a machine before work begins: a device that is there, a folder that can be written, room for the result."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ao_lab.cli.terminal.output import WrongInput

#: Names of models on the Hub.
ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)


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


def without_model(folder: Path, writers: str) -> str:
    """What to say of a folder that has no config.json; of a name on the Hub, the command that fetches it."""
    if not folder.exists() and ON_HUB.fullmatch(str(folder)):
        name = folder.name
        return (
            f"there is no folder {folder}; names on the Hub are not fetched: hf download {folder} --local-dir {name} does, "
            f"then give {name}"
        )
    return f"{folder} has no config.json; give a folder that {writers} wrote"


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
    """A folder that was not there, or empty, is so again when what goes on inside fails or is stopped."""
    was_there = folder.is_dir()
    ours = not folder.exists() or (was_there and not any(folder.iterdir()))
    try:
        yield
    except BaseException:
        if ours and folder.is_dir():
            empty(folder)
            if not was_there:
                folder.rmdir()
        raise


def empty(folder: Path) -> None:
    """Delete what lies in a folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


__all__ = ["check_device", "check_room", "check_writable", "whole_or_nothing", "without_model"]
