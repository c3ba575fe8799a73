"""Experiment `qat_overhead`: time and memory of a quantization-aware training step, ours and torchao's, over bfloat16 training.

Published numbers: overheads in torchao's documentation and discussions (`experiments/published/qat_overhead.csv`), of whole
fine-tuning runs. Measured here: forward and backward, without the optimizer, of two decoder layers of Llama-3-8B over 8192
tokens, eager and compiled layer by layer, and of Llama-3.2-3B whole, eager; all variants in turn, round by round in one
process. Stand-in: without a GPU, or at quick scale, tiny models, whose rows check the code and say nothing of time.

Before a variant is timed it takes a step: its output must be finite and near that of bfloat16 training, every parameter must
have a finite gradient, and a compiled model must return what it returned before.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ao_lab.measure.turns import AGAIN, CudaWatch, HostWatch, Plan, Stopwatch, summary
from experiments.harness.bench import after_own_steps
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Values, attempt, bar, free, keep, status
from experiments.harness.registry import check_known
from experiments.harness.revision import TORCHAO, seed_and_libraries
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.llama import (
    COMPILED_LIMIT,
    LLAMA_3_2_3B,
    LLAMA_3_8B_TWO_LAYERS,
    SCHEME_LIMIT,
    TINY_ONE_LAYER,
    TINY_TWO_LAYERS,
    LlamaConfig,
    relative_change,
)
from experiments.qat_overhead.step import (
    COPY_RATE,
    FASTER,
    INT8_INT4,
    PLAIN,
    RECIPES,
    VARIANTS,
    Trainer,
    Variant,
    linear_shapes,
    rounding_bytes,
)
from experiments.report.targets import percent_over
from experiments.runs.run import all_rows, published_shapes
from experiments.runs.settings import Settings

EXPERIMENT = KIND = "qat_overhead"
EAGER, COMPILED = "eager", "compiled"
#: Further parts: a whole model, and QAT whose products are faster than those of bfloat16.
WHOLE, PRODUCTS = "whole", "products"
#: Seconds after which nothing more starts, so that a run ends in time and publishes its rows.
SECONDS = 150.0
#: Compiled programs of one function at once: the layers of all variants are compiled in one process.
PROGRAMS = 64
#: Steps of a variant before the one that is timed.
WARMUP = 2
STEADY = Plan(rounds=30, warmup=2, seconds=7.0, fewest=8)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Variants that are timed in turn: the same model and tokens, compiled or not. part: its name for `--only`."""

    part: str
    shape: LlamaConfig
    batch: int
    length: int
    setting: str = EAGER
    whole: bool = False
    variants: tuple[Variant, ...] = VARIANTS
    plan: Plan = STEADY
    backend: str = "inductor"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


INT8_INT4_VARIANTS = tuple(variant for variant in VARIANTS if variant.recipe in ("", INT8_INT4))
BLOCKS = Group(part=EAGER, shape=LLAMA_3_8B_TWO_LAYERS, batch=2, length=4096)
#: In the order in which they are measured: the quickest first.
GPU_GROUPS = (
    BLOCKS,
    replace(BLOCKS, part=COMPILED, setting=COMPILED),
    Group(
        part=WHOLE,
        shape=LLAMA_3_2_3B,
        batch=2,
        length=4096,
        whole=True,
        variants=INT8_INT4_VARIANTS,
        plan=Plan(rounds=8, warmup=1, seconds=12.0, fewest=4),
    ),
    replace(BLOCKS, part=PRODUCTS, variants=FASTER),
    replace(BLOCKS, part=PRODUCTS, variants=FASTER, setting=COMPILED),
)
QUICK = Plan(rounds=2, warmup=1, seconds=1.0, fewest=2)
TINY = Group(part=EAGER, shape=TINY_TWO_LAYERS, batch=1, length=16, plan=QUICK, backend="aot_eager")
#: torchao's is not traced here: that takes longer than all the rest.
WITHOUT_TORCHAO = tuple(variant for variant in VARIANTS if variant.library != TORCHAO)
TINY_GROUPS = (
    TINY,
    replace(TINY, part=COMPILED, setting=COMPILED, variants=WITHOUT_TORCHAO),
    replace(TINY, part=WHOLE, shape=TINY_ONE_LAYER, whole=True, variants=INT8_INT4_VARIANTS),
    replace(TINY, part=PRODUCTS, variants=FASTER),
)
PARTS = (EAGER, COMPILED, WHOLE, PRODUCTS)
check_parts = partial(check_known, EXPERIMENT, PARTS)


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed and the libraries that compile or are compared."""
    return seed_and_libraries(settings.seed)


@dataclass
class Bench:
    """Settings of a run, the groups it measures, its stopwatch, and when it ends."""

    settings: Settings
    groups: Sequence[Group]
    watch: Stopwatch
    clock: Callable[[], float] = time.perf_counter
    until: float = field(init=False)

    def __post_init__(self) -> None:
        self.until = self.clock() + self.seconds

    @property
    def seconds(self) -> float:
        """How long it may take."""
        return SECONDS if self.settings.seconds is None else self.settings.seconds

    @classmethod
    def of(cls, settings: Settings) -> Bench:
        """The bench of a run: the real shapes at full scale on a GPU, otherwise the stand-ins."""
        watch: Stopwatch = CudaWatch() if settings.device == "cuda" else HostWatch()
        groups = GPU_GROUPS if published_shapes(settings) else TINY_GROUPS
        return cls(settings, [one for one in groups if not settings.only or one.part in settings.only], watch)

    def out_of_time(self) -> str | None:
        """Why nothing more starts; None while there is time."""
        return f"not run: the {self.seconds:.0f} s of a run were over" if self.clock() > self.until else None


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all variants. Finished ones come from the journal; failed ones are not stored there and run again."""
    return measure(Bench.of(settings), journal if journal is not None else Journal())


def measure(bench: Bench, journal: Journal) -> list[Row]:
    """Rows of all groups, one after the other; bfloat16 training is measured again wherever a variant is missing."""
    failed: list[Row] = []
    with bar("training", len(bench.groups)) as step:
        for group in bench.groups:
            table = table_name(KIND, bench.settings.scale, group.shape.name)
            done = {
                variant
                for variant in group.variants
                if journal.finished(table, group.setting, variant.method)
            }
            if len(done) < len(group.variants):
                found = measure_group(bench, replace(group, variants=remaining(group.variants, done)))
                for variant, values in found.items():
                    if variant not in done:
                        keep(journal, failed, rows_of(bench, group, variant, values))
            step(f"{group.shape.name}, {group.setting}")
    return all_rows(bench.settings, journal, failed)


def remaining(variants: Sequence[Variant], done: set[Variant]) -> tuple[Variant, ...]:
    """bfloat16 training, and the variants that have no rows."""
    return (PLAIN, *(variant for variant in variants if variant not in done and variant is not PLAIN))


def rows_of(bench: Bench, group: Group, variant: Variant, values: Values) -> list[Row]:
    """Tidy rows of a variant."""
    key = (EXPERIMENT, KIND, group.shape.name, group.setting, variant.method)
    return [bench.settings.row(*key, metric, value, unit) for metric, (value, unit) in values.items()]


def measure_group(bench: Bench, group: Group) -> dict[Variant, Values]:
    """All values of the variants of a group: each checked on its own first, then all timed in turn."""
    trainers: dict[Variant, Trainer] = {}
    torch.manual_seed(bench.settings.seed)
    with compiler():
        found = {variant: prepare(bench, group, variant, trainers) for variant in group.variants}
        if PLAIN in trainers:
            add_times(bench, group, trainers, found)
    trainers.clear()
    free()
    return {
        variant: values if PLAIN in found and succeeded(found[PLAIN]) else without_baseline(values)
        for variant, values in found.items()
    }


def succeeded(values: Values) -> bool:
    """Whether a variant was measured."""
    return values.get("status: ok", (0.0, ""))[0] == 1.0


def without_baseline(values: Values) -> Values:
    """Values of a variant where bfloat16 training failed: a status."""
    return status("not run: plain training failed") if succeeded(values) else values


@contextmanager
def compiler() -> Iterator[None]:
    """The compiler's options for a group; restored afterwards."""
    import torch._dynamo.config as tracer

    torch.compiler.reset()
    with tracer.patch(recompile_limit=PROGRAMS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def prepare(bench: Bench, group: Group, variant: Variant, trainers: dict[Variant, Trainer]) -> Values:
    """Build a model, check it and measure its memory; it is added to the trainers unless something fails."""
    reason = variant.missing() or bench.out_of_time()
    return status(reason) if reason else attempt(partial(_prepare, bench, group, variant, trainers))


def _prepare(bench: Bench, group: Group, variant: Variant, trainers: dict[Variant, Trainer]) -> Values:
    settings = bench.settings
    trainer = Trainer.of(
        group.shape, group.batch, group.length, settings.device, settings.seed, whole=group.whole
    )
    variant.prepare(trainer.model)
    plain = trainers[PLAIN].result if PLAIN in trainers else None
    trainer.result = trainer.output()
    values: Values = {
        "change of the result": relative_change(trainer.result, plain, SCHEME_LIMIT, "from plain training's")
    }
    started = bench.clock()
    if group.setting == COMPILED:
        trainer.compile(group.backend)
    output = trainer.first_step()
    bench.watch.sync()
    values["first step"] = (bench.clock() - started, "s")
    if group.setting == COMPILED:
        values["change by compiling"] = relative_change(
            output, trainer.result, COMPILED_LIMIT, "by compiling"
        )
    del output
    with compiled_runs(group.setting == COMPILED):
        trainer.step()
    values |= trainer.memory()
    same = replace(variant, products="")
    if variant.products and same in trainers:
        values["change by products"] = relative_change(
            trainer.result, trainers[same].result, SCHEME_LIMIT, "by its products"
        )
    if variant.rounds and not variant.products:
        moved = rounding_bytes(RECIPES[variant.recipe], linear_shapes(trainer.model), group.tokens)
        values["bytes to round"] = (moved / 1e9, "GB")
        values["copy rate, assumed"] = (COPY_RATE / 1e12, "TB/s")
        values["time to round at the copy rate"] = (moved / COPY_RATE * 1e3, "ms")
    trainers[variant] = trainer
    return values


def add_times(
    bench: Bench, group: Group, trainers: Mapping[Variant, Trainer], found: dict[Variant, Values]
) -> None:
    """Add the times of a step, measured in turn, and overheads over bfloat16 training, to the values found."""
    steps = {PLAIN.method: trainers[PLAIN].step}
    steps |= {variant.method: trainer.step for variant, trainer in trainers.items()}
    times = after_own_steps(bench.watch, steps, group.plan, WARMUP)
    base = summary(times[PLAIN.method]).median
    for variant in trainers:
        timing = summary(times[variant.method])
        values = found[variant]
        values |= timing.values()
        values["tokens/s"] = (group.tokens / timing.median, "tokens/s")
        values["time over plain"] = (percent_over(timing.median, base), "%")
        for metric in ("peak memory", "kept for backward"):
            if metric in values and metric in found[PLAIN]:
                values[f"{metric} over plain"] = (
                    percent_over(values[metric][0], found[PLAIN][metric][0]),
                    "%",
                )
    again = summary(times[AGAIN]).median
    found[PLAIN]["time again over plain"] = (percent_over(again, base), "%")
