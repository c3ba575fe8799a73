"""Targets: what a measured value is to reach, whether it does, and the words of a page for it.

A target comes from an issue or from a published table. What was not measured misses no target: its row says why it is absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: A ratio to another library is held to 1, less what two timings of the same kernel differ by at worst.
BASELINE_TOLERANCE = 0.02


@dataclass(frozen=True)
class Target:
    """A measured value (None: not measured), and the limit that it is to reach or not to exceed; how text shows both."""

    name: str
    value: float | None
    limit: float
    at_least: bool = True
    unit: str = ""
    value_format: str = ".3g"
    limit_format: str = ".3g"

    @property
    def reached(self) -> bool | None:
        """Whether the value is on the right side of the limit; None where it was not measured."""
        if self.value is None:
            return None
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def verdict(self) -> str:
        """A cell of a table: yes, no, or nothing where it was not measured."""
        return {True: "yes", False: "no", None: ""}[self.reached]

    def __str__(self) -> str:
        value = "not measured" if self.value is None else format(self.value, self.value_format)
        limit = f"{format(self.limit, self.limit_format)} {self.unit}".strip()
        return f"{self.name} {value} of {limit}"


def missed(targets: Iterable[Target]) -> list[Target]:
    """The targets that were measured and not reached."""
    return [target for target in targets if target.reached is False]


def percent_over(value: float, base: float) -> float:
    """How much more a value is than another, in percent of that."""
    return (value / base - 1) * 100
