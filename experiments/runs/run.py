"""The one function that runs experiments: measure, resume, publish rows, write pages.

Rows that were measured together (`group`) come and go together: of those that this run, an earlier one or another machine
measured, the later ones stay. A row that only says why nothing was tried takes the place of no line that was measured, but
leaves with its group.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from ao_lab.cli.terminal import say
from ao_lab.install.extras import pip_install
from experiments.data.corpora import corpus_record, load
from experiments.data.corpus import DEFAULT, Corpus
from experiments.data.programs import check_limits
from experiments.harness import registry, revision
from experiments.harness.measuring import Values, keep
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.registry import EXPERIMENTS, Experiment, chosen
from experiments.harness.rows import (
    NOT_RUN,
    Journal,
    Row,
    corpus_source,
    publish,
    read,
    table_name,
    table_parts,
    write,
    write_text,
)
from experiments.models.pretrained import MODELS, check_task
from experiments.runs.outcome import LATE, late_outcome, outcome, say_late
from experiments.runs.settings import RealModels, Settings, settings_for
from experiments.runs.windows import measured_on


class TimedTable(Protocol):
    """Methods that are timed in turn, whole or not at all: a kind of table, its data, the setting of all its rows."""

    @property
    def kind(self) -> str:
        """The kind of its rows' table."""

    @property
    def data(self) -> str:
        """The data of its rows' table."""

    @property
    def setting(self) -> str:
        """The setting of its rows."""


def where_of(settings: Settings, table: TimedTable) -> tuple[str, str]:
    """Table and setting of a table's rows."""
    return table_name(table.kind, settings.scale, table.data), table.setting


def put_table(
    experiment: str,
    table: TimedTable,
    found: Mapping[str, Values],
    settings: Settings,
    journal: Journal,
    failed: list[Row],
) -> None:
    """Rows of a table's methods in the place of older ones, where something was measured."""
    where = where_of(settings, table)
    if any("status: ok" in values for values in found.values()):
        journal.drop([row for row in journal.rows if (row.table, row.setting) == where])
    for method, values in found.items():
        keep(
            journal, failed, settings.rows(experiment, table.kind, table.data, table.setting, method, values)
        )


def all_rows(settings: Settings, journal: Journal, failed: Sequence[Row]) -> list[Row]:
    """What a run publishes: with a limit of seconds, what another run measured stays where this one did not come to it, and of
    models by `--model` it is told what was not measured."""
    late = NOT_RUN if settings.seconds is not None and settings.asked is None else ()
    say_late(failed)
    return journal.rows + [row for row in failed if not row.metric.startswith(late)]


def published_shapes(settings: Settings) -> bool:
    """Whether a run measures the shapes of published models, at full scale on a GPU, or tiny stand-ins."""
    return settings.scale == "full" and settings.device == "cuda"


def reproduce(
    tables: Sequence[str] | None = None,
    scale: str = "quick",
    device: str | None = None,
    paths: Paths | None = None,
    only: Sequence[str] = (),
    text: Corpus | None = None,
    seconds: float | None = None,
    workers: int = 1,
    changed: bool = False,
    real: RealModels | None = None,
) -> Written:
    """Run experiments and write rows, figures and pages; returns (what, where) of everything written.

    tables: names of EXPERIMENTS; without, all that always run. scale: quick or full. device: cpu or cuda, by default the GPU
    where torch sees one. paths: the folders, by default `Paths.default()`. only: configurations of `decode`, or parts of an
    experiment of `registry.LIMITED`, to measure; seconds: after which one of these starts nothing more; published rows of
    what is not measured stay. workers: how many of their trainings run at once, in processes. text: the corpus, by default
    the source of sympy (`experiments.runs.run` finds others); rows of other corpora stay. changed: published rows are taken
    as measured where no file of the experiment's folders has changed since their commit. real: what to measure on real
    models, alone, where an experiment does (`Experiment.windows`); `only` then names schemes. However a run ends, the same call
    at the same commit goes on with it; a part of one of these also from rows that another machine published at this commit.
    ValueError for an unknown name, scale or device, `experiments.harness.paths.Busy` where another process works in the
    folders; progress goes to stderr.
    """
    names = registry.chosen(tables)
    if real is not None:
        check_asked(tables or (), real, only)
    if real is not None or only or seconds is not None:
        # What is limited to a part is not what another experiment's name runs too.
        names = [name for name in names if name in (tables or names)]
    if only and real is None and names not in (["decode"], *([name] for name in registry.LIMITED)):
        raise ValueError(
            f"only the tables {', '.join(map(repr, ('decode', *registry.LIMITED)))} can be measured in parts; name one alone"
        )
    paths = paths or Paths.default()
    settings = settings_for(scale, device, paths.cache)
    chosen = replace(settings, only=tuple(only), text=text, seconds=seconds, workers=workers, changed=changed)
    if real is not None:
        chosen = replace(chosen, models=real.models, asked=real)
    return run_all(names, chosen, paths)


#: Experiments that take a text of the user's.
OF_OWN_TEXT = ("ptq", "calibration", "qat", "fp8_training")


def check_asked(names: Sequence[str], real: RealModels, only: Sequence[str]) -> None:
    """ValueError where real models are asked of experiments that measure none, for unknown schemes, and without the harness."""
    having = [name for name, experiment in EXPERIMENTS.items() if experiment.windows is not None]
    if not names or not set(names) <= set(having):
        raise ValueError(
            f"--model goes with one of {', '.join(having)}: ao-lab reproduce {having[0]} --model DIR"
        )
    if real.execute:
        if set(names) != {"ptq"}:
            raise ValueError("--execute is of ptq alone: ao-lab reproduce ptq --model NAME --execute")
        check_limits()
    for name in names:
        for given in filter(MODELS.__contains__, real.models):
            check_task(MODELS[given].task, EXPERIMENTS[name].tasks, given, name)
        module = registry.EXPERIMENTS[name].run_module()
        # What --only names of a model may be other than the parts of a run without one.
        getattr(module, "check_models", module.check_parts)(only)
    if real.own_text is not None and list(names) not in ([name] for name in OF_OWN_TEXT):
        raise ValueError(
            f"--text goes with one of {', '.join(OF_OWN_TEXT)} alone: ptq evaluates on it, calibration calibrates and the "
            "others fine-tune on its first nine tenths and evaluate on the rest"
        )
    if real.tasks and importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            f"--task {real.tasks[0]} is one of lm-evaluation-harness, which is not installed: {pip_install('eval')}"
        )


def run_all(names: Sequence[str], settings: Settings, paths: Paths) -> Written:
    """Run experiments at these settings, and write the pages; returns as `reproduce` does."""
    from ao_lab.cli.terminal import lines
    from experiments.report.pages import write_pages

    written: Written = []
    with paths.alone():
        for name in names:
            with lines(name):
                written += run_one(name, settings, paths)
        with lines("pages"):
            return written + write_pages(paths)


def run_one(name: str, settings: Settings, paths: Paths) -> Written:
    """Measure one experiment, resuming where it broke off, and publish its rows."""
    if revision.commit().endswith(revision.DIRTY):
        say(f"{name}: the tree has uncommitted changes; rows say so ({revision.commit()})")
    module, started = registry.EXPERIMENTS[name].run_module(), time.perf_counter()
    path = paths.journal(name, settings.scale, settings.device_name, module.subject(settings))
    put = partial(publish_run, name, paths.rows(name), partial=True) if is_partial(settings) else None
    published = read(paths.rows(name))
    journal = Journal(path, taken(name, published, settings), put)
    say_kept(name, journal, published, settings)
    resumed, before = sum(map(was_tried, journal.rows)), set(journal.rows)
    LATE.clear()
    try:
        rows = module.run(settings, journal)
    except BaseException:
        # What ends a run of a part, SIGTERM too, leaves published what it has measured.
        if put is not None:
            put(journal.rows)
        raise
    publish_run(name, paths.rows(name), rows, is_partial(settings))
    if registry.EXPERIMENTS[name].trained and settings.asked is None:
        corpus = settings.corpus.describe()
        write_text(paths.data / f"{corpus['name']}.json", json.dumps(corpus, indent=2) + "\n")
    seconds = time.perf_counter() - started
    tried = sum(map(was_tried, rows))
    told = f"{name}: {tried} rows, {tried - resumed} of them measured now, in {seconds:.0f} s"
    return [(f"{told}{outcome(name, rows)}{late_outcome(name, rows, before)}", shown(paths.rows(name)))]


def is_partial(settings: Settings) -> bool:
    """Whether a run is limited to parts or seconds, so that published rows of what it does not measure stay."""
    return bool(settings.only) or settings.seconds is not None


def taken(name: str, published: Sequence[Row], settings: Settings) -> list[Row]:
    """Published rows that a run takes as measured: what was measured together whole or not at all, nothing that failed, and of
    real models what was measured on its texts and windows.

    A partial run goes on with what was published at this commit; one of what has changed takes what has not.
    """
    if not (settings.changed or is_partial(settings)):
        return []
    experiment = registry.EXPERIMENTS[name]
    here = [row for row in published if was_tried(row) and of_this_run(row, settings)]
    new = {measurement(experiment, row) for row in here if not is_known(name, row, settings)}
    known = [row for row in here if measurement(experiment, row) not in new]
    return known if experiment.windows is None else measured_on(known, settings, experiment.windows)


def say_kept(name: str, journal: Journal, published: Sequence[Row], settings: Settings) -> None:
    """How many rows a run goes on with, of the journal or published; of a whole run of what has changed also how many published
    ones it measures again."""
    kept = {row.key for row in journal.rows if was_tried(row)}
    here = published if settings.changed and not is_partial(settings) else ()
    again = [row for row in here if was_tried(row) and of_this_run(row, settings) and row.key not in kept]
    more = f"; {len(again)} are measured anew" * bool(again)
    if kept or again:
        say(f"{name}: {len(kept)} rows that were measured before are kept{more}")


def measurement(experiment: registry.Experiment, row: Row) -> Hashable:
    """What is measured at once: a whole, or a method at a setting, whose rows may be in several tables of the same data (one of
    curves has the kind before the setting)."""
    together = group(experiment, row)
    if together != (row.line, row.seed):
        return together
    return table_parts(row.table)[2], row.setting.rpartition(": ")[2], row.method, row.seed


def of_this_run(row: Row, settings: Settings) -> bool:
    """Whether a run at these settings could have measured a row."""
    _, scale, data = table_parts(row.table)
    same_text = not corpus_source(data) or data == settings.corpus.name
    return (row.device, scale) == (settings.device_name, settings.scale) and same_text


def is_known(name: str, row: Row, settings: Settings) -> bool:
    """Whether a row needs no new measurement: no failure, of a tree without changes, with the versions of here (a GPU's driver
    aside), at this commit, or at one since which nothing has changed that matters."""
    failed = row.metric.startswith("status: ") and row.metric != "status: ok"
    if failed or not row.commit or row.commit.endswith(revision.DIRTY):
        return False
    ends = slice(None) if row.device == "cpu" else slice(-1)
    if row.versions.split("; ")[ends] != revision.versions(settings.device).split("; ")[ends]:
        return False
    if settings.changed:
        return revision.changed_files(row.commit, registry.EXPERIMENTS[name].folders) == 0
    return row.commit == revision.commit()


# The corpus that a run was given by name and folder.


def text_for(tables: Sequence[str] | None, name: str = DEFAULT, path: Path | None = None) -> Corpus | None:
    """The corpus `name`, read from the folder `path`; None for the default, which is read when it is needed.

    ValueError for unknown names of experiments or corpora, for experiments of which none uses a corpus, and for a folder that
    does not hold the corpus.
    """
    corpus_record(name)
    if name == DEFAULT and path is None:
        return None
    names = chosen(tables)
    if not any(EXPERIMENTS[one].trained for one in names):
        using = ", ".join(one for one, experiment in EXPERIMENTS.items() if experiment.trained)
        raise ValueError(f"{', '.join(names)}: no corpus is used there, but by {using}; leave --corpus out")
    return load(name, path)


#: How the status of what was not tried begins.
NOT_TRIED = (NOT_RUN, "status: missing")


def was_tried(row: Row) -> bool:
    """Whether something was measured, or failed when it was."""
    return not row.metric.startswith(NOT_TRIED)


def group(experiment: Experiment, row: Row) -> Hashable:
    """What a row is measured together with: its line and seed, or what the experiment's `measured_whole` says."""
    whole = getattr(experiment.run_module(), "measured_whole", lambda row: None)(row)
    return (row.line, row.seed) if whole is None else (whole, row.device)


def merged(name: str, ours: Iterable[Row], theirs: Iterable[Row]) -> list[Row]:
    """Rows of both sides, of each group those of the later date; theirs where both are as old. A reason why nothing was tried
    stays where neither side tried it. What an experiment computes of all of its rows (`summarized`) is computed anew."""
    experiment, found = EXPERIMENTS[name], dict[Hashable, list[Row]]()
    sides = [list(ours), list(theirs)]
    for rows in sides:
        mine = by_group(experiment, filter(was_tried, rows))
        found |= {key: one for key, one in mine.items() if key not in found or age(one) >= age(found[key])}
    together = [row for rows in found.values() for row in rows]
    tried = {(row.line, row.seed) for row in together}
    reasons = {(row.line, row.seed): row for rows in sides for row in rows if not was_tried(row)}
    together += [row for line, row in reasons.items() if line not in tried]
    together = getattr(experiment.run_module(), "summarized", list)(together)
    return sorted(together, key=lambda row: (row.experiment, row.table, row.device))


def by_group(experiment: Experiment, rows: Iterable[Row]) -> dict[Hashable, list[Row]]:
    """Rows that were measured together."""
    found: dict[Hashable, list[Row]] = {}
    for row in rows:
        found.setdefault(group(experiment, row), []).append(row)
    return found


def age(rows: Iterable[Row]) -> str:
    """By which the later of two groups is known."""
    return max(row.date for row in rows)


def publish_run(name: str, path: Path, rows: Sequence[Row], partial: bool) -> list[Row]:
    """Put a run into the published rows; of what it did not try, and of a partial run what it has not, older rows stay."""
    before = read(path)
    if partial:
        together = merged(name, before, rows)
        write(path, together)
        return together
    late = {(row.line, row.seed) for row in rows if not was_tried(row)}
    return publish(path, merged(name, [row for row in before if (row.line, row.seed) in late], rows))


def merge(folders: Sequence[Path], paths: Paths) -> Written:
    """Take in the rows of other folders of reports; returns what was written.

    ValueError for a folder without rows of an experiment, or with a file that holds none, before anything is written.
    """
    found = {folder: {name: read(paths.of(folder).rows(name)) for name in EXPERIMENTS} for folder in folders}
    for folder, tables in found.items():
        if not any(tables.values()):
            raise ValueError(
                f"{folder} holds no rows (data/NAME.csv or .csv.gz of {', '.join(EXPERIMENTS)}); give the folder that "
                "`--reports` named"
            )
    written: Written = []
    with paths.alone():
        for name in EXPERIMENTS:
            rows = before = read(paths.rows(name))
            for tables in found.values():
                rows = merged(name, rows, tables[name])
            # By their text: a missing value is not equal to itself.
            if taken := {*map(str, rows)} - {*map(str, before)}:
                write(paths.rows(name), rows)
                written.append((f"{name}: {len(taken)} rows", shown(paths.rows(name))))
    return written
