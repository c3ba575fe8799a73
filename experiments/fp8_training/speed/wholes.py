"""What is measured whole or not at all, because its methods are divided by each other: the layer of a shape, decoder layers
eager and compiled, a cell of the grid.

Where a method of a whole is missing, all of them are measured again, so that a ratio is of one process on one host. What was
never measured comes before what lacks a method: one that fails wherever it is tried keeps nothing else waiting. A whole
that the deadline cut is dropped: an older measurement stays, and the next run begins it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ao_lab.cli.terminal.progress import say
from experiments.fp8_training.deadline import Deadline, is_late
from experiments.fp8_training.speed import blocks, fsdp, grid, grid_eager, linear
from experiments.harness.outcome import Values, keep, status
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row, table_name, table_parts
from experiments.runs.settings import Settings

EXPERIMENT = "fp8_training"
OK = "status: ok"
#: Values of each (setting, method).
Found = dict[tuple[str, str], Values]


@dataclass(frozen=True)
class Part:
    """What is timed in turn: the (setting, method) that can be measured here, of a layer those of one setting; what measures
    them; and of others why they cannot be."""

    methods: tuple[tuple[str, str], ...]
    measure: Callable[[], Found]
    absent: Found

    @classmethod
    def of(cls, methods: Iterable[tuple[str, str, str | None]], measure: Callable[[], Found]) -> Part:
        """Of settings and methods with the reason why one cannot be measured here, or None."""
        reasons = {(setting, method): reason for setting, method, reason in methods}
        here = tuple(one for one, reason in reasons.items() if reason is None)
        return cls(here, measure, {one: status(reason) for one, reason in reasons.items() if reason})


@dataclass(frozen=True)
class Whole:
    """Parts of one table. name: what progress calls it."""

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
    missing = []
    for whole in wholes:
        if not whole.methods(settings) <= done:
            missing.append(whole)
        else:
            add(whole, [part.absent for part in whole.parts], settings, journal, failed)
    # Sorting is stable: otherwise in the order in which they were given.
    missing.sort(key=lambda one: bool(one.methods(settings) & done))
    with bar(title, len(missing)) as step:
        for whole in missing:
            if deadline.reason() is None:
                measure_one(whole, settings, journal, failed)
            step(whole.name)


def measure_one(whole: Whole, settings: Settings, journal: Journal, failed: list[Row]) -> None:
    """Measure all parts, up to one that the deadline cut, and put them in the place of what was there; nothing is put there
    where not all parts were reached or all failed."""
    made: list[Found] = []
    for part in whole.parts:
        found = part.measure()
        if any(is_late(metric) for values in found.values() for metric in values):
            say(
                f"{whole.name}: the time of this run ended before all was measured; the next one begins it anew"
            )
            break
        made.append(found)
    setting, _ = whole.parts[0].methods[0]
    name = whole_of(whole.table(settings), setting)
    old = [row for row in journal.rows if measured_whole(row) == name]
    useless = not any(OK in one for found in made for one in found.values())
    if len(made) == len(whole.parts) and not (old and useless):
        journal.drop(old)
        add(whole, made, settings, journal, failed)


def add(whole: Whole, made: Iterable[Found], settings: Settings, journal: Journal, failed: list[Row]) -> None:
    """Rows of values, or of a status."""
    for found in made:
        for (setting, method), values in found.items():
            keep(journal, failed, settings.rows(EXPERIMENT, whole.kind, whole.data, setting, method, values))


def measured_whole(row: Row) -> tuple[str, str] | None:
    """What a row is measured together with; None where its line stands for itself."""
    return whole_of(row.table, row.setting)


def whole_of(table: str, setting: str) -> tuple[str, str] | None:
    """By table and setting: a whole layer, decoder layers whether compiled or not, those on two ranks, a cell."""
    kind, _, _ = table_parts(table)
    if kind == linear.KIND:
        return table, ""
    if kind == blocks.KIND:
        return table, setting.partition(", ")[2]
    return (table, setting) if kind in (grid.KIND, grid_eager.KIND, fsdp.KIND) else None


__all__ = ["Found", "Part", "Whole", "measure_wholes", "measured_whole"]
