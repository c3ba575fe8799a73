"""The one function that runs experiments: measure, resume, publish rows, write pages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from experiments.data.corpus import Corpus
from experiments.harness import provenance, registry
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.rows import Journal, publish, read
from experiments.runs import resume
from experiments.runs.environment import record_run
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
) -> Written:
    """Run experiments and write rows, figures and pages; returns (what, where) of everything written.

    tables: names of EXPERIMENTS; without, all that always run. scale: quick or full. device: cpu or cuda, by default the GPU
    where torch sees one. paths: the folders, by default `Paths.default()`. only: configurations of `decode` or parts of
    `fp8_training`, `sparsity` or `linear` to measure; seconds: after which these three start nothing more; published rows of
    what is not measured stay. workers: how many of their trainings run at once, in processes. text: the corpus, by default the
    source of sympy (`experiments.runs.texts` finds others); rows of other corpora stay. Rows that an earlier run measured with
    the same code are not measured again: however a run ends, the same call goes on; a part of these three also from published
    rows (`experiments.runs.resume`). ValueError for an unknown name, scale or device, `experiments.harness.paths.Busy` where
    another process works in the folders; progress goes to stderr.
    """
    names = registry.chosen(tables)
    if only and names not in (["decode"], *([name] for name in registry.LIMITED)):
        raise ValueError(
            f"only the tables {', '.join(map(repr, ('decode', *registry.LIMITED)))} can be measured in parts; name one alone"
        )
    paths = paths or Paths.default()
    settings = settings_for(scale, device, paths.cache)
    given = replace(settings, only=tuple(only), text=text, seconds=seconds, workers=workers)
    return run_all(names, given, paths)


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
    # The code as it is before the modules are imported: what is edited while they run is not what ran.
    provenance.read_sources()
    module = registry.EXPERIMENTS[name].run_module()
    started = time.perf_counter()
    path = paths.journal(name, settings.scale, settings.device_name, module.subject(settings))
    journal = Journal(path, provenance.is_current, resume.known(name, settings, paths))
    resumed = len(journal.rows)
    rows = module.run(settings, journal)
    path = paths.data / f"{name}.csv"
    others = resume.kept(name, rows, read(path)) if resume.is_partial(settings) else []
    resume.withdraw_origins(name, rows, paths)
    published = publish(path, [*rows, *others])
    seconds = time.perf_counter() - started
    foreign = resume.record_origins(name, rows, published, settings, paths)
    recorded = record_run(paths, name, settings, seconds, len(rows), resumed, foreign)
    done = f"{name}: {len(rows)} rows, {len(rows) - resumed} of them measured now, in {seconds:.0f} s"
    return [(done, shown(path)), (f"{name}: environment", shown(recorded))]


__all__ = ["reproduce", "run_all", "run_one"]
