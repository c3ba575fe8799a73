"""Pages: ``reports/index.html``, a page of all figures and tables for each experiment, Markdown beside them, and
``limits.md``, and the answers to the paper's open questions (`experiments.report.questions`). They read rows, and of git what
has changed since; ``families.md`` reads records of kernels.

The page module of an experiment has TITLE, QUESTION (what it asks, in one sentence), ABOUT (what is measured), FEATURED (names
of figures, the first of which heads the page), `findings(rows)` (sentences) and `sections(rows)` (everything, as plain data of
`experiments.report.content`). It may have `comparisons(rows)` (published values beside measured ones: the scoreboard),
`headlines(rows)` (for the first page), `main_finding(rows)` (a few words for its line there; else how many targets are reached)
and `targets_by_run(rows)` (`experiments.report.targets`). This module turns them into HTML and Markdown.

Tables of the HTML pages sort and filter without a network: script and style of DataTables come from the package itables (MIT).
They are stored compressed beside the pages (about 0.25 MB) and unpacked by the browser when the first table is opened; without
scripts the tables are plain HTML.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ao_lab.cli.terminal import say
from experiments.harness import rows as tidy
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.revision import commit
from experiments.harness.rows import Row
from experiments.report import families, peers, questions
from experiments.report.accuracies import counted as counted_accuracies
from experiments.report.content import Comparison, Drawing, Headline, Section, Table, days_of, note
from experiments.report.plots import svg
from experiments.report.results import number
from experiments.report.targets import RunTargets, counted, missed_tables

COLUMNS = (
    "model",
    "method",
    "metric",
    "unit",
    "published",
    "on",
    "ours",
    "on",
    "ours / published",
    "better",
    "source",
)
#: Metrics of which less is better.
LESS = ("memory", "size", "perplexity")


@dataclass(frozen=True)
class Scoreboard:
    """The tables, the sources that their last column counts from 1, and how many accuracies are measured."""

    tables: Sequence[Table]
    sources: Sequence[str]
    accuracies: str = ""

    @property
    def measured(self) -> Sequence[Table]:
        """The table of values that have a measured one beside them; none where there is none."""
        return [table for table in self.tables if tuple(table.columns) == COLUMNS]


def scoreboard(found: Sequence[Comparison]) -> Scoreboard:
    """Published values that were measured here (ratios first, as they compare across devices), and those that were not."""
    sources = list(dict.fromkeys(one.source for one in found))
    measured = sorted((one for one in found if one.measured is not None), key=lambda one: one.unit != "ratio")
    missing = [one for one in found if one.measured is None]
    tables = [
        Table(
            "Published values and ours, of the same model, method and metric",
            COLUMNS,
            [line(one, sources) for one in measured],
        ),
        Table(
            "Published values without a measured one",
            (*COLUMNS[:6], "measured by", "source"),
            [[*line(one, sources)[:6], one.command or one.reason, line(one, sources)[-1]] for one in missing],
        ),
    ]
    return Scoreboard([table for table in tables if table.lines], sources, counted_accuracies(found))


def line(one: Comparison, sources: Sequence[str]) -> list[str]:
    """The cells of one published value."""
    return [
        one.model,
        one.method,
        one.metric,
        one.unit,
        short(one.published),
        one.published_on,
        short(one.measured),
        one.measured_on,
        number(one.ratio, 2),
        "less" if any(word in one.metric for word in LESS) else "more",
        f"[{sources.index(one.source) + 1}]",
    ]


def short(value: float | None) -> str:
    """A value with about four digits, as many as are published."""
    if value is None:
        return ""
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return number(value, digits)


@lru_cache(maxsize=1)
def script() -> str:
    """A script that names the library's script (`js`) and style (`css`), base64 of gzip."""
    folder = importlib.resources.files("itables") / "html"
    found = {kind: packed((folder / f"dt_bundle.{kind}").read_bytes()) for kind in ("js", "css")}
    return f"window.DATATABLES = {json.dumps(found)};\n"


def packed(data: bytes) -> str:
    """Base64 of gzip, the same for the same bytes."""
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode()


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
    rows = {name: tidy.read(places.rows(name)) for name in EXPERIMENTS}
    pages = [page for name in EXPERIMENTS if (page := make_page(places, name, rows[name]))]
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
    unmet = peers.missing(rows)
    for name in ("index.html", "README.md", "limits.md"):
        path = places.reports / name
        tidy.write_text(
            path, render(f"{name}.j2", pages=pages, scoreboard=board, commit=commit(), unmet=unmet)
        )
        written.append(("report", shown(path)))
    return written + write_answers(places, rows) + write_families(places.reports / "families.md")


def write_answers(places: Paths, rows: Mapping[str, Sequence[Row]]) -> Written:
    """The page of answers."""
    asked = questions.questions(rows)
    written: Written = []
    for kind in ("md", "html"):
        path = places.reports / f"answers.{kind}"
        tidy.write_text(path, render(f"answers.{kind}.j2", questions=asked))
        written.append(("answers", shown(path)))
    return written


def write_families(path: Path) -> Written:
    """The page of kernel families, which reads no rows; it stays as it is without Triton, in whose kernels sizes are chosen."""
    if importlib.util.find_spec("triton") is None:
        say(f"{shown(path)} stays as it is: kernels are chosen with Triton, which is not installed here")
        return []
    tidy.write_text(path, render("families.md.j2", families=families.tables()))
    return [("report", shown(path))]


def make_page(places: Paths, name: str, rows: Sequence[Row] | None = None) -> Page | None:
    """The page of one experiment, or None where it has no rows. rows: its rows where they were read already."""
    rows = tidy.read(places.rows(name)) if rows is None else rows
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
