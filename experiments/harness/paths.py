"""Where the experiments keep things: a cache, and reports/.

In a clone both lie in the clone. Installed from a wheel there is no such folder: reports go where the user is, and the cache to
the user's caches. Nothing is ever written beside the installed packages.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ao_lab.install.extras import is_clone
from experiments.harness.lock import alone
from experiments.harness.rows import PARTIAL, ROOT, library_versions

#: What was written, and where.
Written = list[tuple[str, str]]


@dataclass(frozen=True)
class Places:
    """The two folders. The cache can be deleted at any time; reports/ is what a run is for."""

    cache: Path
    reports: Path

    @classmethod
    def default(cls, reports: Path | None = None) -> Places:
        """The folders of a run. `reports`, or $AO_LAB_REPORTS, or `reports/` in the clone, without one in the working folder.
        $AO_LAB_CACHE, or `.cache/ao_lab` in the clone, without one in the user's caches ($XDG_CACHE_HOME, ~/.cache)."""
        cache, chosen = os.environ.get("AO_LAB_CACHE"), reports or os.environ.get("AO_LAB_REPORTS")
        if is_clone():
            caches, home = ROOT / ".cache", ROOT
        else:
            caches, home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"), Path.cwd()
        return cls(
            cache=Path(cache) if cache else caches / "ao_lab",
            reports=Path(chosen) if chosen else home / "reports",
        )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No other run in these folders, and without what killed runs left half written; `experiments.harness.lock.Busy`
        else."""
        folders = dict.fromkeys((self.cache, self.reports))
        with ExitStack() as stack:
            for folder in folders:
                stack.enter_context(alone(folder))
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

    def journal(self, experiment: str, scale: str, device: str, subject: str) -> Path:
        """The journal of one experiment at one scale on one device, about one subject (a trained model, say), by one
        version of torch and numpy."""
        parts = (experiment, scale, device, subject, library_versions())
        name = "-".join(part.replace(" ", "_") for part in parts)
        return self.cache / "rows" / f"{name}.csv"


def shown(path: Path) -> str:
    """A path as a user types it: relative to the working folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
