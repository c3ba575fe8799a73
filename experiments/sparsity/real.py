"""The part of experiment `sparsity` on real models: `ao-lab reproduce sparsity --model DIR`.

Of every four weights along the inputs of each linear layer (but a head that is tied to the embedding) two become zero at once,
chosen by each score, without training; then the same with int4 weights. The baseline is the model as its file gives it, beside
the same int4 weights without zeros. Scores that read data see sequences of the prose that no evaluation sees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ao_lab.config.base import SchemeConfig
from ao_lab.quantization.api import quantize_
from ao_lab.sparsity.api import sparsify_
from ao_lab.sparsity.config import SparsityConfig
from experiments.data.texts import calibration_documents, drawn_sequences, prose_of
from experiments.harness.measuring import Deadline, Values, attempt, bar, free, keep, status
from experiments.harness.registry import check_known
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.causal_lm import (
    BASE,
    FILE,
    MODEL,
    REAL,
    Bench,
    RealModel,
    check_whole,
    encoding_of,
    linears,
    not_tried,
    quality,
)
from experiments.models.quantized_model import WEIGHTS
from experiments.models.serving import EXAMPLES, task_values, tasks_of
from experiments.runs.real_models import asked_of, bench_of, facts, models_of
from experiments.runs.run import Settings, all_rows

EXPERIMENT = "sparsity"
SCORES = ("magnitude", "wanda", "ria", "sparsegpt")
#: The scheme of int4 weights, and how methods with them end.
INT4, WITH_INT4 = "int4_g64", " + int4"
DENSE_INT4 = f"dense{WITH_INT4}"
ARMS = (DENSE_INT4, *(f"2:4, {score}{end}" for score in SCORES for end in ("", WITH_INT4)))
#: Sequences that scores see, tokens of each, and sequences of a batch, by scale.
SEQUENCES, TOKENS = {"quick": 8, "full": 128}, {"quick": 512, "full": 1024}
BATCH = {"cpu": 1, "cuda": 8}


def planned(settings: Settings) -> list[str]:
    """The model as it is, then all arms or those that `settings.only` names."""
    return [BASE, *(one for one in ARMS if not settings.only or one in settings.only)]


def check_arms(names: Sequence[str]) -> None:
    """ValueError for names that are no arms."""
    check_known(EXPERIMENT, ARMS, names)


def run_real(settings: Settings, journal: Journal) -> list[Row]:
    """Rows of all models that were asked for; rows in the journal are not measured again."""
    deadline, failed = Deadline(settings.seconds), list[Row]()
    for model in models_of(EXPERIMENT, settings):
        failed += measure_model(settings, model, journal, deadline)
    return all_rows(settings, journal, failed)


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""
    kind, failed = REAL + model.name, list[Row]()
    table = table_name(kind, settings.scale, MODEL)
    todo = [arm for arm in planned(settings) if not journal.finished(table, WEIGHTS, arm)]
    if not todo:
        return []
    bench, batches = bench_of(settings, model), batches_of(settings, model)
    journal.add(settings.rows(EXPERIMENT, kind, MODEL, FILE, FILE, facts(bench)))
    with bar(f"2:4, {model.name}", len(todo)) as step:
        for arm in todo:
            for data, values in measure(settings, bench, batches, arm, deadline).items():
                keep(journal, failed, settings.rows(EXPERIMENT, kind, data, WEIGHTS, arm, values))
            free()
            step(arm)
    return failed


def batches_of(settings: Settings, model: RealModel) -> list[Tensor]:
    """What scores see: token ids, batch by batch, on the device."""
    encode, beginning = encoding_of(model)
    documents = calibration_documents(prose_of(settings.text, settings.cache))
    count, length = SEQUENCES[settings.scale], TOKENS[settings.scale]
    length = min(length, asked_of(settings).length or length)
    ids = drawn_sequences(documents, encode, length, count, settings.seed, beginning)
    return list(ids.to(settings.device).split(BATCH[settings.device]))


def measure(
    settings: Settings, bench: Bench, batches: list[Tensor], arm: str, deadline: Deadline
) -> dict[str, Values]:
    """Values of an arm by the data of their tables: each text, and the model."""
    if reason := deadline.reason():
        return {MODEL: status(reason)}
    found: dict[str, Values] = {}

    def work() -> Values:
        started = time.perf_counter()
        model = bench.base if arm == BASE else made(bench, batches, arm)
        values: Values = {"time to prune": (time.perf_counter() - started, "s")}
        with torch.no_grad():
            for windows in bench.windows:
                found[windows.text.name] = {**quality(bench, windows, model), **status("ok")}
        asked = asked_of(settings)
        if asked.tasks:
            harness = tasks_of(asked.tasks, bench.model.folder)
            values |= task_values(model, harness, EXAMPLES[settings.scale])
        return values

    whole = not_tried(attempt(work))
    return {**found, MODEL: whole} if "status: ok" in whole else {MODEL: whole}


def made(bench: Bench, batches: list[Tensor], arm: str) -> nn.Module:
    """A pruned copy, quantized where the arm says so; Undivided where a layer stays dense."""
    model = bench.copy()
    names = set(linears(model))
    score = arm.removesuffix(WITH_INT4).removeprefix("2:4, ")
    if arm != DENSE_INT4:
        data = {} if score == "magnitude" else {"calibration": batches}
        config = SparsityConfig("2:4", score=score)
        sparsify_(model, config, lambda module, name: name in names, **data)  # type: ignore[arg-type]
    if arm.endswith(WITH_INT4):
        layers = linears(model)
        quantize_(model, SchemeConfig(scheme=INT4), filter_fn=lambda module, name: name in names)
        check_whole(INT4, layers)
    return model
