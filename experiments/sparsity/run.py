"""Experiment `sparsity`: 2:4 sparsity, its accuracy over paired seeds and its speed at published shapes.

Parts, each a kind of table: "vision" and "language" (dense, pruned at once by each score, after sparse fine-tuning, each with
float weights, int4 and fp8; over five paired seeds), and on a GPU at full scale "products" (products of a 2:4 weight alone),
"linear" (one layer, forward and backward), "blocks" (a block's layers at the rows of decoding), "vit" (a training step of SAM's
ViT-L encoder), "sam" (images a second of its ViT-h encoder), "decode" (Llama-3.1-8B's shapes).
Published values (`experiments/published/sparsity.csv`) stand beside measured ones of the same shape alone. Stand-ins: models of
`vision` and `language` are small, at quick scale tiny; without a GPU nothing is timed, and rows of those parts say so.

A run that has a limit of seconds starts nothing after it and publishes what it has; the same call goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from experiments.harness.measuring import Deadline
from experiments.harness.registry import check_known
from experiments.harness.rows import Journal, Row
from experiments.runs.real_models import subject as subject
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings
from experiments.sparsity import models, pairs, products, real
from experiments.sparsity import subjects as vision
from experiments.sparsity.pairs import EXPERIMENT
from experiments.sparsity.timed import run_tables

SUBJECTS = {vision.KIND: vision.subject, vision.LANGUAGE_KIND: vision.language_subject}


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all parts, or of those that `settings.only` names, or of real models where these were asked for; rows in the
    journal are not measured again."""
    journal = journal if journal is not None else Journal()
    if settings.asked is not None:
        return real.run_real(settings, journal)
    deadline, failed = Deadline(settings.seconds), list[Row]()
    for name, part in PARTS.items():
        if not settings.only or name in settings.only:
            part(settings, journal, failed, deadline)
    return all_rows(settings, journal, failed)


Part = Callable[[Settings, Journal, list[Row], Deadline], None]


def accuracy_part(
    kind: str, settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline
) -> None:
    """All models of a subject."""
    pairs.run(settings, journal, SUBJECTS[kind], deadline)


def timed_part(
    kind: str, settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline
) -> None:
    """All tables of times of a kind."""
    title, tables = TIMED[kind]
    run_tables(title, tables(settings.device, settings.seed), settings, journal, failed, deadline)


#: Of each kind of times: what progress calls it, and its tables.
TIMED = {
    products.KIND: ("sparse products", products.tables),
    products.LINEAR_KIND: ("linear layers", products.linear_tables),
    models.BLOCKS_KIND: ("blocks of decoding", models.tables),
    models.TRAINING: ("training steps", models.training_tables),
    models.INFERENCE: ("image encoders", models.inference_tables),
}
#: By the names that `--only` takes, in the order in which they are measured.
PARTS: dict[str, Part] = {
    **{kind: partial(accuracy_part, kind) for kind in SUBJECTS},
    **{kind: partial(timed_part, kind) for kind in TIMED},
    models.KIND: models.run,
}


check_models = real.check_arms
check_parts = partial(check_known, EXPERIMENT, PARTS)
