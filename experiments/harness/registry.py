"""The list of experiments, and the one function that runs them. A new experiment is one line in EXPERIMENTS.

An experiment's module has `run(settings, journal) -> rows`, `subject(settings)` (what a journal can be resumed for) and
EXPERIMENT; its page module has `sections(rows)`, which says in tables and figures what the rows hold.
"""

from __future__ import annotations

import difflib
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.harness.paths import Places
    from experiments.harness.settings import Settings


@dataclass(frozen=True)
class Experiment:
    """Where an experiment is written, whether it runs when none is named, whether it uses the corpus and the model, and which
    experiment it is a part of: naming that one runs this one too."""

    measure: str
    page: str
    always: bool = True
    trained: bool = True
    part_of: str = ""


EXPERIMENTS = {
    "formats": Experiment("experiments.formats.run", "experiments.formats.page"),
    "ptq": Experiment("experiments.ptq.run", "experiments.ptq.page"),
    # Compares with libraries that the other experiments do without, so it runs when it is asked for.
    "speed": Experiment("experiments.speed.run", "experiments.speed.page", always=False, trained=False),
    # Times kernels on a GPU; `ao-lab bench` is the comfortable way.
    "kernels": Experiment(
        "experiments.kernels.run", "experiments.kernels.report.page", always=False, trained=False
    ),
    # Speed and memory of a quantized model; on a CPU a tiny stand-in goes the same way.
    "decode": Experiment("experiments.decode.run", "experiments.decode.page", trained=False, part_of="ptq"),
    "qat": Experiment("experiments.qat.run", "experiments.qat.page"),
    # Time and memory of training; on a CPU tiny stand-ins go the same way.
    "qat_overhead": Experiment(
        "experiments.qat_overhead.run", "experiments.qat_overhead.page", trained=False, part_of="qat"
    ),
}

Made = list[tuple[str, str]]


def reproduce(
    tables: Sequence[str] | None = None,
    scale: str = "quick",
    device: str | None = None,
    places: Places | None = None,
    only: Sequence[str] = (),
) -> Made:
    """Run experiments and write rows, figures and pages; returns (what, where) of everything written.

    tables: names of EXPERIMENTS; without, all that always run. scale: quick or full. device: cpu or cuda, by default the GPU
    where torch sees one. places: the folders, by default `Places.default()`. only: configurations of `decode` to measure;
    published rows of the others stay. Rows that an earlier run measured with the same code are not measured again: however a
    run ends, the same call goes on. ValueError for an unknown name, scale or device, `experiments.harness.lock.Busy` where
    another process works in the folders; progress goes to stderr.
    """
    names = chosen(tables)
    from ao_lab.cli.terminal.progress import lines
    from experiments.harness.paths import Places
    from experiments.harness.settings import settings_for
    from experiments.report.pages import write_pages

    if only and names != ["decode"]:
        raise ValueError("only the table 'decode' can be measured in parts; name it alone")
    places = places or Places.default()
    settings = replace(settings_for(scale, device, places.cache), only=tuple(only))
    made: Made = []
    with places.alone():
        for name in names:
            with lines(name):
                made += run_one(name, settings, places)
        with lines("pages"):
            return made + write_pages(places)


def chosen(tables: Sequence[str] | None) -> list[str]:
    """The experiments to run, in the order of the registry; ValueError with the nearest and all names for an unknown one."""
    for name in tables or ():
        if name not in EXPERIMENTS:
            near = difflib.get_close_matches(name, EXPERIMENTS, n=3, cutoff=0.4)
            hint = f"the nearest are {', '.join(near)}; " if near else ""
            raise ValueError(f"unknown table {name!r}; {hint}the tables are {', '.join(EXPERIMENTS)}")
    return [
        name
        for name, experiment in EXPERIMENTS.items()
        if (name in tables or experiment.part_of in tables if tables else experiment.always)
    ]


def run_one(name: str, settings: Settings, places: Places) -> Made:
    """Measure one experiment, resuming where it broke off, and publish its rows."""
    from experiments.harness.environment import record_run
    from experiments.harness.rows import Journal, publish, read, with_others

    module = importlib.import_module(EXPERIMENTS[name].measure)
    started = time.perf_counter()
    journal = Journal(places.journal(name, settings.scale, settings.device_name, module.subject(settings)))
    resumed = len(journal.rows)
    rows = module.run(settings, journal)
    path = places.data / f"{name}.csv"
    publish(path, with_others(rows, read(path)) if settings.only else rows)
    seconds = time.perf_counter() - started
    recorded = record_run(places, name, settings, seconds, len(rows), resumed)
    done = f"{name}: {len(rows)} rows, {len(rows) - resumed} of them measured now, in {seconds:.0f} s"
    return [(done, shown(path)), (f"{name}: environment", shown(recorded))]


def shown(path: Path) -> str:
    """A path as a user types it: relative to the working folder where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
