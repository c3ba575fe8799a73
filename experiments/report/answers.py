"""Answers: a question, claims that rows decide by rule, and what was not measured.

A claim says that a quantity lies on one side of a limit. Rows give the quantity with an interval: of 95%, of times between two
quantiles, or for what repeats exactly the value alone. Where the whole interval lies on that side the answer is yes, where it
lies on the other no, where it holds the limit the rows do not decide. Where a row is missing the claim is "not yet" and names
the command that measures it. The page of answers is made of nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.harness.rows import Row
from experiments.report.content import Table, days_of
from experiments.report.results import Results

YES, NO, UNDECIDED, NOT_YET = "yes", "no", "undecided", "not yet"


@dataclass(frozen=True)
class Interval:
    """A quantity: its least, likeliest and largest value; the rows that it is of; what its ends are, where it is no 95%
    interval."""

    low: float
    middle: float
    high: float
    rows: tuple[Row, ...]
    ends: str = ""

    @classmethod
    def around(cls, middle: float, half: float, *rows: Row) -> Interval:
        """A value and half of its interval."""
        return cls(middle - half, middle, middle + half, rows)

    @property
    def finite(self) -> bool:
        """Whether all three are numbers."""
        return all(math.isfinite(one) for one in (self.low, self.middle, self.high))

    def minus(self, other: Interval) -> Interval:
        """The difference, as if both were independent: wider than that of paired ones."""
        below = math.hypot(self.middle - self.low, other.high - other.middle)
        above = math.hypot(self.high - self.middle, other.middle - other.low)
        middle = self.middle - other.middle
        rows = (*self.rows, *other.rows)
        return Interval(middle - below, middle, middle + above, rows, self.ends or other.ends)

    def over(self, other: Interval) -> Interval:
        """The ratio, of positive quantities: from the least over the largest to the largest over the least."""
        rows = (*self.rows, *other.rows)
        ends = self.ends or other.ends
        return Interval(self.low / other.high, self.middle / other.middle, self.high / other.low, rows, ends)

    def scaled(self, factor: float, shift: float = 0.0) -> Interval:
        """factor * (value + shift), for a positive factor."""
        low, middle, high = (factor * (one + shift) for one in (self.low, self.middle, self.high))
        return replace(self, low=low, middle=middle, high=high)


@dataclass(frozen=True)
class Claim:
    """Something that rows decide: `found` lies below `limit` ("<"), at most there ("<=") or above (">"). `of`: what of, apart
    by commas: scheme, step, model. `command`: measures it."""

    statement: str
    of: str
    found: Interval | None
    limit: float
    unit: str
    command: str
    digits: int = 3
    side: str = "<"

    @property
    def verdict(self) -> str:
        """Yes, no, undecided or not yet."""
        if self.found is None:
            return NOT_YET
        if not self.found.finite:
            return UNDECIDED
        below, above = self.found.high < self.limit, self.found.low > self.limit
        if self.side == ">":
            below, above = above, below
        if self.side == "<=":
            below = self.found.high <= self.limit
        return YES if below else NO if above else UNDECIDED

    @property
    def cells(self) -> list[str]:
        """A line of the page's table."""
        return [
            self.statement,
            self.of,
            self.verdict,
            self.value,
            self.bound,
            *self.where,
            f"`{self.command}`",
        ]

    @property
    def value(self) -> str:
        """The quantity with its interval; nothing where it was not measured."""
        if self.found is None:
            return ""
        low, middle, high = (
            f"{one:.{self.digits}f}" for one in (self.found.low, self.found.middle, self.found.high)
        )
        unit = f" {self.unit}".rstrip().replace(" %", "%")
        ends = f", {self.found.ends}" * bool(self.found.ends)
        return f"{middle}{unit}" if low == high else f"{middle}{unit} [{low}, {high}{ends}]"

    @property
    def bound(self) -> str:
        """The side, the limit and its unit."""
        return f"{self.side} {self.limit:g} {self.unit}".strip()

    @property
    def where(self) -> tuple[str, str]:
        """Devices and days of its rows."""
        rows = () if self.found is None else self.found.rows
        return ", ".join(dict.fromkeys(row.device for row in rows)), days_of(rows)


COLUMNS = ("claim", "of", "answer", "value [interval]", "yes where", "device", "measured", "command")


@dataclass(frozen=True)
class Question:
    """A question, where it was asked, and the claims that answer it."""

    title: str
    asked: str
    claims: Sequence[Claim]

    @property
    def answers(self) -> list[Answer]:
        """Of each statement how many of its claims are decided, and how; nothing that rows do not say."""
        return [
            answer(one, [claim for claim in self.claims if claim.statement == one]) for one in self.statements
        ]

    @property
    def statements(self) -> list[str]:
        """The statements of its claims."""
        return list(dict.fromkeys(claim.statement for claim in self.claims))

    @property
    def table(self) -> Table:
        """All claims."""
        rows = [row for claim in self.claims if claim.found for row in claim.found.rows]
        return Table(self.title, COLUMNS, [claim.cells for claim in self.claims], rows)


@dataclass(frozen=True)
class Answer:
    """A statement with what all of its claims are of, what each verdict is of, and the commands for what is not yet."""

    statement: str
    verdicts: Mapping[str, Sequence[str]]
    commands: Sequence[str]

    @property
    def head(self) -> str:
        """The statement with the number of claims of each verdict, where there are several."""
        several = sum(map(len, self.verdicts.values())) > 1
        counts = [f"**{verdict}**{f' {len(found)}' * several}" for verdict, found in self.verdicts.items()]
        return f"{self.statement}: {', '.join(counts)}"

    @property
    def lines(self) -> list[str]:
        """A line for each claim: its verdict, what it is of, and the value."""
        return [f"{verdict}, {one}" for verdict, found in self.verdicts.items() for one in found if one]

    def __str__(self) -> str:
        words = [f"**{verdict}** ({'; '.join(found)})" for verdict, found in self.verdicts.items()]
        by = f"; measured by {', '.join(f'`{one}`' for one in self.commands)}" if self.commands else ""
        return f"{self.statement}: {', '.join(words)}{by}."


def answer(statement: str, claims: Sequence[Claim]) -> Answer:
    """The answers of a statement's claims; what all of them are of stands with the statement, once."""
    parts = [claim.of.split(", ") for claim in claims]
    shared = [part for part in parts[0] if len(claims) > 1 and all(part in one for one in parts)]
    verdicts: dict[str, list[str]] = {}
    for verdict in (YES, NO, UNDECIDED, NOT_YET):
        for claim in (one for one in claims if one.verdict == verdict):
            name = ", ".join(part for part in claim.of.split(", ") if part not in shared)
            verdicts.setdefault(verdict, []).append(": ".join(filter(None, (name, claim.value))))
    commands = list(dict.fromkeys(one.command for one in claims if one.found is None))
    of = f", of {', '.join(shared)}" if shared else ""
    return Answer(statement + of, verdicts, commands)


def with_half(results: Results, setting: str, method: str, metric: str, half: str) -> Interval | None:
    """A value and a row that tells half of its interval; None where either is missing."""
    value, spread = results.row(setting, method, metric), results.row(setting, method, half)
    if value is None or spread is None:
        return None
    return Interval.around(value.value, spread.value, value)


def with_error(results: Results, setting: str, method: str, metric: str, error: str) -> Interval | None:
    """A value and its 95% interval, by Student's t from its standard error."""
    value, half = results.row(setting, method, metric), results.half(setting, method, error)
    return None if value is None or half is None else Interval.around(value.value, half, value)


def exact(results: Results, setting: str, method: str, metric: str) -> Interval | None:
    """A value that repeats exactly, such as a size."""
    row = results.row(setting, method, metric)
    return None if row is None else Interval.around(row.value, 0.0, row)


#: What the ends of an interval of times are.
STEPS = "20% to 80% of steps"


def between(results: Results, setting: str, method: str, low: str, metric: str, high: str) -> Interval | None:
    """A time between its quantiles."""
    rows = [results.row(setting, method, one) for one in (low, metric, high)]
    values = [row.value for row in rows if row is not None]
    return None if len(values) < 3 or rows[1] is None else Interval(*values, rows=(rows[1],), ends=STEPS)


def difference(one: Interval | None, other: Interval | None) -> Interval | None:
    """`Interval.minus`, None where either is missing."""
    return None if one is None or other is None else one.minus(other)


def ratio(one: Interval | None, other: Interval | None) -> Interval | None:
    """`Interval.over`, likewise."""
    return None if one is None or other is None else one.over(other)
