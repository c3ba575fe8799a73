"""Links to results: in the repository they lead to ``reports/NAME.md``, on the site to a copy of the report's own page."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

REPORTS = Path(__file__).resolve().parents[1] / "reports"
LINK = re.compile(r"\]\((?:\.\./)+reports/([\w-]+)\.md(?:#[\w-]+)?\)")
#: What of the reports is not part of the site: rows, and the same pages as Markdown.
LEFT = ("data", "gpu", "*.md", ".lock")


def connect(app: Any) -> None:
    """Rewrite links as pages are read, and copy the reports when they are written."""
    app.connect("source-read", rewrite)
    app.connect("build-finished", copy)


def rewrite(app: Any, name: str, content: list[str]) -> None:
    """Links of one page; ValueError where there is no such report."""
    up = "../" * name.count("/")
    content[0] = LINK.sub(lambda found: f"](reports:{up}reports/{page(found[1], name)})", content[0])


def page(name: str, source: str) -> str:
    """The page of a report; one that is Markdown alone is on the first. ValueError for none, with who links it."""
    if not (REPORTS / f"{name}.md").exists():
        raise ValueError(f"docs/{source}.md has a link to reports/{name}.md, which is not there")
    name = name if (REPORTS / f"{name}.html").exists() else "index"
    return f"{name}.html"


def copy(app: Any, error: Exception | None) -> None:
    """Pages, figures and scripts of the reports beside the site."""
    if error is None and app.builder.format == "html":
        shutil.copytree(
            REPORTS, Path(app.outdir) / "reports", ignore=shutil.ignore_patterns(*LEFT), dirs_exist_ok=True
        )
