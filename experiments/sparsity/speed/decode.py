"""Llama-3.1-8B's shapes that generate at batch 1 with 4-bit integers and FP8, dense and 2:4, as in `experiments.decode`.

Weights are random, pruned by magnitude: speed does not depend on values. bfloat16 generates before, between and after.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import ao_lab
from experiments.decode import run as decode
from experiments.decode.configs import BASE, OURS, Config
from experiments.decode.generation import Decoding
from experiments.fp8_training.deadline import Deadline
from experiments.harness.outcome import Values, attempt, keep, status
from experiments.harness.progress import bar
from experiments.harness.rows import Journal, Row, table_name
from experiments.runs.settings import Settings, published_shapes
from experiments.sparsity.methods import PATTERN, inside_blocks
from experiments.sparsity.speed.sides import NO_GPU, Table, rows_of

KIND = "decode"
SETTING = "batch 1, compiled"
INT4_GROUP = 64
#: Seconds of a configuration, and of the bfloat16 model beside the first.
NEEDED, NEEDED_BASE = 30.0, 80.0


@dataclass(frozen=True, kw_only=True)
class SparseConfig(Config):
    """A configuration whose layers inside the blocks are pruned first and stored 2:4; the last layer stays dense.

    timed: whether the kernels of the sparse layers are chosen by `ao_lab.tune`, as no rule chooses one.
    """

    make: Callable[..., Any]
    timed: bool = False

    def quantize(self, model: nn.Module) -> None:
        """Prune, then quantize."""
        ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN), inside_blocks)
        ao_lab.quantize_(model, self.make(sparsity=PATTERN), filter_fn=inside_blocks)
        if self.timed:
            choose_kernels(model)
        ao_lab.quantize_(model, self.make())


@torch.no_grad()
def choose_kernels(model: nn.Module, rows: Iterable[int] = ()) -> None:
    """`ao_lab.tune` of one layer of each shape that holds a quantized weight, for one row and further numbers of rows."""
    seen = set()
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.shape not in seen and is_open(layer):
            seen.add(layer.weight.shape)
            x = torch.randn(1, layer.in_features, device=layer.weight.device, dtype=torch.bfloat16)
            ao_lab.tune(nn.Sequential(layer), x, rows=rows, launches="graph")


def is_open(layer: nn.Linear) -> bool:
    """Whether a layer has a quantized weight whose kernel nothing has chosen."""
    return isinstance(layer.weight, ao_lab.QuantizedTensor) and not ao_lab.explain(layer).layers[0].tuned


def int4(**options: Any) -> object:
    """Symmetric, so that zero stays zero."""
    return ao_lab.IntxWeightOnlyConfig("int4", ao_lab.PerGroup(INT4_GROUP), **options)


def fp8(**options: Any) -> object:
    """Scales of rows, inputs too."""
    return ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow(), **options)


#: By the method of their rows.
CONFIGS = {
    "bfloat16": BASE,
    "int4": Config(setting=OURS, method="int4", build=int4, dependent=True),
    "int4 + 2:4": SparseConfig(setting=OURS, method="int4 + 2:4", build=int4, make=int4, dependent=True),
    "fp8": Config(setting=OURS, method="fp8", build=fp8, dependent=True),
    "fp8 + 2:4": SparseConfig(
        setting=OURS, method="fp8 + 2:4", build=fp8, make=fp8, dependent=True, timed=True
    ),
}


def missing(config: Config) -> str | None:
    """Why a configuration cannot be measured with this copy; None where it can."""
    if isinstance(config, SparseConfig) and not hasattr(ao_lab, "SparseQuantizedTensor"):
        return "missing: this copy stores 2:4 weights dense, with zeros"
    return None


def needed(bench: decode.Bench) -> float:
    """About how many seconds it takes on an H100: bfloat16's compiler tunes what it writes, once for all that stand beside."""
    return NEEDED + (NEEDED_BASE if bench.base is None else 0.0)


def run(settings: Settings, journal: Journal, failed: list[Row], deadline: Deadline) -> None:
    """Rows of all configurations that have none; nothing is measured without a GPU at full scale."""
    bench = decode.Bench.of(settings)
    torch.manual_seed(settings.seed)
    table = table_name(KIND, settings.scale, bench.shape.name)
    with bar("decoding", len(CONFIGS)) as step:
        for name, config in CONFIGS.items():
            if not journal.finished(table, SETTING, name):
                reason = None if published_shapes(settings) else NO_GPU
                reason = reason or missing(config) or deadline.reason(needed(bench))
                values = status(reason) if reason else attempt(lambda one=config: measure(bench, one))
                keep(journal, failed, rows_of(settings, table_of(bench), {name: values}))
            step(name)


def table_of(bench: decode.Bench) -> Table:
    """Where the rows belong."""
    return Table(KIND, bench.shape.name, SETTING)


@torch.no_grad()
def measure(bench: decode.Bench, config: Config) -> Values:
    """All values of one configuration. Logits of a pruned model are compared with those of bfloat16's pruned as it is: random
    weights without half of them are another model, whose logits differ by their whole size."""
    if not isinstance(config, SparseConfig):
        return decode.measure_one(bench, config)
    bench.baseline()
    dense = bench.logits
    bench.logits = pruned_logits(bench)
    try:
        return decode.measure_one(bench, config)
    finally:
        bench.logits = dense


def pruned_logits(bench: decode.Bench) -> torch.Tensor:
    """Of the prompt, by the bfloat16 model with its blocks pruned and nothing quantized."""
    model = copy.deepcopy(bench.baseline().model)
    ao_lab.sparsify_(model, ao_lab.SparsityConfig(PATTERN), inside_blocks)
    return Decoding(model, bench.plan, decode.prompt_of(bench)).prefill().float()


__all__ = [
    "CONFIGS",
    "KIND",
    "SETTING",
    "SparseConfig",
    "choose_kernels",
    "fp8",
    "int4",
    "missing",
    "pruned_logits",
    "run",
]
