"""Targets: what a measured value is to reach, whether it does, and the words of a page for it.

A target was set before its measurement, is a published value, or another library's value of the same run. What was not measured
misses no target: its row says why it is absent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A ratio to another library is held to 1, less what two timings of the same kernel differ by at worst.
BASELINE_TOLERANCE = 0.02
#: More digits than a format has, where a value and a limit look alike; a difference after them is none.
MORE_DIGITS = 6


@dataclass(frozen=True)
class Target:
    """A measured value (None: not measured), and the limit that it is to reach or not to exceed; how text shows both.

    `day`: the last at which the value was measured; empty where that is not known.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = True
    unit: str = ""
    value_format: str = ".3g"
    limit_format: str = ".3g"
    day: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the value is on the right side of the limit; None where it was not measured."""
        return None if self.value is None else self.holds(self.value, self.limit)

    def holds(self, value: float, limit: float) -> bool:
        """Whether a value is on the right side of a limit."""
        return value >= limit if self.at_least else value <= limit

    @property
    def verdict(self) -> str:
        """A cell of a table: yes, no, or nothing where it was not measured."""
        return {True: "yes", False: "no", None: ""}[self.reached]

    @property
    def measured(self) -> str:
        """The value as a cell of a table; nothing where it was not measured."""
        return "" if self.value is None else self.texts[0]

    @property
    def texts(self) -> tuple[str, str]:
        """Value and limit, with as many more digits as tell them apart: "1.20 of 1.2" is no miss to a reader."""
        limit = format(self.limit, self.limit_format)
        if self.value is None:
            return "not measured", limit
        rounded = float(limit) != self.limit
        for more in range(MORE_DIGITS + 1):
            value = format(self.value, with_more(self.value_format, more))
            shown = format(self.limit, with_more(self.limit_format, more)) if rounded else limit
            if self.holds(float(value), float(shown)) == self.reached:
                return value, shown
        return format(self.value, self.value_format), limit

    @property
    def excess(self) -> float | None:
        """By how many percent of the limit a value misses it; None where it is reached, not measured, or the limit is 0."""
        if self.value is None or self.reached or not self.limit:
            return None
        return abs(percent_over(self.value, self.limit))

    def __str__(self) -> str:
        value, limit = self.texts
        return f"{self.name} {value} of {limit} {self.unit}".strip()


def with_more(given: str, digits: int) -> str:
    """A format with more digits: ".2f" and 1 is ".3f"; one that names no digits stays."""
    return re.sub(r"(?<=\.)\d+", lambda found: str(int(found.group()) + digits), given)


def missed(targets: Iterable[Target]) -> list[Target]:
    """The targets that were measured and not reached."""
    return [target for target in targets if target.reached is False]


def known(targets: Iterable[Target]) -> list[Target]:
    """Those that were measured."""
    return [target for target in targets if target.value is not None]


def counts(targets: Sequence[Target], what: str = "") -> str:
    """Reached of measured, `what` after it, then `rest`."""
    measured = known(targets)
    return f"{len(measured) - len(missed(measured))} of {len(measured)}{what}{rest(targets)}"


def rest(targets: Sequence[Target]) -> str:
    """The end of a sentence about those that were measured: how many were not."""
    late = len(targets) - len(known(targets))
    return f", {late} not measured" * bool(late)


def percent_over(value: float, base: float) -> float:
    """How much more a value is than another, in percent of that."""
    return (value / base - 1) * 100
