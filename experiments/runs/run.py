"""The one function that runs experiments: measure, resume, publish rows, write pages."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

from ao_lab.cli.terminal.progress import say
from experiments.data.corpus import Corpus
from experiments.harness import registry, revision
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.rows import (
    Journal,
    Row,
    corpus_source,
    publish,
    read,
    table_parts,
    write,
    write_text,
)
from experiments.runs.merge import merged, was_tried
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
    where torch sees one. paths: the folders, by default `Paths.default()`. only: configurations of `decode` or parts of
    `fp8_training`, `sparsity` or `linear` to measure; seconds: after which these three start nothing more; published rows of
    what is not measured stay. workers: how many of their trainings run at once, in processes. text: the corpus, by default the
    source of sympy (`experiments.runs.texts` finds others); rows of other corpora stay. changed: published rows are taken as
    measured where no file of the experiment's folders has changed since their commit. However a run ends, the same call at the
    same commit goes on with it; a part of these three also from rows that another machine published at this commit. ValueError
    for an unknown name, scale or device, `experiments.harness.paths.Busy` where another process works in the folders; progress
    goes to stderr.
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
    published = read(paths.rows(name))
    taken = [row for row in published if is_known(name, row, settings)]
    path = paths.journal(name, settings.scale, settings.device_name, module.subject(settings))
    journal = Journal(path, taken)
    resumed = len(journal.rows)
    rows = module.run(settings, journal)
    if is_partial(settings):
        write(paths.rows(name), merged(name, published, rows))
    else:
        publish(paths.rows(name), rows)
    if registry.EXPERIMENTS[name].trained:
        corpus = settings.corpus.describe()
        write_text(paths.data / f"{corpus['name']}.json", json.dumps(corpus, indent=2) + "\n")
    seconds = time.perf_counter() - started
    done = f"{name}: {len(rows)} rows, {len(rows) - resumed} of them measured now, in {seconds:.0f} s"
    return [(done, shown(paths.rows(name)))]


def is_partial(settings: Settings) -> bool:
    """Whether a run is limited to parts or seconds, so that published rows of what it does not measure stay."""
    return bool(settings.only) or settings.seconds is not None


def is_known(name: str, row: Row, settings: Settings) -> bool:
    """Whether a run takes a published row as measured: where it goes on with what was published at this commit with these
    versions, or measures what has changed alone."""
    _, scale, data = table_parts(row.table)
    same_text = not corpus_source(data) or data == settings.corpus.name
    if (row.device, scale) != (settings.device_name, settings.scale) or not same_text or not was_tried(row):
        return False
    if settings.changed:
        folders = registry.EXPERIMENTS[name].folders
        return not row.commit.endswith(revision.DIRTY) and revision.changed_files(row.commit, folders) == 0
    here = revision.commit(), revision.versions(settings.device)
    return is_partial(settings) and bool(here[0]) and (row.commit, row.versions) == here


__all__ = ["reproduce", "run_all", "run_one"]
