"""Experiment `distributed`: several ranks beside one process.

**identity**: training by FSDP2, tensor parallelism, experts, sparsity, checkpoints, models of transformers, caches,
optimizers and calibration on several ranks, compared with what one process computes: bits, or a bound that is said.
**speed**: steps, decoding and exchanges, codes beside bfloat16 in turn. **failures**: ranks that die or are slow, files that
were cut.

Each case is a function that all ranks run (`experiments.distributed.cases`). `torchrun -m experiments.distributed` runs
them, and `run` starts ranks itself: on GPUs as many as there are, on a CPU two processes.
"""

from __future__ import annotations

import shutil

import torch

from experiments.distributed import (
    calibration,
    checkpoints,
    exchanges,
    failures,
    inference,
    speed,
    training,
    transformers_models,
)
from experiments.distributed.cases import SPEED, chosen
from experiments.distributed.launch import launch
from experiments.distributed.ranks import EXPERIMENT, Plan
from experiments.harness.measuring import keep
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row, read, table_name, table_parts
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings

#: In the order in which they run.
CASES = (
    *training.CASES,
    *checkpoints.CASES,
    *calibration.CASES,
    *exchanges.CASES,
    *transformers_models.CASES,
    *inference.CASES,
    *failures.CASES,
    *speed.CASES,
)


def check_parts(names: tuple[str, ...]) -> None:
    """ValueError for a name that is no case, group or kind."""
    chosen(CASES, names)


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed, the libraries that compile, and the number of ranks."""
    return f"{seed_and_libraries(settings.seed)}-{ranks_of(settings)}-ranks"


def ranks_of(settings: Settings) -> int:
    """As many as there are GPUs; on a CPU two. ValueError for one GPU."""
    ranks = torch.cuda.device_count() if settings.device == "cuda" else 2
    if ranks < 2:
        raise ValueError("distributed takes two GPUs, found one; --device cpu runs two processes of a CPU")
    return ranks


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """All rows; cases in the journal are not run again."""
    journal = journal if journal is not None else Journal()
    ranks, out, failed = ranks_of(settings), settings.cache / EXPERIMENT, list[Row]()
    data = f"{ranks}-ranks"
    cases = [
        case
        for case in chosen(CASES, settings.only)
        if not journal.finished(
            table_name(case.kind, settings.scale, data), case.expected, case.name, settings.seed
        )
    ]
    if not cases:
        return all_rows(settings, journal, failed)
    shutil.rmtree(out, ignore_errors=True)
    plan = Plan(cases, settings, out, settings.seconds)
    names = [word for case in cases for word in ("--only", case.name)]
    given = ["--out", str(out), "--device", settings.device, "--scale", settings.scale, *names]
    launch(plan, ranks, given, lambda: take(plan, journal))
    take(plan, journal)
    for row in lines_that_failed(read(plan.path)):
        keep(journal, failed, [row])
    return all_rows(settings, journal, failed)


def measured_whole(row: Row) -> tuple[str, str] | None:
    """A case whose methods are timed in turn, by table and name; None for others."""
    if table_parts(row.table)[0] != SPEED:
        return None
    return row.table, row.method if row.setting == speed.IN_TURN else row.setting


def take(plan: Plan, journal: Journal) -> None:
    """Put rows of cases that passed into the journal."""
    known, rows = {row.key for row in journal.rows}, read(plan.path)
    passed = {row.line for row in rows if row.metric == "status: ok"}
    new = [row for row in rows if row.line in passed and row.key not in known]
    if new:
        journal.add(new)


def lines_that_failed(rows: list[Row]) -> list[Row]:
    """Rows of cases that did not pass."""
    passed = {row.line for row in rows if row.metric == "status: ok"}
    return [row for row in rows if row.line not in passed]


__all__ = ["CASES", "check_parts", "measured_whole", "run", "subject"]
