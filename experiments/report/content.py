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
    """A table of text. The first column is a name, the others are values.

    `stale`: the older lines, by their names, or by their first two cells where several lines have one name.
    """

    caption: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    stale: frozenset[str] | frozenset[tuple[str, str]] = frozenset()

    def __post_init__(self) -> None:
        """ValueError where a line has more or fewer cells than there are columns: they would stand under other names."""
        for line in self.lines:
            if len(line) != len(self.columns):
                raise ValueError(
                    f"{self.caption}: {len(line)} cells under {len(self.columns)} columns: {line}"
                )

    def is_stale(self, line: Sequence[str]) -> bool:
        """Whether a line's rows were measured by other code than today's."""
        return line[0] in self.stale or tuple(line[:2]) in self.stale


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
