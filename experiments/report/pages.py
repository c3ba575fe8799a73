"""Pages: ``reports/index.html``, a page of all figures and tables for each experiment, Markdown beside them, and
``limits.md``. They read rows, and of git what has changed since.

The page module of an experiment has TITLE, QUESTION (what it asks, in one sentence), ABOUT (what is measured), FEATURED (names
of figures, the first of which heads the page), `findings(rows)` (sentences) and `sections(rows)` (everything, as plain data of
`experiments.report.content`). It may have `comparisons(rows)` (published values beside measured ones), `headlines(rows)` (for
the first page), `main_finding(rows)` (a few words for its line there; else how many targets are reached) and
`targets_by_run(rows)` (`experiments.report.limits`). This module turns them into HTML and Markdown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from experiments.harness import rows as tidy
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.revision import commit
from experiments.harness.rows import Row
from experiments.report.content import Comparison, Drawing, Headline, Section, Table, days_of
from experiments.report.datatables import script
from experiments.report.limits import RunTargets, counted, missed_tables
from experiments.report.measured import note
from experiments.report.plots import svg
from experiments.report.scoreboard import Scoreboard, scoreboard

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
    """One experiment: what its page says, the file of its rows, how many there are, when and with what they were measured; for
    the first page its question, headlines and main finding; the targets of its runs."""

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
    question: str = ""
    headlines: Sequence[Headline] = ()
    main_finding: str = ""
    targets: Sequence[RunTargets] = ()

    @property
    def board(self) -> Scoreboard:
        """Its published values beside measured ones."""
        return scoreboard(self.comparisons)

    @property
    def missed(self) -> list[Table]:
        """The targets that are missed, a table for each device."""
        return missed_tables(self.targets)

    @property
    def counted(self) -> str:
        """How many targets are reached."""
        return counted(self.targets)


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
    for name in ("index.html", "README.md", "limits.md"):
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
    targets = list(optional(module, "targets_by_run", rows))
    drawings = named(name, [drawing for section in sections for drawing in section.drawings])
    return Page(
        name=name,
        title=module.TITLE,
        about=getattr(module, "ABOUT", ()),
        findings=optional(module, "findings", rows),
        featured=next((drawings[one] for one in getattr(module, "FEATURED", ()) if one in drawings), None),
        sections=sections,
        comparisons=optional(module, "comparisons", rows),
        file=places.rows(name).name,
        rows=len(rows),
        measured=note(rows),
        days=days_of(rows),
        versions=ran_on(rows),
        pictures={name: svg(drawing.figure) for name, drawing in drawings.items()},
        question=getattr(module, "QUESTION", ""),
        headlines=optional(module, "headlines", rows),
        main_finding=optional(module, "main_finding", rows) or counted(targets),
        targets=targets,
    )


def optional(module: ModuleType, name: str, rows: Sequence[Row]) -> Any:
    """What a function of a page module returns; nothing where the module has no such function."""
    return getattr(module, name)(rows) if hasattr(module, name) else ()


def brief_tables(page: Page) -> list[Table]:
    """The tables that the page in Markdown shows."""
    found, lines = list[Table](), 0
    tables = [table for section in page.sections for table in section.tables]
    for table in [*page.board.measured, *tables]:
        if len(table.lines) <= min(MOST_LINES, MOST_OF_PAGE - lines):
            found.append(table)
            lines += len(table.lines)
    return found


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
