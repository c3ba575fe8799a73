"""Published rows that a partial run takes as measured: where an experiment is measured by several machines in turn, each begins
with an empty cache and the file that the one before published.

Rows are taken by an experiment whose module `run` has `GOES_ON = True`, where they are of this device, scale and corpus, by the
code as it is now, and where the record of the run that published them names the versions of the libraries that are here, on
a CPU also this processor. Whether a whole file can be trusted is in that record, because a row does not say: it counts rows
that are kept from machines with other versions, and with any of them nothing is taken. A whole run, without a limit of parts
or seconds, takes nothing: it is there to measure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ao_lab.cli.terminal.progress import say
from experiments.harness.paths import Paths
from experiments.harness.provenance import is_current
from experiments.harness.registry import EXPERIMENTS
from experiments.harness.rows import Row, corpus_source, read, table_parts
from experiments.harness.run_records import read_runs
from experiments.runs.environment import FOREIGN, libraries, processor, record_name
from experiments.runs.settings import Settings

#: Libraries whose versions decide values or times.
DECIDING = ("torch", "triton", "numpy", "torchao")
OK = "status: ok"


def is_partial(settings: Settings) -> bool:
    """Whether a run is limited to parts or seconds, so that published rows of what it does not measure stay."""
    return bool(settings.only) or settings.seconds is not None


def known(experiment: str, settings: Settings, paths: Paths) -> list[Row]:
    """The published rows that a run need not measure again."""
    if not is_partial(settings) or not goes_on(experiment):
        return []
    found = usable(read(paths.data / f"{experiment}.csv"), settings)
    record = read_runs(paths.data / "environment.json").get(record_name(experiment, settings), {})
    reason = difference(record, settings) if found else None
    if reason:
        say(f"{len(found)} published rows of {experiment} are not gone on from: {reason}")
    return [] if reason else found


def goes_on(experiment: str) -> bool:
    """Whether an experiment takes published rows as measured."""
    return getattr(EXPERIMENTS[experiment].run_module(), "GOES_ON", False)


def foreign(experiment: str, others: Iterable[Row], settings: Settings) -> int | None:
    """How many published rows that a run left as they were are of the code as it is now; None where none are ever taken."""
    return len(usable(others, settings)) if goes_on(experiment) else None


def usable(rows: Iterable[Row], settings: Settings) -> list[Row]:
    """Rows of this device, scale and corpus by the code as it is now; not those that say why something was not measured."""
    return [row for row in rows if of_this_run(row, settings) and is_current(row)]


def of_this_run(row: Row, settings: Settings) -> bool:
    """Whether a run at these settings could have measured a row."""
    _, scale, data = table_parts(row.table)
    if row.metric.startswith("status: ") and row.metric != OK:
        return False
    same_text = not corpus_source(data) or data == settings.corpus.name
    return (row.device, scale) == (settings.device_name, settings.scale) and same_text


def difference(record: dict[str, Any], settings: Settings) -> str | None:
    """Why rows of the run with this record are not those of a run here; None where they are."""
    if FOREIGN not in record:
        return "no record says which versions of libraries all of them are of"
    if record[FOREIGN]:
        return f"{record[FOREIGN]} of them are of other versions of libraries or processors than the last run"
    here = libraries()
    for name in DECIDING:
        if record["libraries"].get(name) != here.get(name):
            return f"they are of {name} {record['libraries'].get(name)}, and {here.get(name)} is installed"
    if settings.device == "cpu" and record["machine"]["processor"] != processor():
        return f"they are of {record['machine']['processor']}"
    return None


__all__ = ["foreign", "is_partial", "known"]
