"""Seconds and memory of calibration at the shapes of large models, as a section of the page, and their targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.calibration.shapes import (
    BLOCK,
    ESTIMATE,
    EXPERIMENT,
    IN_ALL,
    KIND,
    MEMORY,
    PASS,
    TIME,
)
from experiments.harness.rows import Row
from experiments.report.content import Section
from experiments.report.results import Results, by_run, failures, table
from experiments.report.targets import RunTargets, Target, limits

TEXT = (
    "Random weights and tokens: 128 sequences of 2048 tokens in full runs; loading is not counted. An estimate is of a model "
    "of the first blocks: what is before the second one, all others as long as the blocks after the first, and the first pass "
    "of all data through those that are not there. Where no seconds of a first pass stand beside, an estimate leaves it out: "
    "it is too low, and reaches no target. Memory over the model is what was allocated at most beyond the dense model; memory "
    "in all, of blocks that are read from files one at a time, is all that was allocated.",
)
#: Metrics with their titles, digits and factors.
COLUMNS = {
    TIME: ("seconds", 2, 1.0),
    ESTIMATE: ("seconds, estimated", 2, 1.0),
    BLOCK: ("seconds a block", 2, 1.0),
    PASS: ("seconds of the first pass", 2, 1.0),
    MEMORY: ("memory over the model (GB)", 2, 1e-9),
    IN_ALL: ("memory in all (GB)", 2, 1e-9),
}


def sections(rows: Sequence[Row]) -> list[Section]:
    """A table of each run, and what failed."""
    return [
        Section(
            f"Seconds and memory at large shapes ({where.run})",
            [*TEXT, *failures(results)],
            [],
            [table("Methods with data at large shapes", results, COLUMNS, names=("method", "shapes"))],
        )
        for where, results in by_run(rows, KIND).items()
    ]


def targets_by_run(rows: Sequence[Row]) -> list[RunTargets]:
    """Of each method at full scale on a GPU the time of all blocks, whole where that was measured, and the memory."""
    return [
        RunTargets(where, targets_of(results), "large shapes")
        for where, results in by_run(rows, KIND).items()
        if where.scale == "full" and where.device != "cpu"
    ]


def targets_of(results: Results) -> list[Target]:
    """A target for each line of ``targets.csv`` that has a value."""
    found = []
    for limit in limits(EXPERIMENT):
        measured = of_method(results, limit.key, limit.metric)
        estimated = measured is None and limit.metric == TIME
        value = of_method(results, limit.key, ESTIMATE) if estimated else measured
        if value is not None:
            factor, unit = (1.0, "s") if limit.metric == TIME else (1e-9, "GB")
            name = f"{limit.key}: {ESTIMATE if estimated else limit.metric}"
            name += "" if limit.metric == TIME else f", {value[0].rpartition(', ')[2]}"
            target = limit.target(name, value[1] * factor, unit=unit, value_format=".1f", limit_format=".0f")
            low = estimated and target.reached and of_method(results, limit.key, PASS) is None
            found.append(replace(target, value=None) if low else target)
    return found


def of_method(results: Results, method: str, metric: str) -> tuple[str, float] | None:
    """A method's setting with the most blocks that has a value, the last that was measured, and the value."""
    values = [(setting, results.value(setting, method, metric)) for setting in results.settings]
    return next(((setting, value) for setting, value in reversed(values) if value is not None), None)


__all__ = ["sections", "targets_by_run"]
