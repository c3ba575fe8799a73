"""Experiment `kv_cache`: what a model predicts from keys and values in low precision, and FP8 sums over a long context.

**sums** (`SUMS`): attention of one query to equal scores, values in e4m3 of mean 0.5, by the model of Hopper's tensor core with
FP8 operands: in one chain over the context, and in chains of 128 tokens that are added in float32. Computed on a CPU, exactly.

**needle** (`NEEDLE`): a small attention model trained here, asked for one token among many (`experiments.kv_cache.needle`),
from caches in low precision and by FP8 sums: how many needles are found, and how many answers are not those of exact sums.

**A real model** (`real NAME`): every token of a window is predicted from a cache of ours, token by token as decoding would: the
first token fills the cache, all others attend to what is stored, their own keys and values too. Changes are paired with the
model's own predictions; standard errors are over documents.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import reference
from ao_lab.eval import measured
from ao_lab.kv_cache.cache import KVCache, use_kv_cache_
from ao_lab.kv_cache.recipe import RECIPES
from experiments.data.texts import TextWindows
from experiments.harness.measuring import Deadline, Values, attempt, bar, keep, status
from experiments.harness.rows import Journal, Row, table_name
from experiments.kv_cache.needle import METHODS, Plan, asked, trained
from experiments.models.causal_lm import REAL, Bench, RealModel, values_of
from experiments.runs.real_models import Place, Tables, asked_of, real_subject, run_models, texts_of
from experiments.runs.run import Settings, all_rows
from reference.attention.attention import attention

EXPERIMENT = "kv_cache"
SUMS, DATA = "sums", "uniform-weights"
ERROR = "relative error of the sum"
NEEDLE, HAYSTACK = "needle", "uniform-noise"
FOUND, UNLIKE = "needles found", "answers unlike exact sums'"
#: Tokens of a haystack, models and contexts of each by scale.
HAYSTACKS = {"quick": (1024, 8192), "full": (1024, 8192, 32768, 131072)}
ASKED = {"quick": (1, 4), "full": (5, 8)}
#: Tokens of a context by scale; tokens of a chain by method.
CONTEXTS = {"quick": (1024, 8192, 32768, 131072), "full": tuple(2**n for n in range(9, 19))}
CHAINS = {"one chain": None, "chains of 128 tokens": 128}
#: Recipes by scale; tokens and number of windows.
STORED = {"quick": ("fp8", "int4"), "full": tuple(RECIPES)}
LENGTH = {"quick": 192, "full": 2048}
COUNT = {"quick": 2, "full": 32}
#: Which tokens of a window are predicted: all, or the last quarter, which sees the longest context.
ALL, LAST = "all positions", "last quarter"


def check_parts(names: Sequence[str]) -> None:
    """ValueError: there are none."""
    if names:
        raise ValueError(f"kv_cache has no parts, got {', '.join(names)}; leave --only out")


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: models, windows, texts and the seed."""
    return f"{real_subject(settings)}-{settings.seed}"


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """All rows; those in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    _sums(replace(settings, device="cpu"), journal)
    _needle(replace(settings, device="cpu"), journal)
    return all_rows(settings, journal, run_models(EXPERIMENT, settings, journal, measure_model))


def _sums(settings: Settings, journal: Journal) -> None:
    table = table_name(SUMS, settings.scale, DATA)
    for tokens in CONTEXTS[settings.scale]:
        for method, promote in CHAINS.items():
            if not journal.finished(table, str(tokens), method, settings.seed):
                values: Values = {ERROR: (sum_error(tokens, promote, settings.seed), "")}
                journal.add(settings.rows(EXPERIMENT, SUMS, DATA, str(tokens), method, values))


def _needle(settings: Settings, journal: Journal) -> None:
    table = table_name(NEEDLE, settings.scale, HAYSTACK)
    count, each = ASKED[settings.scale]
    places = [
        (tokens, method)
        for tokens in HAYSTACKS[settings.scale]
        for method in METHODS
        if not journal.finished(table, str(tokens), method, settings.seed)
    ]
    models = [trained(Plan(seed=settings.seed + number)) for number in range(count)] if places else []
    for tokens, method in places:
        said = asked(models, tokens, method, each, settings.seed)
        values: Values = {FOUND: (100 * said.found, "%"), UNLIKE: (100 * said.unlike, "%")}
        journal.add(settings.rows(EXPERIMENT, NEEDLE, HAYSTACK, str(tokens), method, values))


def sum_error(tokens: int, promote: int | None, seed: int = 0) -> float:
    """|y - exact| / |exact| over 8 channels, of attention to so many tokens with equal scores."""
    draw = np.random.default_rng(seed).standard_normal((1, 1, tokens, 8)).astype(np.float32) + np.float32(0.5)
    values: Any = reference.decode(reference.encode(draw, "float8_e4m3fn"), "float8_e4m3fn")
    query, keys = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 1, tokens, 8), np.float32)
    exact: Any = attention(query, keys, values, out_dtype="float64")
    got: Any = attention(query, keys, values, accumulation="hopper_fp8", promote=promote, out_dtype="float64")
    return float(np.linalg.norm(got - exact) / np.linalg.norm(exact))


class FromCache(nn.Module):
    """A model that predicts every token from a cache of a recipe; its attention is ours."""

    def __init__(self, model: Any, recipe: str) -> None:
        super().__init__()
        self.model, self.recipe = model, recipe
        use_kv_cache_(model, recipe)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary)."""
        cache = KVCache(self.model, self.recipe, ids.shape[1])
        first = self.model(ids[:, :1], past_key_values=cache).logits
        rest = self.model(ids[:, 1:], past_key_values=cache).logits
        return torch.cat([first, rest], 1)


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""
    asked, recipes, failed = asked_of(settings), STORED[settings.scale], list[Row]()
    size = asked.length or LENGTH[settings.scale], asked.windows or COUNT[settings.scale]
    texts = texts_of(settings)[: 1 if settings.scale == "quick" else None]
    bench = Bench.of(model, texts, *size, settings.device)
    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)
    with bar(tables.kind, len(bench.windows) * len(recipes)) as step:
        for windows, recipe in itertools.product(bench.windows, recipes):
            table = table_name(tables.kind, settings.scale, windows.text.name)
            for setting, part in parts(windows).items():
                place = Place(setting, recipe, settings.seed)
                if not journal.finished(table, *place):
                    reason = deadline.reason(0.0)
                    values = status(reason) if reason else attempt(partial(predicted, bench, part, recipe))
                    keep(journal, failed, tables.rows(windows.text.name, place, values))
            step(f"{recipe}, {windows.text.name}")
    return failed


def parts(windows: TextWindows) -> dict[str, TextWindows]:
    """All predicted tokens, and the last quarter of each window."""
    length = windows.ids.shape[1]
    last = max(windows.first, length - length // 4)
    share = windows.share * (length - last) / (length - windows.first)
    return {ALL: windows, LAST: replace(windows, first=last, share=share)}


def predicted(bench: Bench, windows: TextWindows, recipe: str) -> Values:
    """Loss, perplexity and divergence beside the model's own predictions, and bytes a token of the cache."""
    model = bench.copy()
    settings = use_kv_cache_(model, recipe)
    sums = measured(FromCache(model, recipe), windows, bench.remembered)  # type: ignore[arg-type]
    assert settings is not None
    return {**values_of(sums, windows), "bytes a token": (settings.bytes_per_token, "B")}


__all__ = ["run", "subject"]
