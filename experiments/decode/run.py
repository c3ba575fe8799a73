"""Experiment `decode`, the GPU part of `ptq`: how fast a quantized Llama-3.1-8B generates, what it weighs, what it needs.

Exact shapes with random weights, batch 1, 200 new tokens, the step compiled and captured in a CUDA graph: speed and size do not
depend on the numbers, so none of them are downloaded. Where there is no GPU, or at quick scale, a tiny stand-in goes the same
way; its rows check the code and are beside no published number.

The bfloat16 model stays beside each quantized one, a copy of it, and generates before, between and after, so that ratios are
within one process and one clock state. Before its clock starts, a model answers a prompt: its logits must be finite and near
bfloat16's, and those of the compiled step near those of the model as it is. Both limits are coarse on purpose: rounding
moves logits by percents, a product that reads its weights wrongly by their whole size.
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
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ao_lab import compile_options
from experiments.decode.configs import BASE, OURS, TORCHAO, Config, chosen, missing, version_of
from experiments.decode.generation import Decoding, Plan
from experiments.decode.model import LLAMA_8B, TINY, Llama, Shape, random_llama
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row, table_name
from experiments.harness.settings import Settings
from experiments.kernels.gate import Wrong
from experiments.kernels.outcome import Values, attempt, keep, status
from experiments.report.published import published

EXPERIMENT = "decode"
TITLE = "Generating with a quantized Llama-3.1-8B"
KIND = "decode"
#: Largest relative change of logits: by a scheme (4 bits change those of 32 random layers by 0.46), and by compiling a step.
SCHEME_LIMIT, COMPILED_LIMIT = 0.7, 0.3
GPU_PLAN = Plan()
TINY_PLAN = Plan(new=4, rounds=1, backend="aot_eager", graph=False)
#: What torchao recommends for the compiler; its `quantize_` sets it for good, here it is undone after each model.
TUNED = ("coordinate_descent_tuning", "coordinate_descent_check_all_directions", "force_fuse_int_mm_with_mul")
OTHERWISE = {"fx_graph_cache": True, "triton.unique_kernel_names": True}
#: Seconds after which no further configuration is begun: a run that ends publishes what it has.
SECONDS = 455.0
#: Programs that one function may have at once, where models are not captured and so stay compiled.
PROGRAMS = 64
GB = 1e9


def subject(settings: Settings) -> str:
    """What rows are about: the seed and the libraries that compile or compare."""
    return "-".join([f"seed{settings.seed}", *(name + version_of(name) for name in ("triton", TORCHAO))])


def is_exact(settings: Settings) -> bool:
    """Whether the shapes are those of the real model: at full scale on a GPU."""
    return settings.scale == "full" and settings.device == "cuda"


@dataclass
class Bench:
    """The model that all are measured against, made when it is first needed and kept."""

    settings: Settings
    shape: Shape
    plan: Plan
    base: Decoding | None = None
    logits: Tensor | None = None
    found: Values = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, settings: Settings) -> Bench:
        """The bench of a run: the real shapes at full scale on a GPU, otherwise the stand-in."""
        if is_exact(settings):
            return cls(settings, LLAMA_8B, GPU_PLAN)
        return cls(settings, TINY, replace(TINY_PLAN, graph=settings.device == "cuda"))

    def started(self) -> Decoding:
        """The bfloat16 model, made, checked and compiled when it is first asked for."""
        if self.base is None:
            model = random_llama(self.shape, self.settings.device, self.settings.seed)
            with compiler(BASE, self.plan):
                self.found, self.base, self.logits = prepared(self, BASE, model)
        return self.base


def run(settings: Settings, journal: Journal | None = None) -> list[Row]:
    """Rows of all configurations. Finished ones are taken from the journal; what failed is tried again and not kept there."""
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
    """Rows of one configuration, each beside the number that was published for it; of a failure, what went wrong."""
    late = f"not run: the {SECONDS:.0f} s of a run were over" if bench.clock() > deadline else None
    reason = missing(config) or late
    values = status(reason) if reason else attempt(partial(measured, bench, config))
    beside = published(config.method) if is_exact(bench.settings) else {}
    data = bench.shape.name
    return [
        replace(
            bench.settings.row(EXPERIMENT, KIND, data, config.setting, config.method, metric, value, unit),
            published=beside.get(metric),
        )
        for metric, (value, unit) in values.items()
    ]


def measured(bench: Bench, config: Config) -> Values:
    """Everything about one configuration."""
    with torch.no_grad():
        base = bench.started()
        if config is BASE:
            return {**bench.found, **speeds(bench, base, bench.found)}
        with compiler(config, bench.plan):
            values, decoding, _ = prepared(bench, config, copy.deepcopy(base.model))
        return {**values, **speeds(bench, decoding, values)}


@contextmanager
def compiler(config: Config, plan: Plan) -> Iterator[None]:
    """The compiler's settings for one model; afterwards those that were there."""
    import torch._dynamo.config as tracer
    import torch._inductor.config as inductor
    from torch._inductor.utils import fresh_cache

    if plan.graph:
        # A captured step needs no program any more, and the next model should not be held against all earlier ones.
        torch.compiler.reset()
    # Products of one input are joined: by ours in the compiled graph, of plain weights by the compiler itself.
    advised = compile_options() if config.setting == OURS else {}
    tuned = dict.fromkeys(TUNED, config.tuned)
    settings = {**OTHERWISE, **tuned, "triton.enable_pdl": config.dependent, **advised}
    cache = fresh_cache() if config.afresh else nullcontext()
    patched = tracer.patch(recompile_limit=PROGRAMS), inductor.patch(settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with patched[0], patched[1], cache:
            yield


def prepared(bench: Bench, config: Config, model: Llama) -> tuple[Values, Decoding, Tensor]:
    """Quantize, check against bfloat16, compile, check against the model that is not compiled."""
    memory = Memory(bench.settings.device, sum(map(stored_bytes, model.parameters())))
    values = quantized(config, model, memory)
    memory.begin()
    decoding = Decoding(model, bench.plan, prompt_of(bench), whole=config.whole)
    logits = decoding.prefill().float()
    values["logits, change"] = gate(logits, bench.logits, SCHEME_LIMIT, "from bfloat16's")
    started = time.perf_counter()
    step = decoding.prepare().float()
    memory.synchronize()
    values["compile time"] = (time.perf_counter() - started, "s")
    values["logits, compiled"] = gate(step, logits[-1:], COMPILED_LIMIT, "by compiling")
    if bench.plan.graph:
        decoding.generate()
        values |= memory.peaks()
    linears = sum(stored_bytes(layer.weight) for layer in model.linears().values())
    values["model size"] = (linears / GB, "GB")
    return values, decoding, logits


def quantized(config: Config, model: Llama, memory: Memory) -> Values:
    """Quantize in place; seconds, and the peak of memory over the bfloat16 model's own."""
    if config.make is None:
        return {}
    memory.begin()
    started = time.perf_counter()
    config.quantize(model)
    memory.synchronize()
    values: Values = {"quantize time": (time.perf_counter() - started, "s")}
    left = [name for name, layer in model.linears().items() if type(layer.weight) in PLAIN_TENSORS]
    if left:
        raise Wrong(f"{len(left)} linear layers were left as they are: {', '.join(left[:3])}")
    peak = memory.peak_over_model()
    return values if peak is None else {**values, "quantize peak memory": (peak, "ratio")}


PLAIN_TENSORS = (Tensor, nn.Parameter)


def gate(logits: Tensor, others: Tensor | None, limit: float, why: str) -> tuple[float, str]:
    """How far logits are from others, relative to these; Wrong where they are not finite, or too far."""
    if not torch.isfinite(logits).all():
        raise Wrong("logits are not finite")
    if others is None:
        return 0.0, "ratio"
    change = float((logits - others).norm() / others.norm())
    if change > limit:
        raise Wrong(f"logits differ by {change:.3f} of their size {why}, more than {limit}")
    return change, "ratio"


def prompt_of(bench: Bench) -> Tensor:
    """Random tokens, the same for all."""
    generator = torch.Generator().manual_seed(bench.settings.seed)
    made = torch.randint(0, bench.shape.vocabulary, (bench.plan.prompt,), generator=generator)
    return made.to(bench.settings.device)


def speeds(bench: Bench, decoding: Decoding, values: Values) -> Values:
    """Tokens a second, in turn with bfloat16, which goes first and last."""
    baseline = bench.started()
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
    """Peaks of a GPU's memory beyond what others hold; on a CPU there are none."""

    def __init__(self, device: str, model: int) -> None:
        self.cuda, self.model = device == "cuda", model
        self.allocated, self.reserved = self._held()
        # The model itself is here already, and is not another's.
        self.allocated, self.reserved = self.allocated - model, self.reserved - model

    def _held(self) -> tuple[int, int]:
        if not self.cuda:
            return 0, 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def begin(self) -> None:
        """Forget earlier peaks."""
        self._held()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.cuda:
            torch.cuda.synchronize()

    def peak_over_model(self) -> float | None:
        """The largest allocation since `begin`, over the model's bytes when this began."""
        return (torch.cuda.max_memory_allocated() - self.allocated) / self.model if self.cuda else None

    def peaks(self) -> Values:
        """Since `begin`, in decimal GB: reserved, as published tables have it, and allocated."""
        if not self.cuda:
            return {}
        reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        return {
            "peak memory": ((reserved - self.reserved) / GB, "GB"),
            "peak memory, allocated": ((allocated - self.allocated) / GB, "GB"),
        }


def stored_bytes(tensor: Any) -> int:
    """Bytes of a tensor, or of everything inside a subclass."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


__all__ = ["EXPERIMENT", "KIND", "TITLE", "Bench", "measure", "run", "subject"]
