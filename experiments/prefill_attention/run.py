"""Experiment `prefill_attention`: attention with operands in 8 bits, on the activations of trained models.

**Attention** (`ATTENTION`): queries, keys and values of a model's layers on a window of text; the result of each recipe beside
attention in float64 of the same bfloat16 states: cosine and norm of the difference over that of the result, the mean over
layers and the worst of them. Recipes of which one step is left out say what the step is for.

**Predictions** (`ALL`): every token of the windows, with the model's attention replaced, beside its own predictions; standard
errors are over documents.

**Speed** (`SPEED`): what a call takes beside torch's (`experiments.prefill_attention.speed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ao_lab.attention import use_attention_
from experiments.data.texts import TextWindows
from experiments.harness.measuring import Deadline, Values, attempt, bar, keep, status
from experiments.harness.registry import check_known
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.causal_lm import REAL, Bench, RealModel, quality
from experiments.prefill_attention import WINDOWS, speed
from experiments.runs.real_models import Place, Tables, bench_of, real_subject, run_models
from experiments.runs.run import all_rows, published_shapes
from experiments.runs.settings import Settings
from fast.attention.quantized import quantized_attention
from reference.attention.attention import attention
from reference.attention.quantized import ATTENTION_RECIPES, AttentionRecipe

EXPERIMENT = "prefill_attention"
ATTENTION, ALL = "attention", "all positions"
#: Recipes, and those that leave a step out.
VARIANTS: dict[str, AttentionRecipe] = {
    **ATTENTION_RECIPES,
    "int8, not rotated": replace(ATTENTION_RECIPES["int8"], rotate=False),
    "int8, mean key left": replace(ATTENTION_RECIPES["int8"], center=False),
    "int8, neither": replace(ATTENTION_RECIPES["int8"], rotate=False, center=False),
    "fp8, neither": replace(ATTENTION_RECIPES["fp8"], rotate=False, center=False),
}
#: By scale: recipes of predictions; recipes of attention, and every which layer.
PREDICTED = {"quick": ("int8", "fp8"), "full": tuple(ATTENTION_RECIPES)}
COMPARED = {"quick": ("int8", "fp8", "int8, neither"), "full": tuple(VARIANTS)}
LAYERS = {"quick": 10, "full": 1}
#: What `--only` names beside recipes; a run on real models has the first alone.
REAL_MODELS = "models"
PARTS = (REAL_MODELS, speed.SPEED)
check_parts = partial(check_known, EXPERIMENT, (*PARTS, *VARIANTS))
COSINE, NORM = "cosine", "norm of the error"
WORST = ", worst layer"


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: models, windows, texts and the seed."""
    return f"{real_subject(settings)}-{settings.seed}"


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of the parts and recipes that `settings.only` names, or of all; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    check_parts(settings.only)
    parts = PARTS[:1] if settings.asked is not None else PARTS
    named, failed = [part for part in parts if part in settings.only] or list(parts), list[Row]()
    if speed.SPEED in named:
        failed += _speed(settings, journal)
    if REAL_MODELS in named:
        failed += run_models(EXPERIMENT, settings, journal, measure_model)
    return all_rows(settings, journal, failed)


def chosen(settings: Settings, names: Sequence[str]) -> list[str]:
    """Of these recipes those that `settings.only` names, or all where it names none."""
    asked = [name for name in settings.only if name in VARIANTS]
    return [name for name in names if not asked or name in asked]


def _speed(settings: Settings, journal: Journal) -> list[Row]:
    """Sizes one by one, each with all its methods in turn; rows of what failed."""
    failed, deadline = list[Row](), Deadline(settings.seconds)
    key = "cuda" if published_shapes(settings) else "cpu"
    table, recipes = (
        table_name(speed.SPEED, settings.scale, speed.DATA),
        chosen(settings, tuple(ATTENTION_RECIPES)),
    )
    with bar("prefill attention", len(speed.SIZES[key])) as step:
        for size in speed.SIZES[key]:
            known = all(journal.finished(table, size.name, name, settings.seed) for name in recipes)
            if not known and deadline.left() > 0:
                for name, values in speed.measure(size, speed.HEADS[key], settings.device, recipes).items():
                    rows = settings.rows(EXPERIMENT, speed.SPEED, speed.DATA, size.name, name, values)
                    keep(journal, failed, rows)
            step(size.name)
    return failed


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""
    failed = list[Row]()
    with deadline.paused():
        bench = bench_of(settings, model, WINDOWS)
    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)
    tasks = [(ATTENTION, name, attended) for name in COMPARED[settings.scale]]
    tasks += [(ALL, name, predicted) for name in PREDICTED[settings.scale]]
    tasks = [task for task in tasks if chosen(settings, [task[1]])]
    with bar(tables.kind, len(bench.windows) * len(tasks)) as step:
        for windows, (setting, name, work) in itertools.product(bench.windows, tasks):
            place = Place(setting, name, settings.seed)
            if not journal.finished(table_name(tables.kind, settings.scale, windows.text.name), *place):
                reason = deadline.reason(0.0)
                call = partial(work, bench, windows, name, LAYERS[settings.scale])
                values = status(reason) if reason else attempt(call)
                keep(journal, failed, tables.rows(windows.text.name, place, values))
            step(f"{name}, {setting}, {windows.text.name}")
    return failed


def predicted(bench: Bench, windows: TextWindows, name: str, every: int) -> Values:
    """Loss, perplexity and divergence beside the model's own predictions."""
    model = bench.copy()
    use_attention_(model, VARIANTS[name])
    return quality(bench, windows, model)


def attended(bench: Bench, windows: TextWindows, name: str, every: int) -> Values:
    """Of the first window: cosine and norm of the error of every so many layers."""
    cosines, norms = [], []
    for layer, (q, k, v, scale) in enumerate(states_of(bench.base, windows.ids[:1].to(bench.base.device))):
        if layer % every == 0:
            y = quantized_attention(q, k, v, VARIANTS[name], scale=scale, causal=True).double().cpu()
            states = (x.cpu() for x in (q, k, v))
            exact: Any = attention(*states, scale=scale, causal=True, out_dtype="float64")
            cosines.append(float((y * exact).sum() / (y.norm() * exact.norm())))
            norms.append(float((y - exact).norm() / exact.norm()))
    return {
        COSINE: (float(np.mean(cosines)), ""), COSINE + WORST: (min(cosines), ""), NORM: (float(np.mean(norms)), ""),
        NORM + WORST: (max(norms), ""), "layers": (len(norms), ""), "tokens": (windows.ids.shape[1], ""),
    }  # fmt: skip


def states_of(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor, float]]:
    """Queries, keys, values and the factor of scores of each layer's attention."""
    found: list[tuple[Tensor, Tensor, Tensor, float]] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Tensor:
        scale = options.get("scale") or query.shape[-1] ** -0.5
        found.append((query, key, value, scale))
        return sdpa(query, key, value, *args, **options)

    torch.nn.functional.scaled_dot_product_attention = noted
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        torch.nn.functional.scaled_dot_product_attention = sdpa
    return found


__all__ = ["check_parts", "run", "subject"]
