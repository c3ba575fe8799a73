"""What an experiment's page says, as plain data: tables, figures, sections, and published values beside measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The mark of lines whose rows were measured by other code than today's.
STALE = "†"


@dataclass(frozen=True)
class Table:
    """A table of text. The first column is a name, the others are values; `stale` holds the names of older lines."""

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
class Comparison:
    """A published value beside the measured one of the same model, method and metric; `measured` is None without such a row.

    `published_on`, `measured_on`: the devices. `source`: where it was published. `stale`: measured by other code than today's.
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
    stale: bool = False

    @property
    def ratio(self) -> float | None:
        """Measured over published; None where nothing was measured."""
        return None if self.measured is None or not self.published else self.measured / self.published
