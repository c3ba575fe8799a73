"""Pages: ``reports/index.html``, which needs no other file, and Markdown beside it. They read rows and nothing else.

(The record of what each run ran on, ``environment.json``, counts as part of the rows.) The page module of an experiment has
TITLE, ABOUT (what is measured), FEATURED (names of figures, the first of which heads the page), `findings(rows)` (sentences),
`sections(rows)` (everything, as plain data of `experiments.report.content`) and perhaps `comparisons(rows)` (published values
beside measured ones). This module turns them into HTML and Markdown. Lines whose rows are stale are marked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.harness import rows as tidy
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.run_records import read_runs
from experiments.report.content import STALE, Comparison, Drawing, Section, Table
from experiments.report.datatables import bundle
from experiments.report.plots import svg
from experiments.report.scoreboard import scoreboard
from experiments.report.staleness import forget, stale_count

__all__ = ["STALE", "Drawing", "Page", "Section", "Table", "make_page", "svg", "write_pages"]

TEMPLATES = Path(__file__).resolve().parent / "templates"
#: The first value in a cell, by which a column is sorted.
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
#: Cells that are values, perhaps with an error, a mark or parentheses: what else holds digits is a name.
VALUE = re.compile(rf"\(?[-+]?\d+(\.\d+)?%?( ± \d+(\.\d+)?)?\)?( {STALE})?")


@dataclass(frozen=True)
class Page:
    """One experiment: what its page says, the runs that it comes from, how many rows there are and how many are stale."""

    name: str
    title: str
    about: Sequence[str]
    findings: Sequence[str]
    featured: Drawing | None
    sections: Sequence[Section]
    comparisons: Sequence[Comparison]
    runs: Sequence[dict[str, Any]]
    rows: int
    stale: int
    pictures: dict[str, str] = field(default_factory=dict)


def write_pages(places: Paths) -> Written:
    """Draw and write everything from the published rows; returns what was written."""
    forget()
    pages = [page for name in EXPERIMENTS if (page := make_page(places, name))]
    board = scoreboard([one for page in pages for one in page.comparisons])
    written: Written = []
    for page in pages:
        for name, picture in page.pictures.items():
            tidy.write_text(places.figures / f"{name}.svg", picture)
        path = places.reports / f"{page.name}.md"
        tidy.write_text(path, render("page.md.j2", page=page, stale=STALE))
        written.append((f"{page.name}: page", shown(path)))
    for template, name in (("index.html.j2", "index.html"), ("README.md.j2", "README.md")):
        path = places.reports / name
        scripts = bundle() if template.endswith(".html.j2") else None
        text = render(template, pages=pages, scoreboard=board, stale=STALE, datatables=scripts)
        tidy.write_text(path, text)
        written.append(("report", shown(path)))
    return written


def make_page(places: Paths, name: str) -> Page | None:
    """The page of one experiment, or None where it has no rows."""
    rows = tidy.read(places.data / f"{name}.csv")
    if not rows:
        return None
    module = EXPERIMENTS[name].page_module()
    sections = module.sections(rows)
    drawings = named(name, [drawing for section in sections for drawing in section.drawings])
    return Page(
        name=name,
        title=module.TITLE,
        about=getattr(module, "ABOUT", ()),
        findings=module.findings(rows) if hasattr(module, "findings") else (),
        featured=next((drawings[one] for one in getattr(module, "FEATURED", ()) if one in drawings), None),
        sections=sections,
        comparisons=module.comparisons(rows) if hasattr(module, "comparisons") else (),
        runs=[
            run for run in read_runs(places.data / "environment.json").values() if run["experiment"] == name
        ],
        rows=len(rows),
        stale=stale_count(rows),
        pictures={name: svg(drawing.figure) for name, drawing in drawings.items()},
    )


def named(page: str, drawings: Sequence[Drawing]) -> dict[str, Drawing]:
    """Figures by name; ValueError where two have the same, since the file of one would be shown for both."""
    found: dict[str, Drawing] = {}
    for one in drawings:
        if one.name in found:
            raise ValueError(
                f"page {page}: two figures are named {one.name!r} ({found[one.name].caption} / {one.caption}), and a name is a "
                "file; put what tells them apart into the name, such as `Where.ending`"
            )
        found[one.name] = one
    return found


def order(cell: str) -> str:
    """What a cell is sorted by, where its text is not a plain number: its first value; infinity after all, nothing before."""
    if cell == "exact":
        return "1e99"
    if NUMBER.fullmatch(cell) or not VALUE.fullmatch(cell):
        return ""
    found = NUMBER.search(cell)
    return found.group() if found else ""


def inline(text: str) -> str:
    """Markdown's bold and code as HTML, of text that is escaped already."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def render(template: str, **values: object) -> str:
    """A template of this package, filled in."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=template.endswith(".html.j2"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["pipes"] = lambda text: text.replace("|", "\\|")
    environment.filters["order"] = order
    environment.filters["inline"] = lambda escaped: inline(str(escaped))
    return environment.get_template(template).render(**values)
