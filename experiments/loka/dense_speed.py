"""Parts "speed" and "mod speed" of `loka`, on a GPU alone: a step of the dense part of exact shapes, compiled.

Embeddings are random: what is timed is everything behind the lookups, gradients of embeddings included. DLRMv2-DCN at batch
8192 (65536 over eight GPUs), Wukong at 6144; forward and backward, and forward alone. "dispatch" chooses by time on this GPU,
without a limit to errors, and confirms by whole steps; that of trained networks within a budget is part "policies". "fp8
weights" is inference: weights are stored with a scale a row, inputs quantized in each call.

Methods of a workload are made one by one and then timed in turn, each step after one of its own. Wukong is compiled layer by
layer: they are alike, so one program serves them. Steps of milliseconds are timed as CUDA graphs too, without the host. Forward
alone is of bfloat16 and of stored weights: a method of training casts its weights there, which inference does not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

import ao_lab
from ao_lab.gemm.choices import forget
from ao_lab.measure.turns import Call, Plan, Watch, summary, watch_of
from experiments.harness.bench import after_own_steps, repeated
from experiments.harness.measuring import Deadline, Stages, Values, in_time
from experiments.models.dlrm import DLRM, DLRMV2, DLRMConfig
from experiments.models.wukong import WUKONG, Wukong

SPEED, MOD_SPEED = "speed", "mod speed"
BOTH, FORWARD, MEMORY = "forward and backward", "forward", "peak memory"
GRAPH = ", graph"
STORED = "fp8 weights"
BASE = "bfloat16"
#: In this order, since a deadline may leave out the last.
METHODS = (BASE, "dispatch", "rowwise", STORED, "tensorwise")
#: What is timed without gradients.
INFERENCE = (BASE, STORED)
#: Those that LoKA publishes of its Wukong beside these.
PUBLISHED = ("rowwise_with_gw_hp", "blockwise")
THREE = ("no_bias", "block_norm", "hard_swish")
NONE, TOGETHER = "none", "all three"
#: Mods whose step is timed beside that of the model as it is: each alone, all, and then two of them.
MODS: dict[str, tuple[str, ...]] = {
    NONE: (), **{one: (one,) for one in THREE}, TOGETHER: THREE,
    **{" and ".join(two): two for two in combinations(THREE, 2)},
}  # fmt: skip
#: What outputs may move by where only time counts.
ANY = 1e6
#: Tokens and examples of a probe whose errors nothing asks for: those of many take minutes at the widest layers.
TOKENS, PROBED = 8, 64
PLANS = {"cuda": Plan(rounds=10, warmup=1, seconds=3.0, fewest=3), "cpu": Plan(rounds=1, warmup=0, fewest=1)}
#: Programs that torch may make of one function: every method, layers of other shapes, with and without gradients. Beyond its
#: limit, 8, it would run the rest operation by operation, with a line on stderr.
PROGRAMS = 256


class Dense(nn.Module):
    """A model without its tables, called with what they would give."""

    def __init__(self, model: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits (B,)."""
        return self.run(self.model, *inputs)


@dataclass(frozen=True)
class Workload:
    """name: of the model; make: the dense part on a device; inputs: of a batch, embeddings last; parts: modules that are
    compiled, each by itself; graph: whether steps are captured too."""

    name: str
    batch: int
    make: Callable[[str], Dense]
    inputs: Callable[[int, str], tuple[Tensor, ...]]
    parts: Callable[[Any], Iterable[nn.Module]] = lambda dense: [dense]
    graph: bool = True


def dcn(config: DLRMConfig, batch: int) -> Workload:
    """DLRMv2, or what has its structure."""

    def make(device: str) -> Dense:
        with torch.device("meta"):
            nothing = nn.Identity()
        model = DLRM(config, tables=nothing, device=device).to(torch.bfloat16)
        return Dense(model, lambda m, dense, sums: m.interact(m.bottom(dense), sums))

    def inputs(rows: int, device: str) -> tuple[Tensor, ...]:
        shapes = ((rows, config.dense), (rows, len(config.sizes), config.width))
        return tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)

    return Workload(config.name, batch, make, inputs)


def wukong(name: str, batch: int) -> Workload:
    """A Wukong of the paper."""
    config = WUKONG[name]

    def make(device: str) -> Dense:
        return Dense(Wukong(config, device=device).to(torch.bfloat16), lambda m, x: m.interact(x))

    def inputs(rows: int, device: str) -> tuple[Tensor, ...]:
        return (torch.randn((rows, config.features, config.width), device=device, dtype=torch.bfloat16),)

    parts = lambda dense: [*dense.model.layers, dense.model.top]  # noqa: E731
    return Workload(name, batch, make, inputs, parts, graph=False)


#: What is timed; "norms" is DLRMv2 with LayerNorm and SiLU in its feed-forward networks, which mods change.
WORKLOADS: dict[str, Workload] = {
    "DLRMv2-DCN": dcn(DLRMV2, 8192),
    "Wukong 22.2 GFLOP": wukong("Wukong 22.2 GFLOP", 6144),
    "Wukong 5.6 GFLOP": wukong("Wukong 5.6 GFLOP", 6144),
}
NORMS = replace(DLRMV2, name="DLRMv2-DCN, norms and SiLU", norm=True)


def changed(
    model: Dense, method: str, inputs: tuple[Tensor, ...], done: Callable[[str], None] = lambda word: None
) -> None:
    """Let the layers of a model train by a method. done: is called after a stage within."""
    if method == "dispatch":
        recipes = ["rowwise", "tensorwise"]
        few = [tuple(one[:PROBED] for one in inputs)]
        report = ao_lab.probe_(model, few, recipes, filter_fn=is_wide, tokens=TOKENS, measure=False)
        done(f"{method}, probed")
        ao_lab.dispatch_(
            model, lambda m: m(*inputs).float().mean(), report, budget=ANY, most_noise=ANY, confirm=True
        )
    elif method == STORED:
        config = ao_lab.Float8DynamicActivationFloat8WeightConfig(granularity=ao_lab.PerRow())
        ao_lab.quantize_(model.requires_grad_(False), config, is_wide)
    elif method in MODS:
        if MODS[method]:
            ao_lab.apply_mods_(model, MODS[method])
    elif method != BASE:
        ao_lab.convert_for_training_(model, method, is_wide, pad=True)


def is_wide(module: nn.Module, name: str) -> bool:
    """Linear layers but those of few columns, the first and the last among them."""
    return isinstance(module, nn.Linear) and min(module.weight.shape) >= 128


@dataclass
class Steps:
    """Steps of a workload's methods: forward and backward, and forward alone."""

    workload: Workload
    device: str
    compiled: bool
    watch: Watch
    inputs: tuple[Tensor, ...]
    stages: Stages
    calls: dict[str, dict[str, Call]] = field(default_factory=lambda: {BOTH: {}, FORWARD: {}})

    def make(self, method: str) -> Values:
        """Build, change and compile a model, and run each of its steps; the most memory that it takes beside the others."""
        before = held(self.device)
        forget()  # functions that "dispatch" chose are its own: its program has them by now
        torch.manual_seed(0)
        model = self.workload.make(self.device)
        self.done(f"{method}, weights drawn")
        changed(model, method, self.inputs, self.done)
        self.done(f"{method}, layers changed")
        if self.compiled:
            for part in self.workload.parts(model):
                part.compile(dynamic=False)
        steps = {
            metric: partial(step, model, self.inputs)
            for metric, step, wanted in (
                (BOTH, both, method != STORED),
                (FORWARD, forward, method in INFERENCE),
            )
            if wanted
        }
        for metric, step in steps.items():
            step()
            self.done(f"{method}, {metric} compiled")
        values = self.memory(before, next(iter(steps.values())))
        for metric, step in steps.items():
            self.calls[metric][method] = step
        return values

    def done(self, word: str) -> None:
        """A stage ends when the device has done it."""
        self.watch.sync()
        self.stages.done(word)

    def memory(self, before: int, step: Call) -> Values:
        """Gigabytes of a step beyond what was held before."""
        if self.device != "cuda":
            return {}
        torch.cuda.reset_peak_memory_stats()
        step()
        return {MEMORY: ((torch.cuda.max_memory_allocated() - before) / 1e9, "GB")}

    def captured(self, results: dict[str, Values], deadline: Deadline) -> dict[str, dict[str, Call]]:
        """The same as CUDA graphs; of a step that cannot be captured a row says why."""
        found: dict[str, dict[str, Call]] = {}
        for metric, calls in self.calls.items():
            for method, step in calls.items():
                made = found.setdefault(metric + GRAPH, {})
                told = in_time(deadline, partial(self._capture, method, step, made))
                if method not in made:
                    results[method] |= {
                        key.replace("status", metric + GRAPH): value for key, value in told.items()
                    }
        return found

    def _capture(self, method: str, step: Call, made: dict[str, Call]) -> Values:
        replay = self.watch.capture([step])
        replay()
        self.watch.sync()
        made[method] = replay
        return {}


def both(model: Dense, inputs: tuple[Tensor, ...]) -> None:
    """Forward and backward; gradients are freed."""
    model(*inputs).float().mean().backward()  # type: ignore[no-untyped-call]
    for one in (*model.parameters(), *inputs):
        one.grad = None


@torch.no_grad()
def forward(model: Dense, inputs: tuple[Tensor, ...]) -> None:
    """Without gradients."""
    model(*inputs)


def held(device: str) -> int:
    """Bytes of tensors on a GPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def measure(
    workload: Workload, methods: Iterable[str], device: str, deadline: Deadline, compiled: bool = True
) -> Mapping[str, Values]:
    """Times of every method of a workload, in turn; of one that fails or comes too late its status."""
    torch.manual_seed(0)
    inputs = workload.inputs(workload.batch, device)
    inputs[-1].requires_grad_()
    stages = Stages(f"{workload.name}, batch {workload.batch}", deadline, told=device == "cuda")
    steps = Steps(workload, device, compiled, watch_of(device), inputs, stages)
    results: dict[str, Values] = {}
    with many_programs():
        for method in methods:
            results[method] = stages.method(partial(steps.make, method))
            if "status: ok" not in results[method]:
                gc.collect()  # what a failure left, before the next method
        add_times(results, steps.watch, steps.calls, PLANS[device])
        steps.done("timed")
        if workload.graph and device == "cuda":
            made = steps.captured(results, deadline)
            steps.done("captured")
            add_times(results, steps.watch, made, PLANS[device])
            steps.done("graphs timed")
    return results


@contextmanager
def many_programs() -> Iterator[None]:
    """Up to PROGRAMS of each function, inside."""
    with torch._dynamo.config.patch(recompile_limit=PROGRAMS, accumulated_recompile_limit=4 * PROGRAMS):
        yield


def add_times(
    results: dict[str, Values], watch: Watch, calls: Mapping[str, Mapping[str, Call]], plan: Plan
) -> None:
    """Medians and quantiles of steps by metric and method, each timed after one of its own."""
    for metric, some in calls.items():
        if not some:
            continue
        times = after_own_steps(watch, some, plan, 1)
        for method in some:
            found = summary(times[method]).values()
            results[method] |= {key.replace("time", metric, 1): value for key, value in found.items()}
        first = next(iter(some))
        results[first] |= {f"{metric}, {key}": value for key, value in repeated(times, first).items()}


def methods_of(name: str) -> tuple[str, ...]:
    """Of a workload by its name."""
    return (*METHODS, *PUBLISHED) if "22.2" in name else METHODS


__all__ = ["BOTH", "FORWARD", "GRAPH", "MEMORY", "METHODS", "MODS", "MOD_SPEED", "NORMS", "PUBLISHED", "SPEED", "STORED",
           "WORKLOADS", "Workload", "dcn", "many_programs", "measure", "methods_of"]  # fmt: skip
