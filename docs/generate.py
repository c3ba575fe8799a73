"""What the site takes from code and results: API pages, tables, pictures; ``docs/conf.py`` writes them first."""

from __future__ import annotations

from pathlib import Path

from docs import api, numerics, training


def write(folder: Path) -> None:
    """Write all parts; a file whose text stays the same is left alone, so that Sphinx reads only what has changed."""
    pages = {f"api/{name}": text for name, text in api.pages().items()}
    pages |= {f"numerics/{name}": text for name, text in numerics.pages().items()}
    pages["parts/training.md"] = training.text()
    for name, text in pages.items():
        put(folder / name, text)
    for path in folder.rglob("*.md"):
        if path.relative_to(folder).as_posix() not in pages:
            path.unlink()
    numerics.draw(folder / "numerics", "".join(pages[f"numerics/{name}"] for name in numerics.pages()))


def put(path: Path, text: str) -> None:
    """Write one file, where it changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
