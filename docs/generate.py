"""What the site takes from code and results: API pages, tables, pictures; ``docs/conf.py`` writes them first."""

from __future__ import annotations

from pathlib import Path

from docs import api


def write(folder: Path) -> None:
    """Write all parts; a file whose text stays the same is left alone, so that Sphinx reads only what has changed."""
    for name, text in api.pages().items():
        put(folder / "api" / name, text)


def put(path: Path, text: str) -> None:
    """Write one file, where it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
