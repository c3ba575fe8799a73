"""What a product takes by a kernel of a family: one model for all, whose coefficients are data, and the choice of the least.

    time = once + rounds * (steps * step + tile)

rounds: tiles that follow one another on the multiprocessor that has most of them. steps: of a tile along K. step, tile, once:
what a step takes, what a tile takes besides its steps, and a launch besides its tiles. What may be launched, and how many
rounds and steps it has, stands with each family; what these take was measured and stands in `coefficients.toml`, as do rows,
lengths and numbers of programs from which one way was measured to be quicker than another.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

#: The coefficients of all families.
FILE = Path(__file__).with_name("coefficients.toml")
V = TypeVar("V")
Row = Mapping[str, Any]


class Time(NamedTuple):
    """See the module text; in the unit of the family's coefficients."""

    rounds: float
    steps: float
    step: float
    tile: float = 0.0
    once: float = 0.0

    @property
    def total(self) -> float:
        """The time."""
        return self.once + self.rounds * (self.steps * self.step + self.tile)


class Coefficients:
    """The section of a family in FILE: attributes by the names there. The file is read when the first of all is asked for."""

    def __init__(self, family: str) -> None:
        self._family = family

    def __getattr__(self, name: str) -> Any:
        section = _sections()[self.__dict__["_family"]]
        if name not in section:
            raise AttributeError(f"{FILE.name}: [{self._family}] has no {name!r}, but {', '.join(section)}")
        self.__dict__.update(section)
        return section[name]


@lru_cache(maxsize=1)
def _sections() -> dict[str, dict[str, Any]]:
    return tomllib.loads(FILE.read_text("utf-8"))


def quickest(times: Iterable[tuple[V, float]]) -> V | None:
    """What takes the least; of several the first. None where there is nothing."""
    best, least = None, float("inf")
    for one, time in times:
        if time < least:
            best, least = one, time
    return best


def first_row(table: Sequence[Row], **facts: Any) -> Row:
    """The first row of a table whose conditions `when` all hold for the facts; an empty one where none does.

    A condition is a value, a list of names of which one is meant, or a list of the least and the greatest number.
    """
    return next((row for row in table if holds(row, facts)), {})


def holds(row: Row, facts: Mapping[str, Any]) -> bool:
    """Whether the facts meet all conditions of a row."""
    return all(_meets(facts[name], condition) for name, condition in row.get("when", {}).items())


def _meets(fact: Any, condition: Any) -> bool:
    if not isinstance(condition, list):
        return bool(fact == condition)
    if isinstance(condition[0], str):
        return fact in condition
    least, greatest = condition
    return bool(least <= fact <= greatest)


__all__ = ["FILE", "Coefficients", "Row", "Time", "first_row", "holds", "quickest"]
