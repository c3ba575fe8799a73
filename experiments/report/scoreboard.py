"""The scoreboard: every published value beside the measured one of the same model, method and metric, and those that have none.

How many of each there are is counted from the same lines, and is the first sentence of the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from experiments.report.accuracies import counted as counted_accuracies
from experiments.report.accuracies import is_accuracy
from experiments.report.content import Comparison, Table
from experiments.report.results import number

#: What a line has, the comparison first: of a phone's width that is what is seen.
COLUMNS = (
    "model",
    "method",
    "metric",
    "ours / published",
    "better",
    "published",
    "ours",
    "unit",
    "published on",
    "ours on",
    "source",
)
#: The same of a value that was not measured.
MISSING = ("model", "method", "metric", "published", "unit", "published on", "measured by", "source")
#: By words of a metric's name, which direction is better; the first that matches holds.
BETTER: Mapping[str, str] = {
    "speed": "more",
    "throughput": "more",
    "tokens/s": "more",
    "bandwidth": "more",
    "images/s": "more",
    "winogrande": "more",
    "hellaswag": "more",
    "mmlu": "more",
    "mean of 8 tasks": "more",
    "imagenet top1": "more",
    "mIoU": "more",
    "relative accuracy": "more",
    "recovered": "more",
    "gap": "less",
    "time": "less",
    "memory": "less",
    "size": "less",
    "perplexity": "less",
    "loss": "less",
    "error": "less",
    "overhead": "less",
}
#: Units as people write them.
UNITS: Mapping[str, str] = {"ratio": "times"}
#: Metrics whose values are of a device, unless their unit is that of a ratio.
RATES = ("time", "throughput", "tokens/s", "images/s", "bandwidth")
DIMENSIONLESS = ("ratio", "x", "%")
#: Models with more lines than this have a table of their own, so that one benchmark does not hide the others.
MANY = 40


def better(metric: str) -> str:
    """Whether more or less of a metric is better; ValueError for one that BETTER does not know."""
    found = next((direction for word, direction in BETTER.items() if word in metric), None)
    if found is None:
        raise ValueError(
            f"the scoreboard does not know whether more or less {metric!r} is better; add a word of its name to "
            "experiments.report.scoreboard.BETTER"
        )
    return found


@dataclass(frozen=True)
class Scoreboard:
    """The tables of values that have a measured one beside them, and of those without; the sources that the last column counts
    from 1; all values, and how many accuracies are measured."""

    measured: Sequence[Table]
    missing: Sequence[Table]
    sources: Sequence[str]
    values: Sequence[Comparison]
    accuracies: str = ""

    @property
    def tables(self) -> list[Table]:
        """Both."""
        return [*self.measured, *self.missing]

    def cells(self, column: str) -> list[str]:
        """The texts of a column of all tables, once each; more than MANY with the same first word are the last."""
        texts = {line[list(table.columns).index(column)] for table in self.tables for line in table.lines}
        alike = Counter(text.partition(" ")[0] for text in texts)
        return sorted(texts, key=lambda text: (alike[text.partition(" ")[0]] > MANY, text))

    @property
    def counted(self) -> str:
        """How many published values have a measured one, accuracies first: the first sentence of the report."""
        scores = [one for one in self.values if is_accuracy(one)]
        words = (
            f"{measured_of(self.values)} of {len(self.values)} published values are compared with one measured here (same "
            f"model or random weights of its shapes, method and metric; devices may differ){self.largest}"
        )
        known = measured_of(scores)
        if not scores:
            return words
        if known:
            return f"{words}; of the {len(scores)} accuracies among them {known}"
        return f"No published accuracy is measured here yet (0 of {len(scores)}); {words}"

    @property
    def largest(self) -> str:
        """The model that has most of the measured values, where they are more than half."""
        counts = Counter(model_of(one) for one in self.values if one.measured is not None)
        name, times = next(iter(counts.most_common(1)), ("", 0))
        return (
            f", {times} of them in one benchmark of {times} cases, {name}"
            if len(counts) > 1 and 2 * times > counts.total()
            else ""
        )

    @property
    def divided(self) -> str:
        """How many of its values stand in which table, since no table holds them all."""
        words = [f'{len(table.lines)} in the table "{table.caption}"' for table in self.tables]
        return f"Of the {len(self.values)} values {', '.join(words)}."


def model_of(one: Comparison) -> str:
    """The first word of a model's name, by which the tables group."""
    return one.model.partition(" ")[0]


def measured_of(found: Iterable[Comparison]) -> int:
    """How many were measured."""
    return sum(one.measured is not None for one in found)


def scoreboard(found: Sequence[Comparison]) -> Scoreboard:
    """Published values that were measured here (ratios first, as they compare across devices), and those that were not."""
    sources = list(dict.fromkeys(one.source for one in found))
    measured = sorted((one for one in found if one.measured is not None), key=lambda one: one.unit != "ratio")
    missing = [one for one in found if one.measured is None]
    return Scoreboard(
        measured_tables(measured, sources),
        [missing_table(missing, sources)] if missing else [],
        sources,
        found,
        counted_accuracies(found),
    )


def measured_tables(found: Sequence[Comparison], sources: Sequence[str]) -> list[Table]:
    """A table of what has few lines a model, then one of each model that has many."""
    groups: dict[str, list[Comparison]] = {}
    for one in found:
        groups.setdefault(model_of(one), []).append(one)
    few = [one for group in groups.values() if len(group) <= MANY for one in group]
    many = {name: group for name, group in groups.items() if len(group) > MANY}
    without = f", without {', '.join(many)}" if many else ""
    named = {
        f"Published values and ours{without}": few,
        **{f"Published values and ours: {name}": many[name] for name in many},
    }
    return [
        Table(caption, COLUMNS, [line(one, sources) for one in group])
        for caption, group in named.items()
        if group
    ]


def missing_table(found: Sequence[Comparison], sources: Sequence[str]) -> Table:
    """What was published and not measured, with the command that measures it or the reason why there is none."""
    lines = []
    for one in found:
        cells = {
            **dict(zip(COLUMNS, line(one, sources), strict=True)),
            "measured by": one.command or one.reason,
        }
        lines.append([cells[name] for name in MISSING])
    return Table("Published values without a measured one", MISSING, lines)


def line(one: Comparison, sources: Sequence[str]) -> list[str]:
    """The cells of one published value."""
    return [
        one.model,
        one.method,
        one.metric,
        f"({number(one.ratio, 2)})"
        if one.ratio is not None and (of_devices(one) or one.part)
        else number(one.ratio, 2),
        better(one.metric),
        short(one.published),
        short(one.measured),
        UNITS.get(one.unit, one.unit),
        one.published_on,
        ", ".join(filter(None, (one.measured_on, one.part))),
        f"[{sources.index(one.source) + 1}]",
    ]


def of_devices(one: Comparison) -> bool:
    """Whether a ratio compares devices rather than methods: of times and rates that were measured on different ones."""
    raw = one.unit not in DIMENSIONLESS and any(word in one.metric for word in RATES)
    return raw and one.published_on.split("-")[0].removeprefix("1x ") not in one.measured_on


def short(value: float | None) -> str:
    """A value with four significant digits, no fewer before the point."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
