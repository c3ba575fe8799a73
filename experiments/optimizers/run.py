"""Experiment `optimizers`: optimizer states in 8 and 4 bits, of ours and of torchao.

Parts: "updates" (how far updates lie from those with float32 states, on a CPU, on torchao's own code and ours), "paired"
(trainings over paired seeds, with their gaps) and "speed" (what a step takes); `--only` with the names of methods means paired
trainings of these. Stand-in: on a CPU the trainings are of a tiny
model and some steps, and a step is of small parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from experiments.harness.measuring import Deadline, bar, keep, measure_each
from experiments.harness.registry import check_known
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row, table_name
from experiments.optimizers import speed, training, updates
from experiments.optimizers.training import GAPS, PAIRED, PLANS
from experiments.runs.settings import Settings

EXPERIMENT = "optimizers"
KINDS = (updates.KIND, speed.SPEED, PAIRED)
#: What `--only` names: parts, and methods of paired trainings, beside which those with float32 states always train.
PARTS = (*KINDS, *(method.name for method in training.METHODS))
DATA = "normal-gradients"
check_parts = partial(check_known, EXPERIMENT, PARTS)


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the corpus, the seed, and the libraries that are compared."""
    return f"{settings.corpus.name}-{seed_and_libraries(settings.seed)}"


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of the parts that `settings.only` names, or of all; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    check_parts(settings.only)
    deadline = Deadline(settings.seconds)
    parts = {updates.KIND: _updates, speed.SPEED: _speed, PAIRED: _paired}
    failed: list[Row] = []
    named = [PAIRED if part not in KINDS else part for part in settings.only]
    for part in dict.fromkeys(named or KINDS):
        failed += parts[part](settings, journal, deadline)
    return [*journal.rows, *failed]


def _updates(settings: Settings, journal: Journal, deadline: Deadline) -> list[Row]:
    table = table_name(updates.KIND, settings.scale, DATA)
    settings = replace(settings, device="cpu")
    lines = [(setting, method) for setting in updates.SETTINGS for method in updates.METHODS]
    with bar("updates", len(lines)) as step:
        for setting, method in lines:
            if not journal.finished(table, setting.name, method, settings.seed) and deadline.left() > 0:
                reason = updates.missing(method)
                values = (
                    updates.measure(setting, method, settings.seed)
                    if reason is None
                    else {f"status: {reason}": (1.0, "")}
                )
                journal.add(settings.rows(EXPERIMENT, updates.KIND, DATA, setting.name, method, values))
            step(f"{method}, {setting.name}")
    return []


def _speed(settings: Settings, journal: Journal, deadline: Deadline) -> list[Row]:
    """All methods in turn, unless the journal has them; rows of those that failed."""
    shape, table = speed.SHAPES[settings.scale], table_name(speed.SPEED, settings.scale, speed.DATA)
    names = speed.methods_of(settings.device)
    if deadline.left() <= 0 or any(
        journal.finished(table, shape.name, name, settings.seed) for name in names
    ):
        return []
    failed: list[Row] = []
    with bar("steps", 1) as step:
        for name, values in speed.measure(shape, settings.device).items():
            keep(
                journal, failed, settings.rows(EXPERIMENT, speed.SPEED, speed.DATA, shape.name, name, values)
            )
        step(shape.name)
    return failed


def _paired(settings: Settings, journal: Journal, deadline: Deadline) -> list[Row]:
    plan, table = PLANS[settings.scale], table_name(PAIRED, settings.scale, settings.corpus.name)
    name = plan.name
    chosen = {*settings.only}.difference(KINDS)
    names = [
        one
        for one in training.names_of(plan, settings.device)
        if not chosen or one in {training.BASE, *chosen}
    ]
    if missing := sorted(chosen.difference(names)):
        raise ValueError(
            f"{missing[0]!r} is not trained at scale {settings.scale} on {settings.device}; name one of {names[1:]}"
        )
    # All seeds of a method before the next one: a gap needs them.
    lines = [(one, seed) for one in names for seed in range(plan.seeds)]
    works = {
        f"{method}, seed {seed}": partial(_trained, replace(settings, seed=seed), plan, method)
        for method, seed in lines
        if not journal.finished(table, name, method, seed)
    }
    measure_each("trainings", works, settings.workers, deadline, lambda _, rows: journal.add(rows))
    journal.add(gap_rows(settings, name, settings.corpus.name, journal.rows))
    return []


def _trained(settings: Settings, plan: training.Plan, method: str) -> list[Row]:
    """Rows of a training, in a process of its own where several run at once."""
    values = training.train(settings, plan, training.named(method), settings.seed)
    return settings.rows(EXPERIMENT, PAIRED, settings.corpus.name, plan.name, method, values)


def gap_rows(settings: Settings, setting: str, data: str, rows: Sequence[Row]) -> list[Row]:
    """Rows over seeds."""
    table = table_name(PAIRED, settings.scale, data)
    mine = [row for row in rows if row.table == table and row.device == settings.device_name]
    return [
        row
        for method, values in training.gaps(mine).items()
        for row in settings.rows(EXPERIMENT, GAPS, data, setting, method, values)
    ]
