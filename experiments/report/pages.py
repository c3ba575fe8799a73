"""Pages: ``reports/index.html`` (the first screen and a line an experiment), ``scoreboard.html`` (published values),
``history.html``, a page of each experiment and further ones of its longest tables, ``limits.html``, the answers to the paper's
open questions (`experiments.report.questions`), and Markdown beside them. They read rows;
``families.html`` reads records of kernels.

The page module of an experiment has TITLE, QUESTION (what it asks, in one sentence), ABOUT (what is measured), FEATURED (names
of figures, the first of which heads the page), `findings(rows)` (sentences) and `sections(rows)` (everything, as plain data of
`experiments.report.content`). It may have `cards(rows)` (numbers of the first screen), `comparisons(rows)` (published values
beside measured ones: the scoreboard), `headlines(rows)` (for README.md), `main_finding(rows)` (a few words for its line there;
else how many targets are reached), `targets_by_run(rows)` (`experiments.report.targets`), and `joined(rows, others)` (sections
before all others that set its rows beside those of another experiment, `others(name)`). Modules are given the rows of full
runs, where there are any (`results.shown`).

Pages need no network and no server. Tables sort and filter by the package itables (DataTables, MIT), whose script is stored
compressed beside the pages (about 0.25 MB) and unpacked by the browser when the first table is opened; without scripts tables
are plain HTML.
"""

from __future__ import annotations

import base64
import gzip
import importlib.resources
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ao_lab.cli.terminal import say
from experiments.harness import rows as tidy
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.revision import commit, has_triton
from experiments.harness.rows import Row
from experiments.report import behind, families, own_models, peers, questions
from experiments.report.accuracies import is_given, of_given_models
from experiments.report.asked import Asked, asked
from experiments.report.content import (
    FEWEST_TOKENS,
    PEERS,
    Card,
    Comparison,
    Drawing,
    Headline,
    Section,
    Table,
    brief,
    days_of,
    device_name,
    devices_of,
    inline,
    lead,
    note,
    parts,
    runs_of,
    sentences,
    subjects_of,
)
from experiments.report.history import History, halves_of, histories, remember
from experiments.report.plots import dots, svg
from experiments.report.results import shown as shown_rows
from experiments.report.scoreboard import Scoreboard, scoreboard
from experiments.report.targets import BASELINE_TOLERANCE, RunTargets, counted, missed_tables

if TYPE_CHECKING:
    import jinja2


@lru_cache(maxsize=1)
def script() -> str:
    """A script that names the library's script (`js`) and style (`css`), base64 of gzip."""
    folder = importlib.resources.files("itables") / "html"
    found = {kind: packed((folder / f"dt_bundle.{kind}").read_bytes()) for kind in ("js", "css")}
    return f"window.DATATABLES = {json.dumps(found)};\n"


def packed(data: bytes) -> str:
    """Base64 of gzip, the same for the same bytes."""
    return base64.b64encode(gzip.compress(data, compresslevel=9, mtime=0)).decode()


#: The rows of an experiment by its name.
Others = Callable[[str], Sequence[Row]]
TEMPLATES = Path(__file__).resolve().parent / "templates"
#: Lines of a table in Markdown, and of all tables of a page; longer and later ones are in HTML alone.
MOST_LINES, MOST_OF_PAGE = 40, 400
#: Characters of a paragraph in Markdown; longer ones that list something are folded.
FOLDED = 800
#: Characters of the tables of a page, and of one of its further pages of tables; tags included, about.
MOST_OF_TABLES, MOST_OF_FURTHER = 150_000, 250_000
#: Numbers of the first screen.
MOST_CARDS = 6
#: Pages over all experiments.
FIRST_PAGES = ("index.html", "scoreboard.html", "history.html", "limits.html", "README.md", "limits.md")
#: The figure of the first screen.
OVERVIEW = "overview"
#: Characters of a line of its labels.
WRAPPED = 24
#: What pages share, in the folder beside them.
ASSETS = ("report.css", "report.js")


@dataclass(frozen=True)
class Page:
    """One experiment: what its page says, the file of its rows, how many there are, when and with what they were measured; for
    the first page its question, cards, headlines and main finding; the targets of its runs."""

    name: str
    title: str
    about: Sequence[str]
    findings: Sequence[str]
    featured: Drawing | None
    sections: Sequence[Section]
    comparisons: Sequence[Comparison]
    file: str
    rows: Sequence[Row]
    measured: str
    versions: Sequence[str]
    pictures: dict[str, str] = field(default_factory=dict)
    question: str = ""
    cards: Sequence[Card] = ()
    headlines: Sequence[Headline] = ()
    main_finding: str = ""
    targets: Sequence[RunTargets] = ()

    @cached_property
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

    @property
    def days(self) -> str:
        """The first and the last day of its rows."""
        return days_of(self.rows)

    @property
    def devices(self) -> list[str]:
        """The devices of its rows."""
        return devices_of(self.rows)

    @property
    def runs(self) -> list[str]:
        """The devices, and which of them has short runs alone."""
        return runs_of(self.rows)

    @property
    def subjects(self) -> list[str]:
        """The models, shapes or data of its rows, in words."""
        return subjects_of(self.rows)

    @cached_property
    def names(self) -> list[str]:
        """What its filter suggests: methods that begin a line of a table."""
        methods = dict.fromkeys(row.method for row in self.rows)
        first = {
            line[0] for section in self.sections for table in section.tables for line in table.lines if line
        }
        return [name for name in methods if name in first]

    @property
    def example(self) -> str:
        """What may be typed into its filter: a method, and behind it the title of a table where that counts tokens."""
        titles = [table.caption for section in self.sections for table in section.tables]
        counted_tokens = [title for title in titles if re.fullmatch(r"\d+ tokens", title)]
        ours = [name for name in self.names if not PEERS.search(name)][:1]
        words = [name.partition(" ")[0] if counted_tokens else name for name in ours]
        return " ".join([*words, *(["16 tokens"] if "16 tokens" in titles else counted_tokens[:1])])

    @property
    def menu(self) -> list[tuple[str, str]]:
        """The parts of its page, each as address and title."""
        found = addresses(self.sections, "section")
        return [*found, ("published", "Published values and ours")] if self.board.tables else found

    @cached_property
    def further(self) -> list[list[tuple[Section, Table]]]:
        """The tables that its page has no room for, in pages of their own."""
        return further_pages(self.sections)

    def place(self, table: Table) -> str:
        """The address of a table on another page; "" of one that stands on the experiment's own."""
        for number, tables in enumerate(self.further, 1):
            if any(table is other for _, other in tables):
                return f"{self.name}-tables-{number}.html#table-{self.number(table)}"
        return ""

    def number(self, table: Table) -> int:
        """The place of a table among all of the experiment's, from 1."""
        return 1 + [id(one) for section in self.sections for one in section.tables].index(id(table))


def addresses(parts_of_page: Iterable[Any], kind: str = "question") -> list[tuple[str, str]]:
    """Address and title of each part of a page, as templates count them."""
    return [(f"{kind}-{place}", part.title) for place, part in enumerate(parts_of_page, 1)]


def further_pages(sections: Sequence[Section]) -> list[list[tuple[Section, Table]]]:
    """The tables of the sections that do not fit into a page, in their order, as many a page as fit; what was measured last
    stays on the experiment's own."""
    left, moved = MOST_OF_TABLES, list[Section]()
    for section in sorted(
        sections, key=lambda one: max((row.date for row in one.rows), default=""), reverse=True
    ):
        size = sum(map(characters, section.tables))
        if size <= left:
            left -= size
        else:
            moved.append(section)
    pages: list[list[tuple[Section, Table]]] = []
    room = 0
    for section in (one for one in sections if any(one is other for other in moved)):
        for table in section.tables:
            room -= characters(table)
            if room < 0:
                pages.append([])
                room = MOST_OF_FURTHER - characters(table)
            pages[-1].append((section, table))
    return pages


def characters(table: Table) -> int:
    """About how long a table is in HTML."""
    return (
        sum(len(cell) + 4 for line in (table.columns, *table.lines) for cell in line)
        + 5 * len(table.lines)
        + 600
    )


def write_pages(places: Paths) -> Written:
    """Draw and write everything from the published rows; returns what was written. Of a folder whose rows are of named models
    alone that is one page (`experiments.report.own_models`)."""
    rows = {name: shown_rows(tidy.read(places.rows(name))) for name in EXPERIMENTS}
    pages = make_pages(places, rows)
    if own_models.are_own(rows):
        return write_own(places, pages, rows)
    written = [one for page in pages for one in write_page(places, page)]
    compared = behind.comparisons(rows)
    said = [linked(places, one) for one in asked(rows, compared)]
    written += write_first(places, pages, rows, compared, said)
    remove_old(places, pages)
    return written + write_answers(places, rows, said) + write_families(places.reports)


def make_pages(places: Paths, rows: Mapping[str, Sequence[Row]] | None = None) -> list[Page]:
    """The pages of all experiments that have rows."""
    given = rows or {}
    others = lru_cache(maxsize=None)(lambda name: given.get(name) or shown_rows(tidy.read(places.rows(name))))
    return [page for name in EXPERIMENTS if (page := make_page(places, name, others(name), others))]


def write_page(places: Paths, page: Page) -> Written:
    """The files of one experiment."""
    write_pictures(places, page)
    written: Written = []
    for kind in ("md", "html"):
        path = places.reports / f"{page.name}.{kind}"
        tidy.write_text(path, render(f"page.{kind}.j2", page=page, brief=brief_tables(page), folded=FOLDED))
        written.append((f"{page.name}: page", shown(path)))
    for number, tables in enumerate(page.further, 1):
        path = places.reports / f"{page.name}-tables-{number}.html"
        tidy.write_text(path, render("tables.html.j2", page=page, tables=tables, number=number))
        written.append((f"{page.name}: tables", shown(path)))
    return written


def write_own(places: Paths, pages: Sequence[Page], rows: Mapping[str, Sequence[Row]]) -> Written:
    """The one page of named models, its figures, and what it shares with other reports."""
    write_assets(places)
    remove_old(places, pages)
    for page in pages:
        write_pictures(places, page)
    values, written = own_models.values_of(rows, pages), list[tuple[str, str]]()
    for name, template in (("index.html", "own.html.j2"), ("README.md", "own.md.j2")):
        tidy.write_text(places.reports / name, render(template, **values))
        written.append(("report", shown(places.reports / name)))
    return written


def write_assets(places: Paths) -> None:
    """What all pages share."""
    for name in ASSETS:
        tidy.write_text(places.reports / "assets" / name, (TEMPLATES / name).read_text("utf-8"))
    tidy.write_text(places.reports / "assets" / "datatables.js", script())


def write_pictures(places: Paths, page: Page) -> None:
    """The figures of one experiment."""
    for name, picture in page.pictures.items():
        tidy.write_text(places.figures / f"{name}.svg", picture)


def write_first(
    places: Paths,
    pages: Sequence[Page],
    rows: Mapping[str, Sequence[Row]],
    compared: Sequence[behind.Compared],
    said: Sequence[Asked],
) -> Written:
    """The pages over all experiments, and what all pages share. compared: values beside another library's; said: what the page
    of answers says to users."""
    write_assets(places)
    found = {id(card): page.name for page in pages for card in page.cards}
    cards = first_cards(pages)
    overview = draw_overview([card for card in cards if card.bars])
    if overview:
        tidy.write_text(places.figures / f"{OVERVIEW}.svg", svg(overview.figure))
    quoted = quoted_rows(pages)
    halves = halves_of(row for page in pages for row in page.rows)
    past = histories(remember(places, [row for _, row in quoted]), quoted, halves) if quoted else []
    values: dict[str, object] = {
        "pages": pages,
        "cards": [(found[id(card)], card, past_of(past, card.row)) for card in cards],
        "further": further_headlines(pages, cards),
        "overview": overview,
        "scoreboard": scoreboard([one for page in pages for one in page.comparisons]),
        "histories": past,
        "asked": said,
        "docs": has_docs(places),
        "tolerance": BASELINE_TOLERANCE,
        "beside": behind.counted_table(compared),
        "behind": behind.table_of(compared),
        "commit": commit(),
        "unmet": peers.missing(rows, [name for name, found in rows.items() if is_given(name, found)]),
        "fewest": FEWEST_TOKENS,
        "families": has_triton() or (places.reports / "families.html").exists(),
        "devices": devices_of([row for page in pages for row in page.rows]),
        "days": days_of([row for page in pages for row in page.rows]),
    }
    written: Written = []
    for name in FIRST_PAGES:
        tidy.write_text(places.reports / name, render(f"{name}.j2", **values))
        written.append(("report", shown(places.reports / name)))
    return written


def first_cards(pages: Iterable[Page]) -> list[Card]:
    """The numbers of the first screen: those of full runs before those of short ones, each in the order of the experiments."""
    return sorted((card for page in pages for card in page.cards), key=lambda card: card.short)[:MOST_CARDS]


#: Numbers of a headline, at most, that a card says already where one of them is the card's.
ON_CARD = 3


def further_headlines(pages: Iterable[Page], cards: Iterable[Card]) -> list[tuple[str, Headline]]:
    """The headlines of the first page with the names of their experiments, but those that say little more than a card."""
    shown_on = {card.row.key for card in cards}
    return [
        (page.name, headline)
        for page in pages
        for headline in page.headlines
        if len(headline.rows) > ON_CARD or not shown_on & {row.key for row in headline.rows}
    ]


def quoted_rows(pages: Iterable[Page]) -> list[tuple[str, Row]]:
    """The rows whose history is kept, with words that say what they are: of cards, and of headlines that quote few."""
    found: dict[tuple[object, ...], tuple[str, Row]] = {}
    for page in pages:
        for card in page.cards:
            found[card.row.key] = (card.what, card.row)
        for headline in page.headlines:
            for row in headline.rows if len(headline.rows) <= MOST_CARDS else ():
                found.setdefault(row.key, (f"{page.title}: {row.method}, {row.setting}, {row.metric}", row))
    return list(found.values())


def past_of(past: Iterable[History], row: Row) -> History | None:
    """The history of a row; None without one."""
    return next((one for one in past if one.rows[-1].key == row.key), None)


def draw_overview(cards: Sequence[Card]) -> Drawing | None:
    """The figure of the first screen, as wide as a phone, each value at its point; None without a card that has bars."""
    bars = {label: values for card in cards for label, values in card.bars.items()}
    if not bars:
        return None
    names = dict.fromkeys(name for values in bars.values() for name in values)
    series = {name: [values.get(name) for values in bars.values()] for name in names}
    labels = [textwrap.fill(label, WRAPPED) for label in bars]
    figure = dots(
        labels, series, "speed over bfloat16", base=1.0, width=3.4, height=0.4, legend=1, written=True
    )
    rows = [card.row for card in cards]
    caption = f"Speed over bfloat16 of the same run, higher is faster ({', '.join((*runs_of(rows), days_of(rows)))})."
    return Drawing(OVERVIEW, caption, figure)


def remove_old(places: Paths, pages: Sequence[Page]) -> None:
    """Delete figures and pages of tables that no page shows any more; both folders hold nothing else of these names."""
    kept = {OVERVIEW} | {name for page in pages for name in page.pictures}
    for path in places.figures.glob("*.svg"):
        if path.stem not in kept:
            path.unlink()
    tables = {f"{page.name}-tables-{number}" for page in pages for number in range(1, len(page.further) + 1)}
    for path in places.reports.glob("*-tables-*.html"):
        if path.stem not in tables:
            path.unlink()


#: A link to the documentation, in Markdown.
TO_DOCS = re.compile(r"\[([^\]]+)\]\(\.\./docs/[^)]*\)")


def has_docs(places: Paths) -> bool:
    """Whether the documentation lies beside the reports, as in the repository."""
    return (places.reports.parent / "docs" / "index.md").is_file()


def linked(places: Paths, one: Asked) -> Asked:
    """An answer whose links to the documentation are words where that is not there."""
    return one if has_docs(places) else replace(one, links=TO_DOCS.sub(r"\1 (documentation)", one.links))


def write_answers(places: Paths, rows: Mapping[str, Sequence[Row]], said: Sequence[Asked]) -> Written:
    """The page of answers: to what users ask, and to the paper's open questions."""
    claimed = questions.questions(rows)
    written: Written = []
    for kind in ("md", "html"):
        path = places.reports / f"answers.{kind}"
        tidy.write_text(path, render(f"answers.{kind}.j2", questions=claimed, asked=said))
        written.append(("answers", shown(path)))
    return written


def write_families(folder: Path) -> Written:
    """The page of kernel families, which reads no rows; it stays as it is without Triton, in whose kernels sizes are chosen."""
    paths = [folder / f"families.{kind}" for kind in ("md", "html")]
    if not has_triton():
        say(
            f"{shown(paths[0])} stays as it is, and lines of `linear` are not compared with the kernels that are chosen today: "
            "they are chosen with Triton, which is not installed here (pip install triton)"
        )
        return []
    tables = families.tables()
    for path in paths:
        tidy.write_text(path, render(f"{path.name}.j2", families=tables))
    return [("report", shown(path)) for path in paths]


def make_page(
    places: Paths, name: str, rows: Sequence[Row] | None = None, others: Others = lambda name: ()
) -> Page | None:
    """The page of one experiment, or None where it has no rows. rows: its rows where they were read already. others: those of
    any experiment."""
    rows = shown_rows(tidy.read(places.rows(name)) if rows is None else rows)
    if not rows:
        return None
    module = EXPERIMENTS[name].page_module()
    joined = module.joined(rows, others) if hasattr(module, "joined") else []
    sections = [
        replace(one, drawings=[drawing for drawing in one.drawings if not drawing.empty])
        for one in [*joined, *module.sections(rows)]
    ]
    targets = list(optional(module, "targets_by_run", rows))
    drawings = named(name, [drawing for section in sections for drawing in section.drawings])
    return Page(
        name=name,
        title=module.TITLE,
        about=getattr(module, "ABOUT", ()),
        findings=optional(module, "findings", rows),
        featured=next((drawings[one] for one in getattr(module, "FEATURED", ()) if one in drawings), None),
        sections=sections,
        comparisons=of_given_models(name, rows, optional(module, "comparisons", rows)),
        file=places.rows(name).name,
        rows=rows,
        measured=note(rows),
        versions=ran_on(rows),
        pictures=drawn(drawings.values()),
        question=getattr(module, "QUESTION", ""),
        cards=optional(module, "cards", rows),
        headlines=optional(module, "headlines", rows),
        main_finding=optional(module, "main_finding", rows) or counted(targets),
        targets=targets,
    )


def drawn(drawings: Collection[Drawing]) -> dict[str, str]:
    """Each figure as SVG by the name of its file, narrow ones behind the others."""
    pictures = {one.name: svg(one.figure) for one in drawings}
    return pictures | {f"{one.name}-narrow": svg(one.narrow) for one in drawings if one.narrow}


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
    return [
        f"{device_name(device)}: {versions} ({count} values)"
        for (device, versions), count in sorted(counts.items())
    ]


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


def render(template: str, **values: object) -> str:
    """A template of this package, filled in."""
    return environment(template.endswith(".html.j2")).get_template(template).render(**values)


def environment(html: bool) -> jinja2.Environment:
    """Where templates find each other and the filters of texts. html: whether values are escaped."""
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["capitalize_first"] = lambda text: text[:1].upper() + text[1:]
    made.filters["pipes"] = lambda text: text.replace("|", "\\|")
    made.filters["inline"] = lambda escaped: inline(str(escaped))
    made.filters |= {one.__name__: one for one in (lead, sentences, brief, parts, addresses)}
    return made
