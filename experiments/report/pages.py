"""Pages: ``reports/index.html``, a page of all figures and tables for each experiment, and Markdown beside them. They read
rows, and of git what has changed since.

The page module of an experiment has TITLE, ABOUT (what is measured), FEATURED (names of figures, the first of which heads the
page), `findings(rows)` (sentences), `sections(rows)` (everything, as plain data of `experiments.report.content`) and perhaps
`comparisons(rows)` (published values beside measured ones). This module turns them into HTML and Markdown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from experiments.harness import rows as tidy
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.revision import commit
from experiments.harness.rows import Row
from experiments.report.content import Comparison, Drawing, Section, Table
from experiments.report.datatables import script
from experiments.report.measured import note
from experiments.report.plots import svg
from experiments.report.scoreboard import scoreboard

__all__ = ["Drawing", "Page", "Section", "Table", "make_page", "svg", "write_pages"]

TEMPLATES = Path(__file__).resolve().parent / "templates"
#: The first value in a cell, by which a column is sorted.
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
#: Cells that are values, perhaps with an error or parentheses: what else holds digits is a name.
VALUE = re.compile(r"\(?[-+]?\d+(\.\d+)?%?( ± \d+(\.\d+)?)?\)?")
#: Lines of a table in Markdown, and of all tables of a page; longer and later ones are in HTML alone.
MOST_LINES, MOST_OF_PAGE = 40, 400


@dataclass(frozen=True)
class Page:
    """One experiment: what its page says, the file of its rows, how many there are, when and with what they were measured."""

    name: str
    title: str
    about: Sequence[str]
    findings: Sequence[str]
    featured: Drawing | None
    sections: Sequence[Section]
    comparisons: Sequence[Comparison]
    file: str
    rows: int
    measured: str
    days: str
    versions: Sequence[str]
    pictures: dict[str, str] = field(default_factory=dict)


def write_pages(places: Paths) -> Written:
    """Draw and write everything from the published rows; returns what was written."""
    pages = [page for name in EXPERIMENTS if (page := make_page(places, name))]
    board = scoreboard([one for page in pages for one in page.comparisons])
    written: Written = []
    for page in pages:
        for name, picture in page.pictures.items():
            tidy.write_text(places.figures / f"{name}.svg", picture)
        for kind in ("md", "html"):
            path = places.reports / f"{page.name}.{kind}"
            tidy.write_text(path, render(f"page.{kind}.j2", page=page, brief=brief_tables(page)))
            written.append((f"{page.name}: page", shown(path)))
    tidy.write_text(places.reports / "assets" / "datatables.js", script())
    for name in ("index.html", "README.md"):
        path = places.reports / name
        tidy.write_text(path, render(f"{name}.j2", pages=pages, scoreboard=board, commit=commit()))
        written.append(("report", shown(path)))
    return written


def make_page(places: Paths, name: str) -> Page | None:
    """The page of one experiment, or None where it has no rows."""
    rows = tidy.read(places.rows(name))
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
        file=places.rows(name).name,
        rows=len(rows),
        measured=note(rows),
        days=days_of(rows),
        versions=ran_on(rows),
        pictures={name: svg(drawing.figure) for name, drawing in drawings.items()},
    )


def brief_tables(page: Page) -> list[Table]:
    """The tables that the page in Markdown shows."""
    found, lines = list[Table](), 0
    for table in (table for section in page.sections for table in section.tables):
        if len(table.lines) <= min(MOST_LINES, MOST_OF_PAGE - lines):
            found.append(table)
            lines += len(table.lines)
    return found


def days_of(rows: Sequence[Row]) -> str:
    """The first and the last day at which rows were measured."""
    days = sorted({row.date[:10] for row in rows if row.date})
    return " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))


def ran_on(rows: Sequence[Row]) -> list[str]:
    """Devices and versions of libraries, each with the number of its rows."""
    counts = Counter((row.device, row.versions or "versions that are not known") for row in rows)
    return [f"{device}: {versions} ({count} rows)" for (device, versions), count in sorted(counts.items())]


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
    environment.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    environment.filters["pipes"] = lambda text: text.replace("|", "\\|")
    environment.filters["order"] = order
    environment.filters["inline"] = lambda escaped: inline(str(escaped))
    return environment.get_template(template).render(**values)
