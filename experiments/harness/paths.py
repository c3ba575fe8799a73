"""Where the experiments keep things: a cache, and reports/.

In a clone both lie in the clone. Installed from a wheel there is no such folder: reports go where the user is, and the cache to
the user's caches. Nothing is ever written beside the installed packages.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ao_lab.install.extras import is_clone
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.revision import state
from experiments.harness.rows import PARTIAL, ROOT, library_versions

#: The file by which a folder is locked. The system lets go of the lock when its process ends, however that happens, so a kill
#: leaves none behind; the file stays, and says nothing where nobody holds it.
NAME = ".lock"
#: Where in the file Windows locks a byte: beyond the text, which others read.
BYTE = 1 << 20


class Busy(OSError):
    """Another process works in the folder."""


@contextmanager
def alone(folder: Path, other: str = "choose another folder") -> Iterator[None]:
    """Work in a folder that no other process works in this way; Busy, which names it and its process, where one does. other:
    how another folder is chosen."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            _lock(handle)
        except OSError as error:
            holder = path.read_text(encoding="utf-8").strip() or "another process"
            raise Busy(f"{holder} works in {folder}; wait for it, or {other}") from error
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


def user_cache() -> Path:
    """The user's cache (`fast.user_cache`)."""
    from fast.user_cache import cache_folder  # which imports torch

    return cache_folder()


#: What was written, and where.
Written = list[tuple[str, str]]


@dataclass(frozen=True)
class Paths:
    """The two folders. The cache can be deleted at any time; reports/ is what a run is for."""

    cache: Path
    reports: Path

    @classmethod
    def default(cls, reports: Path | None = None, *, own: bool = False) -> Paths:
        """The folders of a run. `reports`, or $AO_LAB_REPORTS, or `reports/` in the clone, without one in the working folder.
        own: of a user's own models alone, which do not belong among the committed results: in the clone `own_reports/`.
        $AO_LAB_CACHE, or `.cache/ao_lab` in the clone, without one in the user's caches (`fast.user_cache.cache_folder`)."""
        chosen, clone = reports or os.environ.get("AO_LAB_REPORTS"), is_clone()
        name = "own_reports" if own and clone else "reports"
        in_clone = clone and not os.environ.get("AO_LAB_CACHE")
        return cls(
            cache=ROOT / ".cache" / "ao_lab" if in_clone else user_cache(),
            reports=Path(chosen) if chosen else (ROOT if clone else Path.cwd()) / name,
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other run in these folders, and without what killed runs left half written; `Busy` else."""
        ways = {
            self.reports: "choose another by --reports FOLDER",
            self.cache: "give this run a cache of its own: AO_LAB_CACHE=FOLDER ao-lab ...",
        }
        with ExitStack() as stack:
            for folder in dict.fromkeys((self.cache, self.reports)):
                stack.enter_context(alone(folder, ways[folder]))
            for folder in (self.cache / "rows", self.cache / "models", self.reports, self.data, self.figures):
                for path in folder.glob(f".*{PARTIAL}"):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            yield

    @property
    def data(self) -> Path:
        """Published rows."""
        return self.reports / "data"

    @property
    def figures(self) -> Path:
        """Figures as SVG files."""
        return self.reports / "figures"

    def rows(self, experiment: str) -> Path:
        """The published rows of one experiment."""
        known = EXPERIMENTS.get(experiment)
        return self.data / f"{experiment}.csv{'.gz' * bool(known and known.compressed)}"

    def of(self, reports: Path) -> Paths:
        """The same with another folder of reports."""
        return replace(self, reports=reports)

    def journal(self, experiment: str, scale: str, device: str, subject: str) -> Path:
        """The journal of one experiment at one scale on one device, about one subject (a trained model, say), by one commit and
        one version of torch and numpy."""
        parts = (experiment, scale, device, subject, library_versions(), state())
        name = "-".join(part.replace(" ", "_") for part in parts)
        return self.cache / "rows" / f"{name}.csv"


def shown(path: Path) -> str:
    """A path as a user types it: relative to the working folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
