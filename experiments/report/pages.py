"""Pages: ``reports/index.html``, which needs no other file, and Markdown beside it. They read rows and nothing else.

(The record of what each run ran on, ``environment.json``, counts as part of the rows.) An experiment says what to show as
`Section`s of plain data; this module turns them into HTML and Markdown. Cells whose rows are older than the code are marked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.harness import provenance
from experiments.harness import rows as tidy
from experiments.harness.environment import read_runs
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS
from experiments.report.plots import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STALE = "†"
TEMPLATES = Path(__file__).resolve().parent / "templates"


@dataclass(frozen=True)
class Table:
    """A table of text. The first column is a name, the others are numbers; `stale` holds the names of older lines."""

    caption: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    stale: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """ValueError where a line has more or fewer cells than there are columns: they would stand under other names."""
        for line in self.lines:
            if len(line) != len(self.columns):
                raise ValueError(
                    f"{self.caption}: {len(line)} cells under {len(self.columns)} columns: {line}"
                )


@dataclass(frozen=True)
class Drawing:
    """A figure with the name of its file and its caption."""

    name: str
    caption: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """Part of an experiment's page: paragraphs, then figures, then tables."""

    title: str
    paragraphs: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()


@dataclass(frozen=True)
class Page:
    """One experiment: its sections, the runs that they come from, how many rows there are, how many
    are older than the code, and the hash of the experiment's code."""

    name: str
    title: str
    sections: Sequence[Section]
    runs: Sequence[dict[str, Any]]
    rows: int
    older: int
    source_hash: str
    pictures: dict[str, str] = field(default_factory=dict)


def write_pages(places: Paths) -> Written:
    """Draw and write everything from the published rows; returns what was written."""
    # The code may have changed while a long run went on: rows are held against what it is now.
    provenance.forget()
    pages = [page for name in EXPERIMENTS if (page := make_page(places, name))]
    made: Written = []
    for page in pages:
        for name, picture in page.pictures.items():
            tidy.write_text(places.figures / f"{name}.svg", picture)
        path = places.reports / f"{page.name}.md"
        tidy.write_text(path, render("page.md.j2", page=page, stale=STALE))
        made.append((f"{page.name}: page", shown(path)))
    for template, name in (("index.html.j2", "index.html"), ("README.md.j2", "README.md")):
        path = places.reports / name
        tidy.write_text(path, render(template, pages=pages, stale=STALE))
        made.append(("report", shown(path)))
    return made


def make_page(places: Paths, name: str) -> Page | None:
    """The page of one experiment, or None where it has no rows."""
    rows = tidy.read(places.data / f"{name}.csv")
    if not rows:
        return None
    module = EXPERIMENTS[name].page_module()
    sections = module.sections(rows)
    runs = [run for run in read_runs(places.data / "environment.json").values() if run["experiment"] == name]
    older = sum(not provenance.is_current(row) for row in rows)
    pictures = {drawing.name: svg(drawing.figure) for section in sections for drawing in section.drawings}
    return Page(
        name, module.TITLE, sections, runs, len(rows), older, provenance.experiment_hash(name), pictures
    )


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
    return environment.get_template(template).render(**values)
