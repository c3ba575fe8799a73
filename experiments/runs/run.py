"""The one function that runs experiments: measure, resume, publish rows, write pages."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Sequence
from dataclasses import replace

from ao_lab.cli.terminal.progress import say
from experiments.data.corpus import Corpus
from experiments.harness import registry, revision
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.rows import Journal, Row, corpus_source, read, table_parts, write_text
from experiments.runs.merge import group, publish_run, was_tried
from experiments.runs.settings import Settings, settings_for


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
) -> Written:
    """Run experiments and write rows, figures and pages; returns (what, where) of everything written.

    tables: names of EXPERIMENTS; without, all that always run. scale: quick or full. device: cpu or cuda, by default the GPU
    where torch sees one. paths: the folders, by default `Paths.default()`. only: configurations of `decode`, or parts of
    `fp8_training`, `sparsity`, `linear` or `generate`, to measure; seconds: after which these four start nothing more;
    published rows of what is not measured stay. workers: how many of their trainings run at once, in processes. text: the
    corpus, by default the source of sympy (`experiments.runs.texts` finds others); rows of other corpora stay. changed:
    published rows are taken as measured where no file of the experiment's folders has changed since their commit. However a
    run ends, the same call at the same commit goes on with it; a part of these four also from rows that another machine
    published at this commit. ValueError for an unknown name, scale or device, `experiments.harness.paths.Busy` where another
    process works in the folders; progress goes to stderr.
    """
    names = registry.chosen(tables)
    if only and names not in (["decode"], *([name] for name in registry.LIMITED)):
        raise ValueError(
            f"only the tables {', '.join(map(repr, ('decode', *registry.LIMITED)))} can be measured in parts; name one alone"
        )
    paths = paths or Paths.default()
    settings = settings_for(scale, device, paths.cache)
    chosen = replace(settings, only=tuple(only), text=text, seconds=seconds, workers=workers, changed=changed)
    return run_all(names, chosen, paths)


def run_all(names: Sequence[str], settings: Settings, paths: Paths) -> Written:
    """Run experiments at these settings, and write the pages; returns as `reproduce` does."""
    from ao_lab.cli.terminal.progress import lines
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
    journal = Journal(path, taken(name, read(paths.rows(name)), settings))
    resumed = len(journal.rows)
    rows = module.run(settings, journal)
    publish_run(name, paths.rows(name), rows, is_partial(settings))
    if registry.EXPERIMENTS[name].trained:
        corpus = settings.corpus.describe()
        write_text(paths.data / f"{corpus['name']}.json", json.dumps(corpus, indent=2) + "\n")
    seconds = time.perf_counter() - started
    done = f"{name}: {len(rows)} rows, {len(rows) - resumed} of them measured now, in {seconds:.0f} s"
    return [(done, shown(paths.rows(name)))]


def is_partial(settings: Settings) -> bool:
    """Whether a run is limited to parts or seconds, so that published rows of what it does not measure stay."""
    return bool(settings.only) or settings.seconds is not None


def taken(name: str, published: Sequence[Row], settings: Settings) -> list[Row]:
    """Published rows that a run takes as measured: what was measured together whole or not at all, and nothing that failed.

    A partial run goes on with what was published at this commit; one of what has changed takes what has not.
    """
    if not (settings.changed or is_partial(settings)):
        return []
    experiment = registry.EXPERIMENTS[name]
    here = [row for row in published if was_tried(row) and of_this_run(row, settings)]
    new = {measurement(experiment, row) for row in here if not is_known(name, row, settings)}
    found = [row for row in here if measurement(experiment, row) not in new]
    say(f"{name}: {len(found)} of {len(here)} published rows are taken as measured")
    return found


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


__all__ = ["reproduce", "run_all", "run_one"]
