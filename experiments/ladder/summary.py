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
from experiments.ladder.subjects import MODELS, STAND_INS, Subject

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


def summarized(rows: Sequence[Row]) -> list[Row]:
    """The rows with the means of all that they hold, whichever runs measured them, in place of the means that they had."""
    others = [row for row in rows if row.table.partition("/")[0] != KIND]
    runs: dict[tuple[str, str], list[Row]] = {}
    for row in others:
        kind, scale, *_ = row.table.split("/")
        if kind == EXPERIMENT and row.metric == TIME:
            runs.setdefault((scale, row.device), []).append(row)
    return [*others, *(mean for (scale, _), mine in runs.items() for mean in means(scale, mine))]


def means(scale: str, rows: Sequence[Row]) -> Iterator[Row]:
    """Rows of each setting in which a model has a first and a last rung. rows: times on one device; the latest of those that
    are in a mean gives its date and commit."""
    for setting in dict.fromkeys(row.setting for row in rows):
        ratios, used = list[float](), list[Row]()
        for one in (*MODELS, *STAND_INS):
            table = table_name(EXPERIMENT, scale, one.name)
            mine = [row for row in rows if (row.table, row.setting) == (table, setting)]
            ratio = speedup(one, times(mine))
            if ratio is not None:
                ratios.append(ratio)
                used += mine
        if ratios:
            like = replace(
                max(used, key=lambda row: row.date),
                table=table_name(KIND, scale, DATA),
                setting=setting,
                method=METHOD,
            )
            yield replace(like, metric=MEAN, value=geometric_mean(ratios), unit="x", published=PUBLISHED)
            yield replace(like, metric=COUNT, value=float(len(ratios)), unit="")
