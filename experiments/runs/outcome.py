"""How a run of an experiment ended: what failed of it, what its seconds did not reach, and whether it measured anything.

Where it did not, the experiment is remembered in `NOTHING`, and `ao-lab reproduce` ends with exit code 1.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from textwrap import shorten

from ao_lab.cli.terminal import say
from experiments.harness.measuring import STOPPED, is_late
from experiments.harness.rows import Row
from experiments.models import causal_lm, sentence_encoder
from experiments.models.causal_lm import FILE, REAL

#: How the metric of a status begins, how statuses of what was tried and failed do, and letters of a reason.
STATUS, FAILED, LONGEST = "status: ", ("error", "wrong"), 200
#: Experiments of which nothing could be measured, with the first reason; `ao-lab reproduce` fails then.
NOTHING: list[str] = []
#: Of the experiment under way what its seconds did not reach, published or not.
LATE: list[Row] = []


def outcome(name: str, rows: Sequence[Row]) -> str:
    """How many measurements have a result, where any failed; "" else. The first reason is said on stderr.

    Where all failed the experiment is remembered in `NOTHING`, and the command fails.
    """
    found: dict[Hashable, str] = {}
    for row in rows:
        if row.metric.startswith(STATUS) and row.method != FILE:
            found[row.table, row.setting, row.method, row.seed] = row.metric.removeprefix(STATUS)
    failed = [reason for reason in found.values() if reason.startswith(FAILED)]
    if not failed:
        return ""
    measured = sum(reason == "ok" for reason in found.values())
    said = f"{measured} of {len(found)} measured"
    why = f"{name}: {said}; {shorten(failed[0], LONGEST, placeholder='...')}"
    if measured:
        say(why)
    else:
        NOTHING.append(why)
    return f"; {said}"


def late_outcome(name: str, rows: Iterable[Row], before: Collection[Row]) -> str:
    """How many measurements the seconds did not reach; "" where they reached all. before: rows of earlier runs.

    Where this run measured nothing but models as they are, it is remembered in `NOTHING`: the same call might end there again.
    """
    rows = list(rows)
    reasons = reasons_of([*rows, *LATE])
    if not reasons:
        return ""
    said = f"{len(reasons)} measurement{'s' * (len(reasons) > 1)} not reached"
    if not any(row.metric == f"{STATUS}ok" and row not in before and not is_dense(row) for row in rows):
        NOTHING.append(
            f"{name}: nothing that was asked for was measured, {first_of(reasons)}; the same command goes on, and where it "
            "measures nothing again, give more --seconds"
        )
    return f"; {said}"


def is_dense(row: Row) -> bool:
    """Whether a row is of a model's file, or of a real model as it is, with which others are compared."""
    real = row.table.startswith((REAL, "encoder ", "speech "))
    return row.method == FILE or (real and row.method in (causal_lm.BASE, sentence_encoder.BASE))


def reasons_of(rows: Iterable[Row]) -> dict[Hashable, str]:
    """The reason of each measurement that the seconds of a run did not reach."""
    return {(row.line, row.seed): row.metric.removeprefix(STATUS) for row in rows if is_late(row.metric)}


def first_of(reasons: dict[Hashable, str]) -> str:
    """The reason that names what was under way, else the first."""
    return next((reason for reason in reasons.values() if STOPPED in reason), next(iter(reasons.values())))


def say_late(failed: Iterable[Row]) -> None:
    """How many measurements the seconds of a run did not reach, and at what it was stopped; nothing where it reached all."""
    failed = list(failed)
    LATE.extend(row for row in failed if is_late(row.metric))
    if reasons := reasons_of(failed):
        many = "s" * (len(reasons) > 1)
        say(f"{len(reasons)} measurement{many} {first_of(reasons)}; the same command goes on with them")
