"""Experiment `decode`, the GPU part of `ptq`: tokens a second, size and memory of a quantized Llama-3.1-8B that generates.

Published numbers: PyTorch's TorchAO paper and release notes (`experiments/published/ptq_decoding.csv`), on an H100. Measured
here: the exact shapes with random weights, batch 1, 200 new tokens, the step compiled and captured in a CUDA graph; speed and
size do not depend on the values of weights. Stand-in: without a GPU, or at quick scale, a tiny model; its rows check the code
and are beside no published number.

The bfloat16 model stays in memory beside each quantized copy and generates before, between and after, so that ratios are
within one process and one clock state. Before a model is timed it processes a prompt: its logits must be finite and near
bfloat16's, and those of the compiled step near those of the uncompiled (`experiments.models.llama`).
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor

from ao_lab import compile_options
from experiments.decode import real
from experiments.decode.configs import BASE, OURS, PLAIN_TENSORS, Config, chosen, missing, stored_bytes
from experiments.decode.model import CachedLlama, Decoding, Plan, random_llama
from experiments.harness.measuring import Values, Wrong, attempt, bar, keep, status
from experiments.harness.revision import seed_and_libraries
from experiments.harness.rows import Journal, Row, table_name
from experiments.models.llama import (
    COMPILED_LIMIT,
    LLAMA_3_1_8B,
    SCHEME_LIMIT,
    TINY,
    LlamaConfig,
    relative_change,
)
from experiments.report.results import published
from experiments.runs.real_models import real_subject
from experiments.runs.run import published_shapes
from experiments.runs.settings import Settings

EXPERIMENT = "decode"
KIND = "decode"
GPU_PLAN = Plan()
TINY_PLAN = Plan(new=4, rounds=1, backend="aot_eager", graph=False)
#: Compiler options that torchao recommends; its `quantize_` sets them globally, here they are restored after each model.
TUNED = ("coordinate_descent_tuning", "coordinate_descent_check_all_directions", "force_fuse_int_mm_with_mul")
COMPILER_OPTIONS = {"fx_graph_cache": True, "triton.unique_kernel_names": True}
#: Seconds after which no further configuration starts, so that a run ends in time and publishes its rows.
SECONDS = 455.0
#: Compiled programs of one function at once, where models are not captured and so stay compiled.
PROGRAMS = 64
GB = 1e9


def subject(settings: Settings) -> str:
    """What a journal can be resumed for: the seed and the libraries that compile or are compared; real models, if asked for."""
    if settings.asked is not None:
        return f"{seed_and_libraries(settings.seed)}-{real_subject(settings)}"
    return seed_and_libraries(settings.seed)


@dataclass
class Bench:
    """Settings of a run, and the bfloat16 model that all others are compared with, created when it is first needed."""

    settings: Settings
    shape: LlamaConfig
    plan: Plan
    base: Decoding | None = None
    logits: Tensor | None = None
    values: Values = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, settings: Settings) -> Bench:
        """The bench of a run: the real shapes at full scale on a GPU, otherwise the stand-in."""
        if published_shapes(settings):
            return cls(settings, LLAMA_3_1_8B, GPU_PLAN)
        return cls(settings, TINY, replace(TINY_PLAN, graph=settings.device == "cuda"))

    def baseline(self) -> Decoding:
        """The bfloat16 model, checked and compiled."""
        if self.base is None:
            model = random_llama(self.shape, self.settings.device, self.settings.seed)
            with compiler(BASE, self.plan):
                self.values, self.base, self.logits = prepare(self, BASE, model)
        return self.base


def check_parts(names: Sequence[str]) -> None:
    """ValueError for names of no part of a run on real models."""
    real.check_parts(names)


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all configurations, or of real models where these were asked for. Finished ones come from the journal; failed
    ones are not stored there and run again."""
    if settings.asked is not None:
        return real.run_real(settings, journal if journal is not None else Journal())
    return measure(Bench.of(settings), chosen(settings.only), journal if journal is not None else Journal())


def measure(bench: Bench, configs: Sequence[Config], journal: Journal) -> list[Row]:
    """Rows of these configurations, one after the other."""
    failed: list[Row] = []
    table = table_name(KIND, bench.settings.scale, bench.shape.name)
    deadline = bench.clock() + SECONDS
    torch.manual_seed(bench.settings.seed)
    with bar("decoding", len(configs)) as step:
        for config in configs:
            if not journal.finished(table, config.setting, config.method):
                keep(journal, failed, rows_of(bench, config, deadline))
            step(f"{config.method}, {config.setting}")
    return journal.rows + failed


def rows_of(bench: Bench, config: Config, deadline: float) -> list[Row]:
    """Rows of one configuration, each with the number published for it; of a failure, its status."""
    late = f"not run: the {SECONDS:.0f} s of a run were over" if bench.clock() > deadline else None
    reason = missing(config) or late
    values = status(reason) if reason else attempt(partial(measure_one, bench, config))
    numbers = published(config.method) if published_shapes(bench.settings) else {}
    data = bench.shape.name
    return [
        replace(
            bench.settings.row(EXPERIMENT, KIND, data, config.setting, config.method, metric, value, unit),
            published=numbers.get(metric),
        )
        for metric, (value, unit) in values.items()
    ]


def measure_one(bench: Bench, config: Config) -> Values:
    """All values of one configuration."""
    with torch.no_grad():
        base = bench.baseline()
        if config is BASE:
            return {**bench.values, **speeds(bench, base, bench.values)}
        with compiler(config, bench.plan):
            values, decoding, _ = prepare(bench, config, copy.deepcopy(base.model))
        return {**values, **speeds(bench, decoding, values)}


@contextmanager
def compiler(config: Config, plan: Plan) -> Iterator[None]:
    """The compiler's options for one model; restored afterwards."""
    import torch._dynamo.config as tracer
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache

    if plan.graph:
        # A captured step needs no program any more, and the next model's guards should not be checked after all earlier ones.
        torch.compiler.reset()
    # Linear layers of one input are merged: by our options in the compiled graph, of plain weights by the compiler itself.
    recommended = compile_options() if config.setting == OURS else {}
    tuned = dict.fromkeys(TUNED, config.tuned)
    options = {**COMPILER_OPTIONS, **tuned, "triton.enable_pdl": config.dependent, **recommended}
    cache = fresh_cache() if config.fresh_cache else nullcontext()
    patched = tracer.patch(recompile_limit=PROGRAMS), inductor.patch(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with patched[0], patched[1], cache:
            yield


def prepare(bench: Bench, config: Config, model: CachedLlama) -> tuple[Values, Decoding, Tensor]:
    """Quantize, check against bfloat16, compile, check against the model that is not compiled."""
    memory = Memory(bench.settings.device, sum(map(stored_bytes, model.parameters())))
    values = quantize(config, model, memory)
    memory.begin()
    decoding = Decoding(model, bench.plan, prompt_of(bench), whole=config.whole)
    logits = decoding.prefill().float()
    values["logits, change"] = relative_change(logits, bench.logits, SCHEME_LIMIT, "from bfloat16's")
    started = time.perf_counter()
    step = decoding.prepare().float()
    memory.synchronize()
    values["compile time"] = (time.perf_counter() - started, "s")
    values["logits, compiled"] = relative_change(step, logits[-1:], COMPILED_LIMIT, "by compiling")
    if bench.plan.graph:
        decoding.generate()
        values |= memory.peaks()
    linears = sum(stored_bytes(layer.weight) for layer in model.linears().values())
    values["model size"] = (linears / GB, "GB")
    return values, decoding, logits


def quantize(config: Config, model: CachedLlama, memory: Memory) -> Values:
    """Quantize in place; seconds, and the peak of memory over the bfloat16 model's own."""
    if config.build is None:
        return {}
    memory.begin()
    started = time.perf_counter()
    config.quantize(model)
    memory.synchronize()
    values: Values = {"quantize time": (time.perf_counter() - started, "s")}
    unquantized = [name for name, layer in model.linears().items() if type(layer.weight) in PLAIN_TENSORS]
    if unquantized:
        raise Wrong(f"{len(unquantized)} linear layers were not quantized: {', '.join(unquantized[:3])}")
    peak = memory.peak_over_model()
    return values if peak is None else {**values, "quantize peak memory": (peak, "ratio")}


def prompt_of(bench: Bench) -> Tensor:
    """Random tokens (prompt), the same for all configurations."""
    generator = torch.Generator().manual_seed(bench.settings.seed)
    tokens = torch.randint(0, bench.shape.vocabulary, (bench.plan.prompt,), generator=generator)
    return tokens.to(bench.settings.device)


def speeds(bench: Bench, decoding: Decoding, values: Values) -> Values:
    """Tokens a second, in turn with bfloat16, which is first and last."""
    baseline = bench.baseline()
    base, ours = [baseline.generate()], []
    for _ in range(bench.plan.rounds):
        ours.append(decoding.generate())
        base.append(baseline.generate())
    rates, base_rates = ([len(times) / sum(times) for times in runs] for runs in (ours, base))
    low, middle, high = np.quantile(np.concatenate(ours), (0.2, 0.5, 0.8))
    rate = median(rates)
    return {
        "tokens/s": (rate, "tokens/s"),
        "tokens/s, lowest": (min(rates), "tokens/s"),
        "tokens/s, highest": (max(rates), "tokens/s"),
        "time per token": (middle * 1e3, "ms"),
        "time per token, 20%": (low * 1e3, "ms"),
        "time per token, 80%": (high * 1e3, "ms"),
        "bandwidth": (values["model size"][0] * rate, "GB/s"),
        "speedup over bfloat16": (rate / median(base_rates), "ratio"),
        "bfloat16 before": (base_rates[0], "tokens/s"),
        "bfloat16 after": (base_rates[-1], "tokens/s"),
    }


class Memory:
    """Peaks of a GPU's memory beyond what was in use before a model of so many bytes; on a CPU there are none."""

    def __init__(self, device: str, model: int) -> None:
        self.cuda, self.model = device == "cuda", model
        self.allocated, self.reserved = self._in_use()
        # The model itself is allocated already, and counts.
        self.allocated, self.reserved = self.allocated - model, self.reserved - model

    def _in_use(self) -> tuple[int, int]:
        if not self.cuda:
            return 0, 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def begin(self) -> None:
        """Forget earlier peaks."""
        self._in_use()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def peak_over_model(self) -> float | None:
        """The largest allocation since `begin`, over the model's bytes at construction; None on a CPU."""
        return (torch.cuda.max_memory_allocated() - self.allocated) / self.model if self.cuda else None

    def peaks(self) -> Values:
        """Since `begin`, in decimal GB: reserved, as in published tables, and allocated."""
        if not self.cuda:
            return {}
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {
            "peak memory": ((reserved - self.reserved) / GB, "GB"),
            "peak memory, allocated": ((allocated - self.allocated) / GB, "GB"),
        }
