"""The part of experiment `sparsity` on real models: `ao-lab reproduce sparsity --model DIR`.

Of every four weights along the inputs of each linear layer (but a head that is tied to the embedding) two become zero at once,
chosen by each score, without training; then the same with int4 weights. The baseline is the model as its file gives it, beside
the same int4 weights without zeros. Scores that read data see sequences of the prose that no evaluation sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ao_lab.config.base import SchemeConfig
from ao_lab.quantization.api import quantize_
from ao_lab.sparsity.api import sparsify_
from ao_lab.sparsity.config import SparsityConfig
from experiments.harness.measuring import Deadline, Values, status
from experiments.harness.registry import check_known
from experiments.harness.rows import Journal, Row
from experiments.models.causal_lm import BASE, REAL, Bench, RealModel, check_whole, linears
from experiments.models.quantized_model import WEIGHTS
from experiments.runs.real_models import (
    BATCH,
    Place,
    Tables,
    asked_of,
    batches_of,
    bench_of,
    by_data,
    facts,
    harness_values,
    run_models,
)
from experiments.runs.run import all_rows
from experiments.runs.settings import Settings

EXPERIMENT = "sparsity"
SCORES = ("magnitude", "wanda", "ria", "sparsegpt")
#: The scheme of int4 weights, and how methods with them end.
INT4, WITH_INT4 = "int4_g64", " + int4"
DENSE_INT4 = f"dense{WITH_INT4}"
ARMS = (DENSE_INT4, *(f"2:4, {score}{end}" for score in SCORES for end in ("", WITH_INT4)))
#: Sequences that scores see, and tokens of each, by scale.
SEQUENCES, TOKENS = {"quick": 8, "full": 128}, {"quick": 512, "full": 1024}


def planned(settings: Settings) -> list[str]:
    """The model as it is, then all arms or those that `settings.only` names."""
    return [BASE, *(one for one in ARMS if not settings.only or one in settings.only)]


def check_arms(names: Sequence[str]) -> None:
    """ValueError for names that are no arms."""
    check_known(EXPERIMENT, ARMS, names)


def run_real(settings: Settings, journal: Journal) -> list[Row]:
    """Rows of all models that were asked for; rows in the journal are not measured again."""
    return all_rows(settings, journal, run_models(EXPERIMENT, settings, journal, measure_model))


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""

    def load() -> tuple[Values, Callable[[str], dict[str, Values]]]:
        bench, length = bench_of(settings, model), TOKENS[settings.scale]
        length = min(length, asked_of(settings).length or length)
        count, batch = SEQUENCES[settings.scale], BATCH[settings.device]
        batches = batches_of(settings, model, length, count, settings.seed, batch)
        return facts(bench), partial(measure, settings, bench, batches)

    tasks = {Place(WEIGHTS, arm, settings.seed): arm for arm in planned(settings)}
    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)
    return tables.measure(f"2:4, {model.name}", tasks, load)


def measure(settings: Settings, bench: Bench, batches: list[Tensor], arm: str) -> dict[str, Values]:
    """Values of an arm by the data of their tables: each text, and the model."""

    def work(found: dict[str, Values]) -> Values:
        started = time.perf_counter()
        model = bench.base if arm == BASE else pruned(bench, batches, arm)
        values: Values = {"time to prune": (time.perf_counter() - started, "s")}
        with torch.no_grad():
            for name, result in bench.results(model).items():
                found[name] = {**result, **status("ok")}
        return {**values, **harness_values(settings, bench.model, model)}

    return by_data(work)


def pruned(bench: Bench, batches: list[Tensor], arm: str) -> nn.Module:
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
