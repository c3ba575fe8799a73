"""Rows as pages and plots read them: one table at a time, by setting, method and metric; and values that others published.

Published values are CSV files in ``experiments/published/``, with their sources. One stands beside one of ours where model,
setting and method are the same; the hardware may differ, and pages say so. A stand-in never stands beside one.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from ao_lab.config.recipe import named
from ao_lab.intervals import half_interval, is_noise, rounded
from experiments.data.corpus import DEFAULT
from experiments.harness.rows import Row, corpus_source, table_parts
from experiments.report.content import (
    QUICK,
    WINDOWS,
    Drawing,
    Section,
    Table,
    Windows,
    device_name,
    readable,
    windows_in,
)
from reference import SCHEMES, Scheme

BASELINES = ("float32", "bfloat16")


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows that pages show: of a kind of table that has a full run, not the short ones, which test that all of it runs."""
    parts = {row.table: table_parts(row.table) for row in rows}
    full = {kind for kind, scale, _ in parts.values() if scale != QUICK}
    return [row for row in rows if parts[row.table][1] != QUICK or parts[row.table][0] not in full]


@dataclass(frozen=True)
class Where:
    """Which run a table belongs to. windows: how much text its means are over, where they are means over text."""

    scale: str
    device: str
    data: str
    windows: Windows | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return f"{self.run}, {readable(self.data)}"

    @property
    def run(self) -> str:
        """The device, that a run is a short one, and how much text it is on."""
        words = (
            ["short run"] * self.short
            + [device_name(self.device)]
            + ([] if self.windows is None else [str(self.windows)])
        )
        return ", ".join(words)

    @property
    def short(self) -> bool:
        """Whether the run is a short one: by its scale, or by its little text."""
        return self.scale == QUICK or (self.windows is not None and self.windows.few)

    @property
    def other_corpus(self) -> str:
        """The source of the run's corpus where that is not the default, else nothing."""
        source = corpus_source(self.data)
        return "" if source == DEFAULT else source

    @property
    def ending(self) -> str:
        """How names of figures end: the scale, the corpus where it is not the default, and the device: `device_ending`."""
        corpus = f"-{self.other_corpus}" if self.other_corpus else ""
        return f"{self.scale}{corpus}{self.device_ending}"

    @property
    def device_ending(self) -> str:
        """The device in names of figures: nothing for a CPU at quick scale and an H200 at full, whose figures come first."""
        plain = (self.scale, self.device) in ((QUICK, "cpu"), ("full", "NVIDIA H200"))
        return "" if plain else f"-{self.device.lower().replace(' ', '-')}"

    @property
    def corpus_notes(self) -> list[str]:
        """What a section says first where the stand-in was trained on another corpus than the page's text says."""
        if not self.other_corpus:
            return []
        return [
            f"**The model of this section was trained on the corpus {self.data}, not on the source of sympy.**"
        ]


#: Metrics that say how many windows, or utterances, a table's means are over; texts whose errors are over books, and how many.
COUNTED = (WINDOWS, "utterances")
BOOKS = {"books-held-out": 7, "passages-of-held-out-books": 7}


def seeds_in(counts: Iterable[int]) -> str:
    """Over how many seeds intervals are, in words: "5 seeds", "3 to 5 seeds"; "no seeds" without any."""
    known = sorted(set(counts))
    if not known:
        return "no seeds"
    return f"{' to '.join(map(str, dict.fromkeys((known[0], known[-1]))))} seed{'s' * (known[-1] != 1)}"


def interval_cell(
    value: float, half: float, *, noise: bool = True, sign: bool = False, unit: str = ""
) -> str:
    """A value with half of its interval, to the digits of that; in parentheses where it is a change inside it."""
    text = (
        rounded(value, half, sign=sign, unit=unit) if half else f"{rounded(value, None, sign=sign)} ± 0{unit}"
    )
    return f"({text})" if noise and is_noise(value, half) else text


class Results:
    """The rows of one kind of table of one run. A value that was not measured is None, and stays so."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._rows = {(row.setting, row.method, row.metric): row for row in self.rows}
        self._days: dict[tuple[str, str], str] = {}
        for row in self.rows:
            line = row.setting, row.method
            self._days[line] = max(self._days.get(line, ""), row.date[:10])

    def value(self, setting: str, method: str, metric: str) -> float | None:
        """One value, or None."""
        row = self.row(setting, method, metric)
        return None if row is None else row.value

    def row(self, setting: str, method: str, metric: str) -> Row | None:
        """The row of a value, or None."""
        return self._rows.get((setting, method, metric))

    @property
    def count(self) -> int | None:
        """How many windows, utterances or books the means of this text are over; None where it is not known, and many."""
        return self._of_data(
            next((row for row in self.rows if row.metric in COUNTED and row.value > 0), None)
        )

    def count_of(self, setting: str, method: str) -> int | None:
        """The same of a line, which may have been measured on another number of windows than others of its table."""
        rows = (self.row(setting, method, metric) for metric in COUNTED)
        own = next((row for row in rows if row is not None and row.value > 0), None)
        return self.count if own is None else self._of_data(own)

    def _of_data(self, counted: Row | None) -> int | None:
        """A number of windows as that of independent samples: fewer windows than books are of as many books at most."""
        data = next((table_parts(row.table)[2] for row in self.rows), "")
        found = None if counted is None else int(counted.value)
        return found if data not in BOOKS else min(BOOKS[data], found or BOOKS[data])

    def half(self, setting: str, method: str, error: str) -> float | None:
        """Half of the 95% interval of a mean whose standard error is a metric, by Student's t; None where there is none."""
        return half_interval(self.value(setting, method, error), self.count_of(setting, method))

    def with_half(self, setting: str, method: str, metric: str, error: str, *, factor: float = 1.0) -> str:
        """A value and that half, to its digits, a change that it reaches in parentheses; "" where either was not measured."""
        value, half = self.value(setting, method, metric), self.half(setting, method, error)
        if value is None or half is None:
            return ""
        return interval_cell(factor * value, factor * half, noise="change" in metric)

    def day(self, setting: str, method: str) -> str:
        """The last day at which a method was measured at a setting; empty where that is not known."""
        return self._days.get((setting, method), "")

    @property
    def methods(self) -> list[str]:
        """Baselines, then methods in the order of the registry of schemes."""
        order = {name: place for place, name in enumerate((*BASELINES, *SCHEMES), start=-len(BASELINES))}
        found = dict.fromkeys(row.method for row in self.rows)
        return sorted(found, key=lambda name: order.get(name, len(order)))

    @property
    def settings(self) -> list[str]:
        """Settings in the order in which they were measured."""
        return list(dict.fromkeys(row.setting for row in self.rows))

    @property
    def lines(self) -> list[tuple[str, str]]:
        """Settings with their methods likewise."""
        return list(dict.fromkeys((row.setting, row.method) for row in self.rows))

    @property
    def metrics(self) -> list[str]:
        """Metrics likewise."""
        return list(dict.fromkeys(row.metric for row in self.rows))

    def with_setting(self, setting: str) -> Results:
        """The rows of one setting."""
        return Results(row for row in self.rows if row.setting == setting)

    def of_method(self, method: str) -> Results:
        """The rows of one method."""
        return Results(row for row in self.rows if row.method == method)

    def with_settings(self, settings: Collection[str]) -> Results:
        """The rows of some settings."""
        return Results(row for row in self.rows if row.setting in settings)


def by_run(rows: Iterable[Row], kind: str) -> dict[Where, Results]:
    """The tables of one kind, run by run; quick runs first."""
    groups: dict[Where, list[Row]] = {}
    for row in rows:
        row_kind, scale, data = table_parts(row.table)
        if row_kind == kind:
            groups.setdefault(Where(scale, row.device, data), []).append(row)
    ordered = sorted(groups, key=lambda where: (where.scale != QUICK, where.device, where.data))
    return {replace(where, windows=windows_in(groups[where])): Results(groups[where]) for where in ordered}


#: A kind of table on a page: its name, title, text, and what makes a table of its results.
Part = tuple[str, str, Sequence[str], Callable[[Results], Table]]


def sections_by_run(
    rows: Sequence[Row], parts: Iterable[Part], drawings: Callable[[str, Where, Results], list[Drawing]]
) -> list[Section]:
    """A section for every run of each kind, with one table and what drawings(kind, where, results) gives."""
    return [
        Section(f"{title} ({where})", text, drawings(kind, where, results), [table(results)])
        for kind, title, text, table in parts
        for where, results in by_run(rows, kind).items()
    ]


def best_run(runs: dict[Where, Results]) -> tuple[Where, Results] | None:
    """The run that findings speak of: the last of the largest scale (`by_run` puts quick ones first); None without any."""
    return list(runs.items())[-1] if runs else None


def is_default(method: str) -> bool:
    """Whether a method is a default scheme (or a baseline), not another project's convention."""
    return "." not in method


def scheme_named(method: str) -> Scheme | None:
    """The scheme of a method's name, also one that has no record (int4_g32_cast); None where it is no scheme."""
    if method in SCHEMES:
        return SCHEMES[method]
    try:
        return named(method)
    except ValueError:
        return None


FAMILIES = ("plain", "FP8", "MX", "NVFP4", "integer", "NF4")


def family(method: str) -> str:
    """The family of a scheme, for colours: read from its record."""
    scheme = scheme_named(method)
    if scheme is None:
        return "plain"
    if scheme.format.reach:
        return "integer"
    if scheme.format.kind == "codebook":
        return "NF4"
    if scheme.scale.storage == "float8_e8m0fnu":
        return "MX"
    if scheme.format.kind == "int":
        return "integer"
    return "NVFP4" if scheme.format.bits == 4 else "FP8"


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    """A value times a factor as text for a page, with two significant digits where its decimals would leave a zero of it;
    nothing where it is missing, words where it is not finite."""
    if value is None:
        return ""
    value = value * factor
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "exact" if value > 0 else "-inf"
    text = f"{value:.{digits}f}"
    return f"{value:.2g}" if value and not float(text) else text


# Rows as tables: one line for each (setting, method), with the metrics that a table shows.

STATUS = "status: "
#: Of a metric: the column's name, digits, and a factor.
Columns = Mapping[str, tuple[str, int, float]]


def lines_of(results: Results) -> list[tuple[str, str]]:
    """(setting, method) in the order in which they were measured."""
    return list(dict.fromkeys((row.setting, row.method) for row in results.rows))


def state(results: Results, setting: str, method: str) -> str:
    """ok, or what went wrong."""
    found = (row.metric for row in results.rows if (row.setting, row.method) == (setting, method))
    return next((metric.removeprefix(STATUS) for metric in found if metric.startswith(STATUS)), "ok")


#: How the sentence begins that says what was not measured.
NOT_MEASURED = "**Not measured: "


def failures(results: Results) -> list[str]:
    """What was not measured, and why."""
    states = {one: state(results, *one) for one in lines_of(results)}
    failed = [f"{method}, {setting} ({word})" for (setting, method), word in states.items() if word != "ok"]
    return [f"{NOT_MEASURED}{len(failed)}.** " + "; ".join(failed) + "."] if failed else []


def table(
    caption: str,
    results: Results,
    columns: Columns,
    lines: Sequence[tuple[str, str]] | None = None,
    names: tuple[str, str] = ("training", "as"),
) -> Table:
    """Methods with their settings and values; lines without any value are left out: `failures` names them. names: of the
    columns of methods and settings."""
    cells = []
    for setting, method in lines_of(results) if lines is None else lines:
        values = [results.value(setting, method, metric) for metric in columns]
        if any(value is not None for value in values):
            shown = [
                number(value, digits, factor)
                for value, (_, digits, factor) in zip(values, columns.values(), strict=True)
            ]
            cells.append([method, setting, *shown])
    titles = [*names, *(name for name, _, _ in columns.values())]
    return Table(caption, titles, cells, results.rows)


FOLDER = Path(__file__).resolve().parents[1] / "published"
DECODING = FOLDER / "ptq_decoding.csv"
#: Their metrics by our names.
METRICS = {
    "throughput": "tokens/s",
    "bandwidth": "bandwidth",
    "peak_memory": "peak memory",
    "model_size": "model size",
}
#: The table that is beside ours: same model and setting.
MODEL, HARDWARE = "Llama-3.1-8B", "H100"


@dataclass(frozen=True)
class Published:
    """One published value. setting: under which it was measured, where one table has several."""

    paper: str
    model: str
    hardware: str
    method: str
    metric: str
    value: float
    unit: str
    source: str
    setting: str = ""


@lru_cache(maxsize=1)
def decoding() -> tuple[Published, ...]:
    """Every published row about generating with a quantized Llama at batch 1."""
    return read(DECODING)


def read(path: Path) -> tuple[Published, ...]:
    """The rows of a file."""
    with path.open(newline="", encoding="utf-8") as file:
        return tuple(
            Published(**{**record, "value": float(record["value"])}) for record in csv.DictReader(file)
        )


def published(method: str, model: str = MODEL, hardware: str = HARDWARE) -> dict[str, float]:
    """What was published for a method, by our names of metrics."""
    return {
        METRICS[one.metric]: one.value
        for one in decoding()
        if (one.model, one.hardware, one.method) == (model, hardware, method) and one.metric in METRICS
    }
