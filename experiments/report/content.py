"""What an experiment's page says, as plain data: tables, figures, sections, and published values beside measured ones.

Under a table stands when and at which commits its rows were measured, and of rows that name a kernel of ours whether that is
the one of today: as the page module's `kernel_state(row)` says where it knows what is chosen, else by the sources
(`experiments.report.launched`).

Texts are shown with marks of Markdown as HTML, long sentences as a lead and a list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import CORPUS, Row, table_parts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: Sentences longer than this are shown as a lead and a list; the lead is at most so long.
LONG, LEAD = 260, 140
#: Characters of a main finding in README.md; what passes it is left out, a sentence or a member of a list.
BRIEF = 340
#: Where a sentence ends and another begins.
SENTENCE = re.compile(r"\.\s+(?=[A-Z0-9])")


def inline(text: str) -> str:
    """Markdown's bold, code and links to pages of the report and of the documentation as HTML, of text that is escaped already;
    the documentation's pages are Markdown, which the site's copy of the report leads to as HTML (`docs/generate.py`)."""
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    text = re.sub(r"\[([^\]]+)\]\((\w+)\.md(#[\w-]+)?\)", r'<a href="\2.html\3">\1</a>', text)
    text = re.sub(r"\[([^\]]+)\]\((\.\./docs/[\w/.#-]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


def parts(text: str) -> list[str]:
    """The members of the list that a long sentence ends with (`divided`); none of a short one, and of a list of one or two."""
    head, rest = divided(text)
    found = split(rest, ";") if head else []
    found = found if len(found) > 1 else split(rest, ",") if head else []
    return found if len(found) > 2 else []


def lead(text: str) -> str:
    """What stands before that list; the whole text where there is none."""
    return divided(text)[0] if parts(text) else text


def divided(text: str) -> tuple[str, str]:
    """A long sentence behind what it begins with in bold, else at the last colon of its beginning, else at the first full stop,
    outside of parentheses; nothing before where there is none of them."""
    if len(text) <= LONG:
        return "", text
    bold = text.find("**", 2) + 2 if text.startswith("**") else 0
    if 2 < bold <= LEAD:
        return text[:bold], text[bold:].lstrip(": ").removesuffix(".")
    for mark in (": ", ". "):
        found = [place for place in outside(text[:LEAD]) if text.startswith(mark, place)]
        if found:
            end = (found[-1] if mark == ": " else found[0]) + 1
            return text[:end].rstrip(":"), text[end:].strip().removesuffix(".")
    return "", text


def sentences(text: str) -> list[str]:
    """The sentences of a text, full stops within parentheses left alone, each without its own."""
    free, found, start = set(outside(text)), [], 0
    for end in SENTENCE.finditer(text):
        if end.start() in free:
            found.append(text[start : end.start()])
            start = end.end()
    return [*found, text[start:].removesuffix(".")]


def brief(text: str) -> str:
    """The first sentences of a text that have at most BRIEF characters together, without the last full stop; of a longer first
    sentence the members of its list that fit, and how many there are more."""
    found = sentences(text)
    fitting = [end for end in range(1, len(found) + 1) if len(". ".join(found[:end])) <= BRIEF]
    if fitting:
        return ". ".join(found[: fitting[-1]])
    members = split(found[0], ";")
    kept = [end for end in range(1, len(members)) if len("; ".join(members[:end])) <= BRIEF]
    return f"{'; '.join(members[: kept[-1]])}; {len(members) - kept[-1]} more" if kept else found[0]


def split(text: str, mark: str) -> list[str]:
    """A text at each mark that is followed by a space and lies outside of parentheses."""
    found, start = [], 0
    for place in outside(text):
        if text.startswith(f"{mark} ", place):
            found.append(text[start:place].strip())
            start = place + 1
    return [*found, text[start:].strip()]


def member(name: str) -> str:
    """A name as it stands in a list: what follows its first comma in parentheses, as "int4 g128 (zero points)"."""
    first, _, rest = name.partition(", ")
    return f"{first} ({rest})" if rest else first


def outside(text: str) -> list[int]:
    """The places of a text that lie outside of parentheses."""
    found, depth = [], 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth <= 0:
            found.append(place)
    return found


#: The scale of short runs.
QUICK = "quick"
#: Metrics that say how much text the means of a table are over.
WINDOWS, WINDOW = "windows", "tokens of a window"
#: Tokens of text under which a run is a short one, at whichever scale: its intervals are wide, its means rough. Twice what 8
#: windows of 512 tokens have, on which changes of perplexity have intervals of about a percent.
FEWEST_TOKENS = 8192


class Windows(NamedTuple):
    """How much text means are over: windows, and tokens of each."""

    count: int
    length: int

    def __str__(self) -> str:
        return f"{self.count} window{'s' * (self.count != 1)} of {self.length} tokens"

    @property
    def few(self) -> bool:
        """Whether there are so few tokens that what is measured on them is marked as a short run's."""
        return self.count * self.length < FEWEST_TOKENS


def windows_in(rows: Iterable[Row]) -> Windows | None:
    """How much text rows say that they are measured on, the least of several; None where they say nothing of it."""
    found: dict[tuple[str, str, str, str], dict[str, float]] = {}
    for row in rows:
        if row.metric in (WINDOWS, WINDOW):
            found.setdefault(row.line, {})[row.metric] = row.value
    sizes = [Windows(int(one[WINDOWS]), int(one[WINDOW])) for one in found.values() if len(one) == 2]
    return min(sizes, key=lambda one: one.count * one.length, default=None)


def is_short(table: str, rows: Iterable[Row]) -> bool:
    """Whether a table's rows are of a short run: by its scale, or by the little text that they say they are measured on."""
    found = windows_in(rows)
    return table_parts(table)[1] == QUICK or (found is not None and found.few)


@dataclass(frozen=True)
class Table:
    """A table of text. The first column is a name, the others are values.

    `rows`: what the lines show, for the note that says when they were measured (`experiments.report.content`).
    """

    caption: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    rows: Sequence[Row] = ()

    def __post_init__(self) -> None:
        """ValueError where a line has more or fewer cells than there are columns: they would stand under other names."""
        for line in self.lines:
            if len(line) != len(self.columns):
                raise ValueError(
                    f"{self.caption}: {len(line)} cells under {len(self.columns)} columns: {line}"
                )

    @property
    def measured(self) -> str:
        """When and at which commits its rows were measured, and by which kernels; nothing where it names no rows."""
        return note(self.rows)

    @property
    def devices(self) -> list[str]:
        """The devices of its rows."""
        return devices_of(self.rows)

    @property
    def subjects(self) -> list[str]:
        """The models, shapes or data that its rows are of, in words."""
        return subjects_of(self.rows)


@dataclass(frozen=True)
class Drawing:
    """A figure with the name of its file and its caption; for phones perhaps a narrow one that shows the same."""

    name: str
    caption: str
    figure: Figure
    narrow: Figure | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing is drawn on any of its axes."""
        return not any(axis.has_data() for axis in self.figure.axes)


@dataclass(frozen=True)
class Section:
    """Part of an experiment's page: paragraphs, then figures, then tables. drawn: rows of figures that are in no table."""

    title: str
    paragraphs: Sequence[str] = ()
    drawings: Sequence[Drawing] = ()
    tables: Sequence[Table] = ()
    drawn: Sequence[Row] = ()

    @property
    def rows(self) -> list[Row]:
        """The rows of all of its tables and figures."""
        return [*(row for table in self.tables for row in table.rows), *self.drawn]

    @property
    def devices(self) -> list[str]:
        """Their devices."""
        return devices_of(self.rows)

    @property
    def subjects(self) -> list[str]:
        """The models, shapes or data that they are of, in words."""
        return subjects_of(self.rows)

    @property
    def measured(self) -> str:
        """Devices and days of its rows; nothing where it names none."""
        return ", ".join(filter(None, (*self.devices, days_of(self.rows))))


#: What a card says whose number has none.
NO_TARGET = "no target"
#: The series of the first page's figure that holds another library's value.
PEER = "torchao (2:4: cuSPARSELt)"


#: Quantiles of times that rows have beside medians.
SPREAD = ("20%", "80%")


@dataclass(frozen=True)
class Card:
    """One number of the first screen: its row, what it says, what it stands beside, and lines of the figure.

    row: whose value it is, and whose history is kept. value: as it is shown, such as ``2.91x``. what: of what, in a few words.
    beside: what it is compared with. bars: for the figure, values over bfloat16 by series (ours, a library), by label. target:
    the value's target and whether it is met (`experiments.report.targets.verdict_of`). rows: those of the row's table, which
    say how much text it is measured on, where it is a mean over text, and how times spread, where it is a speed.
    """

    row: Row
    value: str
    what: str
    beside: str
    bars: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    target: str = NO_TARGET
    rows: Sequence[Row] = ()

    @property
    def day(self) -> str:
        """When it was measured."""
        return self.row.date[:10]

    @property
    def short(self) -> bool:
        """Whether its run is a short one."""
        return is_short(self.row.table, self.rows)

    @property
    def run(self) -> str:
        """Its device, and that its run is a short one."""
        return run_of(self.row.device, self.short)

    @property
    def spread(self) -> str:
        """Of a time how far its 20% and 80% quantiles are from the median, as its table has them; nothing without both."""
        found = {row.metric: row.value for row in self.rows if row.line == self.row.line}
        for name in ("time", "time per token"):
            ends = [found.get(f"{name}, {share}") for share in SPREAD]
            low, high = (None if end is None else end / found[name] - 1 for end in ends)
            if low is not None and high is not None:
                return f"most times lie {100 * low:+.1f} to {100 * high:+.1f}% from their median"
        return ""

    @property
    def kernels(self) -> str:
        """Of a speed on a GPU whether its kernels are those that are chosen today, where its row names them."""
        if self.row.kernel:
            return kernels_of([self.row])
        timed = self.row.unit in (*TIMED, "ratio") and self.row.device != "cpu"
        return "with the code of that commit: today's kernels may be faster or slower" * timed


@dataclass(frozen=True)
class Headline:
    """A sentence of the first page, without its full stop, and the rows that its numbers are of."""

    text: str
    rows: Sequence[Row]

    def __str__(self) -> str:
        return f"{self.text} ({', '.join(filter(None, (*self.runs, self.days)))})."

    @property
    def runs(self) -> list[str]:
        """The devices of its rows, and which of them has short runs alone."""
        return runs_of(self.rows)

    @property
    def days(self) -> str:
        """The first and the last day of its rows."""
        return days_of(self.rows)


def headlines_of(text: str, **rows: Row | None) -> list[Headline]:
    """A headline whose text has a field for the value of each row, as in ``{int4:.2f} times``; none where a row is missing."""
    found = {name: row for name, row in rows.items() if row is not None}
    if len(found) < len(rows):
        return []
    return [Headline(text.format(**{name: row.value for name, row in found.items()}), list(found.values()))]


def devices_of(rows: Iterable[Row]) -> list[str]:
    """The devices of rows, in their order; a CPU as people write it."""
    return list(dict.fromkeys(device_name(row.device) for row in rows))


def device_name(device: str) -> str:
    """A device as people write it."""
    return "CPU" if device == "cpu" else device


def runs_of(rows: Sequence[Row]) -> list[str]:
    """The devices of rows, in their order, and which of them has short runs alone."""
    tables: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        tables.setdefault((row.device, row.table), []).append(row)
    full = {device for (device, table), mine in tables.items() if not is_short(table, mine)}
    return [run_of(device, device not in full) for device in dict.fromkeys(row.device for row in rows)]


def run_of(device: str, short: bool) -> str:
    """A device as people write it, and that its run is a short one."""
    return f"short run on {device_name(device)}" if short else device_name(device)


def subjects_of(rows: Iterable[Row]) -> list[str]:
    """What rows are of, in their order: a model, a shape, a corpus (`readable`)."""
    return [readable(data) for data in dict.fromkeys(table_parts(row.table)[2] for row in rows)]


#: Names of data as people write them.
WRITTEN = {
    "model": "the model itself",
    "sam-vit-h-random": "SAM ViT-H (random weights)",
    "sam-vit-l-random": "SAM ViT-L (random weights)",
    "layernorm-linear-sigmoid": "LayerNorm-Linear-Sigmoid",
}
LLAMA = re.compile(r"llama-(\d(?:\.\d)?)-(\d+)b")


def readable(data: str) -> str:
    """The data of a table in words: shapes with spaces, a corpus without its hash, a Llama by its name."""
    if data in WRITTEN:
        return WRITTEN[data]
    if corpus := CORPUS.fullmatch(data):
        return f"corpus {corpus.group(1)}"
    text = LLAMA.sub(lambda found: f"Llama-{found.group(1)}-{found.group(2)}B", data)
    text = re.sub(r"-random\b", " (random weights)", text)
    text = re.sub(r"\b(\d+)-ranks\b", r"\1 ranks", text)
    text = re.sub(r"-(two-blocks|\d+-layers?)\b", lambda found: ", " + found.group(1).replace("-", " "), text)
    text = re.sub(
        r"\b(\d+) rows\b",
        lambda found: f"{found[1]} token{'s' * (found[1] != '1')}",
        text.replace("stand-in", "proxy"),
    )
    return re.sub(r"(?<=\d)x(?=\d)", " x ", text)


def days_of(rows: Sequence[Row]) -> str:
    """The first and the last day at which rows were measured."""
    days = sorted({row.date[:10] for row in rows if row.date})
    return " to ".join(dict.fromkeys([*days[:1], *days[-1:]]))


@dataclass(frozen=True)
class Comparison:
    """A published value beside the measured one of the same model, method and metric; `measured` is None without such a row.

    `published_on`, `measured_on`: the devices. `source`: where it was published. `command`: what measures it, and `reason`: why
    there is none, where a page knows (`experiments.report.accuracies`). `part`: which part of what was published ours is of,
    where it is of a part.
    """

    model: str
    method: str
    metric: str
    unit: str
    published: float
    published_on: str
    source: str
    measured: float | None = None
    measured_on: str = ""
    command: str = ""
    reason: str = ""
    part: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over published; None where nothing was measured."""
        return None if self.measured is None or not self.published else self.measured / self.published


#: What is said of a line whose kernel is not known.
UNNAMED = "unnamed"
#: Commits that a note names one by one; of more, how many there are and the oldest.
NAMED = 3


def note(rows: Iterable[Row]) -> str:
    """As "measured 2026-11-26 at 0832d6b6; 3 of 14 lines with another kernel than is chosen today"; nothing without rows."""
    rows = list(rows)
    return "; ".join(filter(None, (measured_at(rows), kernels_of(rows)))) if rows else ""


#: Units of what kernels' times make; of other times, such as those of whole searches, no kernel is asked.
TIMED = frozenset(
    (
        "us",
        "ms",
        "tokens/s",
        "images/s",
        "users/s",
        "utterances/s",
        "1/s",
        "TB/s",
        "GB/s",
        "TFLOP/s",
        "byte/s",
    )
)


#: Methods that are not ours or not quantized, as rows call them.
PEERS = re.compile(
    r"^(bfloat16|dense|eager|none|prune \+ compress|torch|transformers)\b|cuSPARSELt|torchao|SDPA"
)


def kernels_of(rows: Iterable[Row]) -> str:
    """Whether rows are of the kernels that run today, and how many lines of ours that were timed on a GPU name none; nothing of
    rows that were not timed there, and of kernels that are others' alone."""
    from experiments.report.launched import kernel_state

    rows, states = list(rows), dict[tuple[str, ...], str]()
    for row in rows:
        if row.kernel and row.experiment in EXPERIMENTS:
            tell = getattr(EXPERIMENTS[row.experiment].page_module(), "kernel_state", kernel_state)
            if state := tell(row):
                states[row.line] = state
    named = {row.line for row in rows if row.kernel}
    states |= {row.line: UNNAMED for row in rows if is_timed(row) and row.line not in named}
    counts = Counter(states.values())
    other, unnamed = counts["other"], counts[UNNAMED]
    words = [f"{other} of {len(states)} lines with another kernel than is chosen today"] * bool(other)
    words += [f"{unnamed} of {len(states)} lines do not say by which kernel; today's may be another"] * bool(
        unnamed
    )
    return ", ".join(words) if words else "by the kernels that are chosen today" * bool(states)


def is_timed(row: Row) -> bool:
    """Whether a row is a time or a rate of ours on a GPU."""
    return row.unit in TIMED and row.device != "cpu" and not PEERS.search(row.method)


def measured_at(rows: Iterable[Row]) -> str:
    """Days and commits in words; of many the days and the oldest."""
    commits = commits_of(rows)
    if len(commits) > NAMED:
        days = list(commits.values())
        between = " to ".join(dict.fromkeys((days[0], days[-1])))
        return f"measured {between} at {len(commits)} commits, the oldest {next(iter(commits))}"
    at: dict[str, list[str]] = {}
    for commit, day in commits.items():
        at.setdefault(day or "an unknown day", []).append(commit or "no known commit (an installed package)")
    return "measured " + "; ".join(f"{day} at {', '.join(names)}" for day, names in at.items())


def commits_of(rows: Iterable[Row]) -> dict[str, str]:
    """The commits of some rows, the oldest first, each with the day at which a row was first measured there."""
    found: dict[str, str] = {}
    for row in rows:
        found[row.commit] = min(found.get(row.commit, row.date), row.date)
    return {commit: date[:10] for commit, date in sorted(found.items(), key=lambda one: one[1])}
