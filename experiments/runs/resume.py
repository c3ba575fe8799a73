"""Published rows that a partial run takes as measured: where an experiment is measured by several machines in turn, each begins
with an empty cache and the files that the one before published.

Rows are taken by an experiment whose module `run` has `GOES_ON = True`, where they are of this device, scale and corpus, by the
code as it is now, and where ``origins.json`` beside them says that those of their table and code were measured with the
versions of libraries that are here; on a CPU, and of the kinds of table that `SAME_PROCESSOR` names, also with this processor.
A row does not say that itself. A table that holds rows of several origins by one code has none, and neither has one that a run
was publishing when it was killed: nothing is taken of it. A whole run, without a limit of parts or seconds, takes nothing: it
is there to measure.

Where `run` has `measured_whole(row)`, rows with the same answer are compared with each other, so all of them are of one run:
older ones leave when a run has measured some anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ao_lab.cli.terminal.progress import say
from experiments.harness.paths import Paths
from experiments.harness.provenance import is_current
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row, corpus_source, read, table_parts, with_others, write_text
from experiments.runs.environment import libraries, processor
from experiments.runs.settings import Settings

#: Libraries whose versions decide values or times.
DECIDING = ("torch", "triton", "numpy", "torchao")
OK = "status: ok"
#: What rows of one table by one code were measured with.
Origin = dict[str, Any]


def is_partial(settings: Settings) -> bool:
    """Whether a run is limited to parts or seconds, so that published rows of what it does not measure stay."""
    return bool(settings.only) or settings.seconds is not None


def known(experiment: str, settings: Settings, paths: Paths) -> list[Row]:
    """The published rows that a run need not measure again."""
    module = EXPERIMENTS[experiment].run_module()
    if not is_partial(settings) or not goes_on(module):
        return []
    found = [row for row in read(paths.data / f"{experiment}.csv") if of_this_run(row, settings)]
    found = [row for row in found if is_current(row)]
    same = Comparison(module, read_origins(paths))
    left = [why for row in found if (why := same.difference(row))]
    if left:
        reasons = "; ".join(dict.fromkeys(left))
        say(f"{len(left)} published rows of {experiment} are not gone on from: {reasons}")
    return [row for row in found if not same.difference(row)]


def kept(experiment: str, rows: Sequence[Row], before: Sequence[Row]) -> list[Row]:
    """Published rows that stay beside those of a partial run: lines that it has not, no values of a whole that it has."""
    others = with_others(rows, before)[len(rows) :]
    whole = getattr(EXPERIMENTS[experiment].run_module(), "measured_whole", lambda row: None)
    mine = {(name, row.device) for row in rows if has_value(row) and (name := whole(row)) is not None}
    return [row for row in others if not has_value(row) or (whole(row), row.device) not in mine]


def withdraw_origins(experiment: str, rows: Iterable[Row], paths: Paths) -> None:
    """Before rows are published: forget the origins of tables that will hold rows of another one, so that a kill leaves none
    that is wrong."""
    module, origins = EXPERIMENTS[experiment].run_module(), read_origins(paths)
    if goes_on(module):
        same = Comparison(module, origins)
        changed = {origin_name(row) for row in rows if same.difference(row)}
        write_origins(paths, {name: one for name, one in origins.items() if name not in changed})


def record_origins(
    experiment: str, rows: Iterable[Row], merged: Iterable[Row], settings: Settings, paths: Paths
) -> int | None:
    """After rows were published, which this run measured or took: write the origins of all that the file holds (`merged`).

    Returns how many values of this scale and device are of other or unknown origin; None where none is ever taken.
    """
    module = EXPERIMENTS[experiment].run_module()
    if not goes_on(module):
        return None
    mine, values, before = {row.key for row in rows}, [*filter(has_value, merged)], read_origins(paths)
    same = Comparison(module, before)
    here = {origin_name(row) for row in values if row.key in mine}
    mixed = {origin_name(row) for row in values if row.key not in mine and same.difference(row)} & here
    names = {origin_name(row) for row in values}
    origins = {name: one for name, one in before.items() if name in names or not is_of(name, experiment)}
    origins |= dict.fromkeys(here, same.here)
    origins = {name: one for name, one in origins.items() if name not in mixed}
    write_origins(paths, origins)
    place, same = (settings.scale, settings.device_name), Comparison(module, origins)
    beside = [row for row in values if (table_parts(row.table)[1], row.device) == place]
    return sum(same.difference(row) is not None for row in beside)


def goes_on(module: ModuleType) -> bool:
    """Whether an experiment takes published rows as measured."""
    return getattr(module, "GOES_ON", False)


def has_value(row: Row) -> bool:
    """Whether a row is of something that was measured, and does not say why it was not."""
    return not row.metric.startswith("status: ") or row.metric == OK


def of_this_run(row: Row, settings: Settings) -> bool:
    """Whether a run at these settings could have measured a row."""
    _, scale, data = table_parts(row.table)
    same_text = not corpus_source(data) or data == settings.corpus.name
    return has_value(row) and (row.device, scale) == (settings.device_name, settings.scale) and same_text


def origin_name(row: Row) -> str:
    """What has one origin: rows of a table by one code on one device."""
    return f"{row.experiment}/{row.table}/{row.device}/{row.source_hash}"


def is_of(name: str, experiment: str) -> bool:
    """Whether an origin is of rows of an experiment."""
    return name.startswith(f"{experiment}/")


def origin_here() -> Origin:
    """What is measured with now."""
    found = libraries()
    return {
        "libraries": {name: found[name] for name in DECIDING if name in found},
        "processor": processor(),
    }


@dataclass
class Comparison:
    """Of origins with what is here."""

    module: ModuleType
    origins: Mapping[str, Origin]
    here: Origin = field(default_factory=origin_here)

    def difference(self, row: Row) -> str | None:
        """Why a published row is not such as is measured here; None where it is."""
        origin = self.origins.get(origin_name(row))
        if origin is None:
            return "nothing says which versions of libraries they are of, or they are of several"
        for name in DECIDING:
            before, now = (one["libraries"].get(name) for one in (origin, self.here))
            if before != now:
                return f"they are of {name} {before}, and {now} is installed"
        kinds = getattr(self.module, "SAME_PROCESSOR", ())
        if row.device != "cpu" and table_parts(row.table)[0] not in kinds:
            return None
        other = origin["processor"] != self.here["processor"]
        return f"they are of {origin['processor']}" if other else None


def read_origins(paths: Paths) -> dict[str, Origin]:
    """All origins by name."""
    path = file_of(paths)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_origins(paths: Paths, origins: dict[str, Origin]) -> None:
    """Replace the file, where it is to say something else."""
    if origins != read_origins(paths):
        write_text(file_of(paths), json.dumps(dict(sorted(origins.items())), indent=1) + "\n")


def file_of(paths: Paths) -> Path:
    """Beside the rows."""
    return paths.data / "origins.json"


__all__ = ["is_partial", "kept", "known", "record_origins", "withdraw_origins"]
