"""Links in a folder that somebody else made: what lies in the folder is its own, what a link out of it leads to is not.

The Hub's cache, whose folders are links into blobs of the same repository, counts as one folder.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

#: Bytes of a page of text, such as a model card: the longest have some hundred thousand.
LARGEST_PAGE = 16 * 2**20


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


__all__ = ["leads_out", "links_out", "page", "resolved", "roots"]
