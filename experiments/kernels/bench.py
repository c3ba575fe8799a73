"""`ao-lab bench-kernels`: the cases by name, on a whole run published as `ao-lab reproduce kernels` would, else only shown."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from ao_lab.measure.turns import CudaWatch
from experiments.harness.paths import Paths, Written, shown
from experiments.harness.rows import Journal, Row, table_parts
from experiments.kernels.baselines import BASELINES, Baseline
from experiments.kernels.cases import CASES, chosen
from experiments.kernels.operations import SHAPES, Shape
from experiments.kernels.results import CaseResult, results_of
from experiments.kernels.run import BASELINE_SECONDS, EXPERIMENT, Bench, measure, pairs, run, subject
from experiments.runs.run import publish_run
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
) -> tuple[list[CaseResult], Written]:
    """Measure all cases, resuming where it broke off, and publish rows, page and picture; Busy as `experiments.reproduce`.

    seconds: after these no case starts. baseline_seconds: the part of it for baselines. Rows of what was not reached stay.
    """
    paths = paths or Paths.default()
    with paths.alone():
        return _complete(paths, BASELINES if with_baselines else (), seconds, baseline_seconds)


def _complete(
    paths: Paths, baselines: Sequence[Baseline], seconds: float, baseline_seconds: float
) -> tuple[list[CaseResult], Written]:
    from experiments.report.pages import write_pages

    settings = settings_for(SCALE, "cuda", paths.cache)
    path = paths.rows(EXPERIMENT)
    journal = Journal(paths.journal(EXPERIMENT, SCALE, settings.device_name, subject(settings)))
    rows = run(settings, journal, baselines=baselines, baseline_seconds=baseline_seconds, seconds=seconds)
    lines = publish_run(EXPERIMENT, path, rows, partial=not baselines or math.isfinite(seconds))
    written = [(f"{EXPERIMENT}: {len(rows)} rows", shown(path)), *write_pages(paths)]
    return one_run(lines, settings), written


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
