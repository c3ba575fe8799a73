"""What is measured whole or not at all, because its methods are divided by each other: the layer of a shape, decoder layers
eager and compiled, a cell of the grid.

Where a method of a whole is missing, all of them are measured again, so that a ratio is of one process on one host. What was
never measured comes before what lacks a method: one that fails wherever it is tried keeps nothing else waiting. A part that
the deadline cut is dropped: an older measurement stays, and the next run begins it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ao_lab.cli.terminal.progress import say
from experiments.fp8_training.deadline import Deadline, is_late
from experiments.harness.outcome import Values, keep
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row, table_name
from experiments.runs.settings import Settings

EXPERIMENT = "fp8_training"
#: Values of each (setting, method).
Found = dict[tuple[str, str], Values]


@dataclass(frozen=True)
class Part:
    """What is timed in turn: its methods, as (setting, method), and what measures them."""

    methods: tuple[tuple[str, str], ...]
    measure: Callable[[], Found]


@dataclass(frozen=True)
class Whole:
    """Parts of one table. name: what progress calls it; methods that cannot run here are in no part's `methods`."""

    kind: str
    data: str
    name: str
    parts: tuple[Part, ...]

    def table(self, settings: Settings) -> str:
        """The table of its rows."""
        return table_name(self.kind, settings.scale, self.data)

    def methods(self, settings: Settings) -> set[tuple[str, str, str]]:
        """All that is measured, with the table."""
        return {(self.table(settings), *one) for part in self.parts for one in part.methods}


def measure_wholes(
    title: str, wholes: Iterable[Whole], settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline
) -> None:  # fmt: skip
    """Measure those that miss a method; rows of what went well go into the journal, others to `failed`."""
    done = {(row.table, row.setting, row.method) for row in journal.rows}
    missing = [one for one in wholes if not one.methods(settings) <= done]
    # Sorting is stable: otherwise in the order in which they were given.
    missing.sort(key=lambda one: bool(one.methods(settings) & done))
    with bar(title, len(missing)) as step:
        for whole in missing:
            if deadline.reason() is None:
                measure_one(whole, settings, journal, failed)
            step(whole.name)


def measure_one(whole: Whole, settings: Settings, journal: Journal, failed: list[Row]) -> None:
    """Measure all parts, up to one that the deadline cut, and put them in the place of what was there."""
    made: list[Found] = []
    for part in whole.parts:
        found = part.measure()
        if any(is_late(metric) for values in found.values() for metric in values):
            break
        made.append(found)
    old = rows_of(whole, settings, journal, whole.parts)
    if len(made) < len(whole.parts):
        say(f"{whole.name}: not all of it fitted the time of this run; the next one measures it from the start")
        if old:
            return
    journal.drop(old)
    for found in made:
        for (setting, method), values in found.items():
            where = (EXPERIMENT, whole.kind, whole.data, setting, method)
            keep(journal, failed, [settings.row(*where, name, *value) for name, value in values.items()])


def rows_of(whole: Whole, settings: Settings, journal: Journal, parts: Sequence[Part]) -> list[Row]:
    """Rows of the settings and methods of some parts."""
    lines = {(whole.table(settings), *one) for part in parts for one in part.methods}
    return [row for row in journal.rows if (row.table, row.setting, row.method) in lines]
