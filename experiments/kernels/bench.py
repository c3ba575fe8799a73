"""`ao-lab bench`: the cases by name, on a whole run published as `ao-lab reproduce kernels` would, else only shown."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from experiments.harness import provenance
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.rows import Journal, Row, publish, read, table_parts, with_unreached
from experiments.harness.run_records import read_runs, run_name
from experiments.harness.timing import CudaWatch
from experiments.kernels.baselines.baseline import BASELINES, Baseline
from experiments.kernels.cases.all_cases import CASES, chosen
from experiments.kernels.cases.case import SHAPES
from experiments.kernels.cases.floors import Shape
from experiments.kernels.outcome import BASELINE_SECONDS, EXPERIMENT, Bench
from experiments.kernels.report.case_results import CaseResult, results_of
from experiments.kernels.run import measure, pairs, run, subject
from experiments.runs.environment import libraries, record_run
from experiments.runs.settings import Settings, settings_for

#: Kernels are measured at one scale: that of a GPU.
SCALE = "full"


def listing() -> list[dict[str, Any]]:
    """All cases, what they are, and what of `fast` they lack."""
    import fast

    return [
        {
            "name": case.name,
            "scheme": case.scheme,
            "shapes": list(case.shapes),
            "bytes_per_element": case.moved_per_element(SHAPES[case.shapes[0]]),
            "targets": {target.name: target.limit for target in case.targets},
            "missing": case.missing(fast),
        }
        for case in CASES.values()
    ]


def has_device() -> bool:
    """Whether there is a GPU to time on."""
    return torch.cuda.is_available()


def shapes_named(names: Sequence[str]) -> dict[str, Shape]:
    """Shapes by name: of the list, or any other as ROWSxCOLUMNS; ValueError for what is neither."""
    shapes = {}
    for name in names:
        found = re.fullmatch(r"(\d+)x(\d+)", name)
        if not found or not all(int(size) for size in found.groups()):
            raise ValueError(f"a shape is ROWSxCOLUMNS, such as {', '.join(SHAPES)}; got {name!r}")
        shapes[name] = (int(found[1]), int(found[2]))
    return shapes


def choose(names: Sequence[str], shapes: Sequence[str]) -> list[Any]:
    """Cases with their shapes; ValueError for unknown ones, or where nothing is left."""
    work = pairs(chosen(names), shapes_named(shapes)) if shapes else pairs(chosen(names))
    if not work:
        raise ValueError(f"none of these kernels is measured at {', '.join(shapes)}")
    return work


def part(work: Sequence[Any], *, with_baselines: bool = True) -> list[CaseResult]:
    """Measure some cases now; nothing is stored."""
    import fast

    settings = settings_for(SCALE, "cuda", Paths.default().cache)
    baselines = BASELINES if with_baselines else ()
    rows = measure(Bench(settings, fast, CudaWatch(), baselines=baselines), work)
    return one_run(rows, settings)


def complete(
    *,
    with_baselines: bool = True,
    seconds: float = math.inf,
    baseline_seconds: float = BASELINE_SECONDS,
    paths: Paths | None = None,
    published: bool = False,
) -> tuple[list[CaseResult], Written]:
    """Measure all cases, resuming where it broke off, and publish rows, page and picture; Busy as `experiments.reproduce`.

    seconds: after these no case starts. baseline_seconds: the part of it for baselines. published: rows of this GPU and of the
    code as it is now are not measured again.
    """
    paths = paths or Paths.default()
    with paths.alone():
        return _complete(paths, BASELINES if with_baselines else (), seconds, baseline_seconds, published)


def _complete(
    paths: Paths, baselines: Sequence[Baseline], seconds: float, baseline_seconds: float, published: bool
) -> tuple[list[CaseResult], Written]:
    from experiments.report.pages import write_pages

    settings = settings_for(SCALE, "cuda", paths.cache)
    started = time.perf_counter()
    path = paths.data / f"{EXPERIMENT}.csv"
    known = measured_here(read(path), settings, paths) if published else []
    where = paths.journal(EXPERIMENT, SCALE, settings.device_name, subject(settings))
    journal = Journal(where, provenance.is_current, known)
    resumed = len(journal.rows)
    rows = run(settings, journal, baselines=baselines, baseline_seconds=baseline_seconds, seconds=seconds)
    lines = publish(path, with_unreached(rows, read(path)))
    record_run(paths, EXPERIMENT, settings, time.perf_counter() - started, len(rows), resumed)
    written = [(f"{EXPERIMENT}: {len(rows)} rows", shown(path)), *write_pages(paths)]
    return one_run(lines, settings), written


def measured_here(rows: Sequence[Row], settings: Settings, paths: Paths) -> list[Row]:
    """Published rows of what was measured without fault, on a GPU and with libraries like those of here."""
    name = run_name(EXPERIMENT, settings.scale, settings.device_name)
    before = read_runs(paths.data / "environment.json").get(name, {}).get("libraries", {})
    now = libraries()
    if any(before.get(one) != now.get(one) for one in ("torch", "triton")):
        return []
    whole = {row.line for row in rows if row.metric == "status: ok" and row.device == settings.device_name}
    return [row for row in rows if row.line in whole]


def one_run(rows: Sequence[Row], settings: Settings) -> list[CaseResult]:
    """The lines of this run's device and scale."""
    mine = [
        row
        for row in rows
        if row.device == settings.device_name and table_parts(row.table)[1] == settings.scale
    ]
    found = results_of(mine)
    return [line for lines in found.values() for line in lines]


def as_json(line: CaseResult) -> dict[str, Any]:
    """A line as JSON has it."""
    return {**asdict(line), "missed": line.missed, "slower_than": line.slower_than}


__all__ = ["as_json", "choose", "complete", "has_device", "listing", "part"]
