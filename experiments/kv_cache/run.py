"""Experiment `kv_cache`: what a model predicts from keys and values in low precision, and FP8 sums over a long context.

**sums** (`SUMS`): attention of one query to equal scores, values in e4m3 of mean 0.5, by the model of Hopper's tensor core with
FP8 operands: in one chain over the context, and in chains of 128 tokens that are added in float32. Computed on a CPU, exactly.

**needle** (`NEEDLE`): a small attention model trained here, asked for one token among many (`experiments.kv_cache.needle`),
from caches in low precision and by FP8 sums: how many needles are found, and how many answers are not those of exact sums.

**speed** (`SPEED`): one layer of decode attention by recipe and by peers (`experiments.kv_cache.speed`). **generate**,
**generate_long**, **step** (`GENERATE`, `LONG`, `STEP`): a token of a whole model (`experiments.kv_cache.generation`).

**A real model** (`real NAME`): every token of a window is predicted from a cache of ours, token by token as decoding would: the
first token fills the cache, all others attend to what is stored, their own keys and values too. Changes are paired with the
model's own predictions; standard errors are over documents. "bfloat16" is a cache that quantizes nothing: what its predictions
differ by is the attention's rounding, not the cache's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import reference
from ao_lab.eval import measured
from ao_lab.install.versions import cache_argument
from ao_lab.kv_cache.cache import KVCache, use_kv_cache_
from ao_lab.kv_cache.recipe import RECIPES
from ao_lab.measure.turns import watch_of
from experiments.data.texts import TextWindows
from experiments.harness.bench import copy_rate
from experiments.harness.measuring import Deadline, Values, attempt, bar, keep, status
from experiments.harness.registry import check_known
from experiments.harness.rows import Journal, Row, table_name, table_parts
from experiments.kv_cache import WINDOWS, generation, speed
from experiments.kv_cache.needle import METHODS, Plan, asked, trained
from experiments.models.causal_lm import HELD, REAL, Bench, RealModel, Remembered, values_of
from experiments.runs.real_models import Place, Tables, bench_of, real_subject, run_models
from experiments.runs.run import all_rows, published_shapes
from experiments.runs.settings import Settings
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
#: Recipes by scale.
STORED = {"quick": ("bfloat16", "fp8", "fp8_residual", "int4"), "full": tuple(RECIPES)}
#: What `--only` names beside recipes: parts, of a run on real models the first three alone.
REAL_MODELS = "models"
PARTS = (SUMS, NEEDLE, REAL_MODELS, speed.SPEED, generation.GENERATE, generation.LONG, generation.STEP)
check_parts = partial(check_known, EXPERIMENT, (*PARTS, *RECIPES))
#: Bytes that a token adds to a sequence, and those of a sequence of any length: unquantized tokens beside their codes.
GROWING, BESIDE = "bytes a token", "bytes beside"
#: Which tokens of a window are predicted: all, or the last quarter, which sees the longest context.
ALL, LAST = "all positions", "last quarter"


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: models, windows, texts and the seed."""
    return f"{real_subject(settings)}-{settings.seed}"


def measured_whole(row: Row) -> tuple[str, str] | None:
    """What a row is timed in turn with, by table and setting; None where its line stands for itself."""
    return (
        (row.table, row.setting)
        if table_parts(row.table)[0] in (generation.GENERATE, generation.STEP)
        else None
    )


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of the parts and recipes that `settings.only` names, or of all; rows in the journal are not measured again."""
    journal = journal if journal is not None else Journal()
    check_parts(settings.only)
    own = replace(settings, device="cpu")
    parts: dict[str, Callable[[], list[Row]]] = {
        SUMS: partial(_sums, own, journal), NEEDLE: partial(_needle, own, journal),
        REAL_MODELS: partial(run_models, EXPERIMENT, settings, journal, measure_model),
    }  # fmt: skip
    if settings.asked is None:
        timed = Timed(settings, journal, Deadline(settings.seconds))
        parts |= {
            speed.SPEED: timed.speed, generation.GENERATE: timed.generate, generation.LONG: timed.generate_long,
            generation.STEP: timed.step,
        }  # fmt: skip
    named = [part for part in parts if part in settings.only] or list(parts)
    failed = [row for part in named for row in parts[part]()]
    return all_rows(settings, journal, failed)


def chosen(settings: Settings, recipes: Sequence[str]) -> list[str]:
    """Of these recipes those that `settings.only` names, or all where it names none."""
    named = [name for name in settings.only if name in RECIPES]
    return [name for name in recipes if not named or name in named]


@dataclass
class Timed:
    """The parts that are times; each returns rows of what failed."""

    settings: Settings
    journal: Journal
    deadline: Deadline

    @property
    def scaled(self) -> str:
        """The key of sizes: those of a GPU at full scale, or small ones."""
        return "cuda" if published_shapes(self.settings) else "cpu"

    def missing(self, kind: str, data: str, setting: str, names: Sequence[str]) -> list[str]:
        """Methods that the journal lacks."""
        table, seed = table_name(kind, self.settings.scale, data), self.settings.seed
        return [name for name in names if not self.journal.finished(table, setting, name, seed)]

    def keep(
        self, failed: list[Row], kind: str, data: str, setting: str, method: str, values: Values
    ) -> None:
        """Rows of a method, into the journal or among those that failed."""
        keep(self.journal, failed, self.settings.rows(EXPERIMENT, kind, data, setting, method, values))

    def speed(self) -> list[Row]:
        """Sizes one by one, each with all its methods in turn."""
        failed: list[Row] = []
        device, sizes, heads = self.settings.device, speed.SIZES[self.scaled], speed.HEADS[self.scaled]
        recipes, rate = chosen(self.settings, speed.RECIPES_OF[self.scaled]), 0.0
        with bar("decode attention", len(sizes)) as step:
            for size in sizes:
                if self.missing(speed.SPEED, speed.DATA, size.name, recipes) and self.deadline.left() > 0:
                    rate = rate or copy_rate(
                        watch_of(device), 2 ** (28 if device == "cuda" else 20), device, speed.PLANS[device]
                    )
                    for name, values in speed.measure(size, heads, device, rate, recipes).items():
                        self.keep(failed, speed.SPEED, speed.DATA, size.name, name, values)
                step(size.name)
        return failed

    def generate(self) -> list[Row]:
        """transformers' `generate()`, all methods in turn."""
        return self._of_model(generation.GENERATE, generation.GENERATED, generation.generated)

    def generate_long(self) -> list[Row]:
        """The same over a long context that the cache holds already."""
        return self._of_model(generation.LONG, generation.ANSWERED, generation.answered)

    def step(self) -> list[Row]:
        """A step of a whole model over a long context, all methods in turn."""
        return self._of_model(generation.STEP, generation.STEPPED, generation.stepped)

    def _of_model(
        self, part: str, cases: Mapping[str, generation.Case], measure: Callable[..., Mapping[str, Values]]
    ) -> list[Row]:
        failed: list[Row] = []
        case, data = cases[self.scaled], generation.DATA
        kind = generation.STEP if part == generation.STEP else generation.GENERATE
        recipes = chosen(self.settings, speed.RECIPES_OF[self.scaled])
        names = generation.methods_of(part, recipes, self.settings.device != "cpu")
        if self.missing(kind, data, case.setting, names) and self.deadline.left() > 0:
            for name, values in measure(case, self.settings.device, names, self.deadline).items():
                self.keep(failed, kind, data, case.setting, name, values)
        return failed


def _sums(settings: Settings, journal: Journal) -> list[Row]:
    table = table_name(SUMS, settings.scale, DATA)
    for tokens in CONTEXTS[settings.scale]:
        for method, promote in CHAINS.items():
            if not journal.finished(table, str(tokens), method, settings.seed):
                values: Values = {ERROR: (sum_error(tokens, promote, settings.seed), "")}
                journal.add(settings.rows(EXPERIMENT, SUMS, DATA, str(tokens), method, values))
    return []


def _needle(settings: Settings, journal: Journal) -> list[Row]:
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
    return []


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
        self.settings = use_kv_cache_(model, recipe)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary)."""
        held = {cache_argument(self.model): KVCache(self.model, self.recipe, ids.shape[1])}
        first = self.model(ids[:, :1], **held).logits
        rest = self.model(ids[:, 1:], **held).logits
        return torch.cat([first, rest], 1)


def measure_model(settings: Settings, model: RealModel, journal: Journal, deadline: Deadline) -> list[Row]:
    """Measure what the journal lacks of one model; returns rows of what failed."""
    recipes, failed = chosen(settings, STORED[settings.scale]), list[Row]()
    with deadline.paused():
        bench = bench_of(settings, model, WINDOWS)
    tables = Tables(EXPERIMENT, settings, REAL + model.name, journal, deadline)
    with bar(tables.kind, len(bench.windows) * len(recipes)) as step:
        for windows, recipe in itertools.product(bench.windows, recipes):
            table = table_name(tables.kind, settings.scale, windows.text.name)
            model_of = cache(partial(read_back, bench, recipe))
            for setting, part in parts(windows).items():
                place = Place(setting, recipe, settings.seed)
                if not journal.finished(table, *place):
                    reason = deadline.reason(0.0)
                    values = status(reason) if reason else attempt(partial(predicted, bench, part, model_of))
                    keep(journal, failed, tables.rows(windows.text.name, place, values))
            step(f"{recipe}, {windows.text.name}")
    return failed


def parts(windows: TextWindows) -> dict[str, TextWindows]:
    """All predicted tokens, and the last quarter of each window."""
    length = windows.ids.shape[1]
    last = max(windows.first, length - length // 4)
    share = windows.share * (length - last) / (length - windows.first)
    return {ALL: windows, LAST: replace(windows, first=last, share=share)}


def read_back(bench: Bench, recipe: str) -> Remembered:
    """A copy of a model that predicts from a cache of a recipe, its predictions remembered: parts of a window share them."""
    return Remembered(FromCache(bench.copy(), recipe), HELD[next(bench.base.parameters()).device.type])


def predicted(bench: Bench, windows: TextWindows, model_of: Callable[[], Remembered]) -> Values:
    """Loss, perplexity and divergence beside the model's own predictions, and bytes of the cache."""
    model = model_of()
    sums, settings = measured(model, windows, bench.remembered), model.model.settings  # type: ignore[arg-type]
    held = {GROWING: settings.bytes_per_token, BESIDE: settings.bytes_beside}
    return {**values_of(sums, windows), **{name: (value, "B") for name, value in held.items()}}


__all__ = ["PARTS", "check_parts", "measured_whole", "run", "subject"]
