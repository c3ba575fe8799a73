"""Where the experiments keep things: the cache of this clone, and reports/."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from experiments.rows import ROOT, library_versions


@dataclass(frozen=True)
class Places:
    """The two folders. The cache can be deleted at any time; reports/ is what a run is for."""

    cache: Path
    reports: Path

    @classmethod
    def default(cls) -> Places:
        """`.cache/ao_lab` in the clone, or $AO_LAB_CACHE; `reports/` in the clone, or $AO_LAB_REPORTS."""
        cache = os.environ.get("AO_LAB_CACHE")
        reports = os.environ.get("AO_LAB_REPORTS")
        return cls(
            cache=Path(cache) if cache else ROOT / ".cache" / "ao_lab",
            reports=Path(reports) if reports else ROOT / "reports",
        )

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
