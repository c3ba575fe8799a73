"""Experiment `optimizers`: optimizer states in 8 and 4 bits, of ours and of torchao.

Parts: "updates" (how far updates lie from those with float32 states, on a CPU, on torchao's own code and ours) and "paired"
(trainings over paired seeds, with their gaps). Times of a step are those of `tests/gpu/training/optim.py`. Stand-in: on a CPU
the trainings are of a tiny model and some steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.harness.measuring import Deadline, bar
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row, table_name
from experiments.optimizers import training, updates
from experiments.optimizers.training import BASE, GAPS, PAIRED, PLANS
from experiments.runs.run import Settings

EXPERIMENT = "optimizers"
PARTS = (updates.KIND, PAIRED)
DATA = "normal-gradients"


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the corpus, the seed, and the libraries that are compared."""
    return f"{settings.corpus.name}-{seed_and_libraries(settings.seed)}"


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of the parts that `settings.only` names, or of all; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    deadline = Deadline(settings.seconds)
    for part in settings.only or PARTS:
        (_updates if part == updates.KIND else _paired)(settings, journal, deadline)
    return list(journal.rows)


def _updates(settings: Settings, journal: Journal, deadline: Deadline) -> None:
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


def _paired(settings: Settings, journal: Journal, deadline: Deadline) -> None:
    plan = PLANS[settings.scale]
    name, data = plan.training.model.name, settings.corpus.name
    lines = [
        (seed, method) for seed in range(plan.seeds) for method in training.methods_of(plan, settings.device)
    ]
    with bar("trainings", len(lines)) as step:
        for seed, method in lines:
            label = BASE if method is None else method.name
            one = replace(settings, seed=seed)
            if (
                not journal.finished(table_name(PAIRED, settings.scale, data), name, label, seed)
                and deadline.left() > 0
            ):
                values = training.train(one, plan, method, seed)
                journal.add(one.rows(EXPERIMENT, PAIRED, data, name, label, values))
            step(f"{label}, seed {seed}")
    journal.add(gap_rows(settings, name, data, journal.rows))


def gap_rows(settings: Settings, setting: str, data: str, rows: Sequence[Row]) -> list[Row]:
    """Rows over seeds."""
    table = table_name(PAIRED, settings.scale, data)
    mine = [row for row in rows if row.table == table and row.device == settings.device_name]
    return [
        row
        for method, values in training.gaps(mine).items()
        for row in settings.rows(EXPERIMENT, GAPS, data, setting, method, values)
    ]
