"""The record of what each run ran on, ``environment.json``: reading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_runs(path: Path) -> dict[str, dict[str, Any]]:
    """All recorded runs by name."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def run_name(experiment: str, scale: str, device: str, corpus: str = "") -> str:
    """How a run is called. corpus: the source of its corpus, where that is not the default."""
    return "/".join((experiment, scale, device, *([corpus] if corpus else ())))
