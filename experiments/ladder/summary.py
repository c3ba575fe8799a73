"""Over all models: the geometric mean of the last rung's speed over the first, beside the published number.

Last is the last rung of the ladder that applies to a model, without self-speculation: how many drafts are accepted is a trained
model's, and these have random weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from experiments.harness.rows import Row, table_name
from experiments.ladder.rungs import EAGER, Levers, ladder
from experiments.ladder.subjects import Subject
from experiments.runs.run import Settings

EXPERIMENT, KIND, DATA = "ladder", "summary", "all-models"
TIME, MEAN, COUNT = "time", "speedup, geometric mean", "models"
METHOD = "last rung over first"
#: Over its baseline, arXiv 2410.00215, abstract. Of which models, batches and GPUs, and whether it is a mean, is unknown.
PUBLISHED = 3.88


def geometric_mean(ratios: Sequence[float]) -> float:
    """exp of the mean logarithm; ValueError without any."""
    if not ratios:
        raise ValueError("a geometric mean needs at least one ratio")
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def times(rows: Sequence[Row]) -> dict[str, float]:
    """Milliseconds of a unit by method, of the rows of one table and setting."""
    return {row.method: row.value for row in rows if row.metric == TIME}


def last_rung(one: Subject, found: dict[str, float]) -> Levers | None:
    """The last rung of a model that has a time, without self-speculation."""
    rungs = [x for x in ladder(one.weights) if not x.speculation and x.name in found]
    return rungs[-1] if rungs and rungs[-1] != EAGER else None


def speedup(one: Subject, found: dict[str, float]) -> float | None:
    """The last rung's speed over the first."""
    last = last_rung(one, found)
    return None if last is None or EAGER.name not in found else found[EAGER.name] / found[last.name]


def summary_rows(
    settings: Settings, kind: str, subjects: Sequence[Subject], names: Sequence[str], rows: Sequence[Row]
) -> Iterator[Row]:
    """Rows of each setting (`names`) in which a model has a first and a last rung. kind: of the tables of times."""
    for setting in names:
        ratios = []
        for one in subjects:
            table = table_name(kind, settings.scale, one.name)
            mine = [
                row
                for row in rows
                if (row.table, row.setting, row.device) == (table, setting, settings.device_name)
            ]
            ratio = speedup(one, times(mine))
            ratios += [] if ratio is None else [ratio]
        if ratios:
            values = {MEAN: (geometric_mean(ratios), "x"), COUNT: (float(len(ratios)), "")}
            for row in settings.rows(EXPERIMENT, KIND, DATA, setting, METHOD, values):
                yield replace(row, published=PUBLISHED) if row.metric == MEAN else row
