"""One training step of decoder layers of published models at a stated depth: tokens a second and peak memory, by recipe.

A step is forward and backward in bfloat16 without optimizer, random weights, on one GPU: the published tables are of whole
models on many GPUs with their optimizer, so their ratios are near ours, and their values are not ours. All methods of a group
are timed in turn, each after itself, bfloat16 first and once more last. Ours is the one call that a user makes, with its fused
norms, SwiGLU and rotary embedding (`fuse=True`); compiled bfloat16 and torchao's have the compiler's, and eager bfloat16 stands
there with our fused layers too ("ours, bf16").

Activation checkpointing keeps all, every second layer, nothing of a layer, or chooses per operation as torchtitan does: outputs
of attention and of every second matrix product are kept, all else is computed again in backward. Products are counted in
forward and in recomputation on their own, so that both keep the same ones.

"fsdp" is a step under FSDP2 on two ranks, weights gathered as bfloat16 and as float8 codes: forward, backward, AdamW and the
scales of the next gather. The models of all sides live side by side on each rank and take turns; a time is the first rank's,
until its GPU is done, ranks beginning together. On two GPUs NCCL sends, compiled; on a CPU two processes with gloo train a tiny
stand-in, whose bytes mean what they say and whose times mean nothing. Layers between the linear ones are the model's own.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ao_lab.measure.turns import Plan, Stopwatch, summary, watch_of
from experiments.fp8_training.methods import (
    BASELINE,
    FLOAT8,
    MXFP8,
    OURS,
    SUMMED_FAST,
    Method,
    is_linear,
    methods,
)
from experiments.harness.bench import after_own_steps, repeated
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Deadline, Values, Wrong, attempt, free, status
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
from experiments.qat_overhead.step import Trainer, layers_of

KIND = "blocks"
EAGER, COMPILED = "eager", "compiled"
WARMUP = 2
#: The recipe under which linear layers stay bfloat16.
NOTHING_QUANTIZED = "bf16"
STEADY = Plan(rounds=12, warmup=1, seconds=5.0, fewest=4)
QUICK = Plan(rounds=2, warmup=0, seconds=1.0, fewest=2)
#: Compiled programs of one function at once.
PROGRAMS = 64
LLAMA_3_2_3B_FOUR_LAYERS = replace(LLAMA_3_2_3B, name="llama-3.2-3b-four-layers-random", layers=4)


NONE, SECOND, FULL, PER_OP = "none", "every 2nd layer", "full", "per operation"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Methods that are timed in turn: the same model, tokens and checkpointing, compiled or not."""

    shape: LlamaConfig
    batch: int
    length: int
    compiled: bool = False
    checkpointing: str = NONE
    whole: bool = False
    recipes: tuple[str, ...] = (*FLOAT8, MXFP8)
    #: Those of them that run with fast sums too.
    fast: tuple[str, ...] = ()
    plan: Plan = STEADY
    backend: str = "inductor"

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        how = COMPILED if self.compiled else EAGER
        return f"{how}, {self.batch} x {self.length}, checkpointing {self.checkpointing}"

    @property
    def methods(self) -> tuple[Method, ...]:
        """bfloat16, ours, torchao's. torchao's MXFP8 asks for another GPU: it has a row in the table of linear layers.

        In eager mode bfloat16 has a second line with our fused layers: what `fuse=True` brings is not the recipe's. Compiled,
        bfloat16 has the compiler's fusions.
        """
        found = methods(*self.recipes, fast=self.fast, compiled=self.compiled)
        fused = () if self.compiled else (Method(library=OURS, recipe=NOTHING_QUANTIZED),)
        return tuple(
            one for one in (*found[:1], *fused, *found[1:]) if one.recipe != MXFP8 or one.library != "torchao"
        )


def blocks(batch: int, **options: object) -> Group:
    """Two blocks of Llama-3-8B at the sequence of the published table."""
    return Group(shape=LLAMA_3_8B_TWO_LAYERS, batch=batch, length=8192, **options)  # type: ignore[arg-type]


EAGER_TABLE = Group(shape=LLAMA_3_8B_TWO_LAYERS, batch=1, length=4096, recipes=("tensorwise", "rowwise"))
FINE_TUNING = Group(shape=LLAMA_3_2_3B_FOUR_LAYERS, batch=2, length=2048, whole=True, recipes=FLOAT8)
#: In the order in which they are measured.
GPU_GROUPS = (
    *(
        blocks(batch, compiled=compiled, checkpointing=kind, fast=fast)
        for compiled in (False, True)
        for batch, kind, fast in ((2, NONE, SUMMED_FAST), (1, PER_OP, ()), (2, PER_OP, ()), (1, NONE, ()))
    ),
    *(replace(EAGER_TABLE, checkpointing=kind) for kind in (NONE, SECOND, FULL)),
    *(
        replace(EAGER_TABLE, checkpointing=kind, compiled=True, recipes=("tensorwise",))
        for kind in (NONE, SECOND, FULL)
    ),
    FINE_TUNING,
    replace(FINE_TUNING, compiled=True),
)
TINY = Group(
    shape=TINY_TWO_LAYERS, batch=1, length=128, plan=QUICK, backend="aot_eager", recipes=("rowwise", MXFP8)
)
TINY_GROUPS = (
    TINY,
    replace(TINY, checkpointing=PER_OP),
    replace(TINY, shape=TINY_ONE_LAYER, whole=True, recipes=("tensorwise",)),
)


@dataclass
class Bench:
    """What groups are measured with."""

    device: str
    seed: int
    watch: Stopwatch
    deadline: Deadline
    #: Steps of a method before the one that is timed.
    warmup: int = WARMUP

    @classmethod
    def of(cls, device: str, seed: int, deadline: Deadline) -> Bench:
        """With the watch of the device; on a CPU without steps before, as its times say nothing."""
        return cls(device, seed, watch_of(device), deadline, WARMUP if device == "cuda" else 0)


def measure(bench: Bench, group: Group, chosen: Sequence[Method] | None = None) -> dict[Method, Values]:
    """Values of each method of a group, or of some and bfloat16; a method that fails has a status instead."""
    trainers: dict[Method, Trainer] = {}
    found: dict[Method, Values] = {}
    torch.manual_seed(bench.seed)
    torch.compiler.reset()
    import torch._dynamo.config as tracer

    with tracer.patch(recompile_limit=PROGRAMS):
        for method in group.methods if chosen is None else chosen:
            reason = method.missing() or bench.deadline.reason()
            work = partial(prepared, bench, group, method, trainers)
            found[method] = status(reason) if reason else attempt(work)
        base = next((one for one in trainers if not one.recipe), None)
        if base is not None:
            add_times(bench, group, base, trainers, found)
    trainers.clear()
    free()
    failed = "not run: bfloat16 training failed"
    return found if base is not None else {one: values_without(found[one], failed) for one in found}


def values_without(values: Values, reason: str) -> Values:
    """A status instead of values that nothing can be compared with."""
    return status(reason) if "status: ok" in values else values


def prepared(bench: Bench, group: Group, method: Method, trainers: dict[Method, Trainer]) -> Values:
    """Build a model, check its output and its gradients, measure its memory; it is added to the trainers."""
    trainer = Trainer.of(group.shape, group.batch, group.length, bench.device, bench.seed, whole=group.whole)
    layers = layers_of(trainer.model)
    method.prepare(layers, fuse=True)
    plain = next((one.result for known, one in trainers.items() if not known.recipe), None)
    trainer.result = trainer.output()
    values: Values = {
        "change of the result": relative_change(trainer.result, plain, SCHEME_LIMIT, "from bfloat16's")
    }
    apply(layers.layers, group.checkpointing)
    if group.compiled:
        trainer.compile(group.backend)
    started = bench.deadline.clock()
    output = trainer.first_step()
    bench.watch.sync()
    values["first step"] = (bench.deadline.clock() - started, "s")
    if group.compiled:
        relative_change(output, trainer.result, COMPILED_LIMIT, "by compiling")
    del output
    with compiled_runs(group.compiled):
        trainer.step()
    values |= trainer.memory()
    trainers[method] = trainer
    return values


def add_times(
    bench: Bench, group: Group, base: Method, trainers: dict[Method, Trainer], found: dict[Method, Values]
) -> None:
    """Add times in turn, tokens a second, and ratios to bfloat16."""
    steps = {one.name: trainer.step for one, trainer in trainers.items()}
    times = after_own_steps(bench.watch, steps, group.plan, bench.warmup)
    plain = summary(times[base.name]).median
    for method in trainers:
        timing, values = summary(times[method.name]), found[method]
        values |= timing.values()
        values["tokens/s"] = (group.batch * group.length / timing.median, "tokens/s")
        values["speed over bfloat16"] = (plain / timing.median, "ratio")
        if "peak memory" in values and "peak memory" in found[base]:
            ratio = values["peak memory"][0] / found[base]["peak memory"][0]
            values["peak memory over bfloat16"] = (ratio, "ratio")
    found[base] |= repeated(times, base.name)


#: Names of operators: matrix products, of any library, and what is always kept.
PRODUCTS = ("aten.mm.", "aten.addmm.", "aten._scaled_mm")
KEPT = ("scaled_dot_product", "_scaled_dot", "aten.max.")


def apply(layers: Iterable[nn.Module], kind: str) -> None:
    """Let layers compute again in backward what `kind` does not keep; ValueError for another kind."""
    if kind not in (NONE, SECOND, FULL, PER_OP):
        raise ValueError(f"checkpointing is {NONE}, {SECOND}, {FULL} or {PER_OP}; got {kind!r}")
    for number, layer in enumerate(layers):
        if kind in (FULL, PER_OP) or (kind == SECOND and number % 2 == 0):
            layer.forward = _recomputed(layer.forward, kind == PER_OP)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any], per_op: bool) -> Callable[..., Any]:
    """forward, computed again in backward. Functions: of a module whose forward is a `functools.partial` torch.compile compiles
    nothing, and does not say so."""

    def all_again(*args: Any, **options: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options)

    def some_again(*args: Any, **options: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **options)

    return some_again if per_op else all_again


def contexts() -> Any:
    """The contexts of forward and recomputation, with counts of their own."""
    return create_selective_checkpoint_contexts(policy())


def policy() -> Callable[..., CheckpointPolicy]:
    """What is kept: see the module's text."""
    counts = {False: 0, True: 0}

    def decide(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        name = str(operator)
        if name.startswith(PRODUCTS):
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        else:
            kept = any(word in name for word in KEPT)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


FSDP_KIND = "fsdp"
RANKS, FSDP_WARMUP = 2, 3
#: What ranks give to collectives, by torch's names of them: tensors that are gathered, and gradients.
GATHERED, REDUCED = ("_allgather_base_", "allgather_"), ("_reduce_scatter_base_", "reduce_scatter_")
FSDP_FLOAT8, WIDE = "float8", "bfloat16"


@dataclass(frozen=True)
class Side:
    """One way to train: bfloat16, or a recipe whose weights are gathered in bfloat16 or, codes, as float8."""

    recipe: str = ""
    codes: bool = False

    @property
    def name(self) -> str:
        """The name of its rows."""
        gathered = FSDP_FLOAT8 if self.codes else WIDE
        return f"{OURS}, {self.recipe}, {gathered} all-gather" if self.recipe else BASELINE


#: bfloat16 first: ratios are to it.
SIDES = (Side(), *(Side(recipe, codes) for recipe in ("tensorwise", "rowwise") for codes in (False, True)))


@dataclass(frozen=True)
class Case:
    """What all sides train: a model, the batch of a rank, where, and how many steps are timed."""

    shape: LlamaConfig
    batch: int
    length: int
    device: str
    compiled: bool
    rounds: int

    @property
    def setting(self) -> str:
        """The setting of its rows."""
        how = "compiled" if self.compiled else "eager"
        return f"{RANKS} ranks, {self.batch} x {self.length} a rank, {how}"

    def missing(self) -> str | None:
        """Why it cannot be measured here; None where it can."""
        if not dist.is_available():
            return "not run: this torch has no torch.distributed"
        found = torch.cuda.device_count() if self.device == "cuda" else RANKS
        return f"not run: it takes {RANKS} GPUs, found {found}" if found < RANKS else None


TWO_GPUS = Case(LLAMA_3_8B_TWO_LAYERS, 1, 8192, "cuda", True, 20)
STAND_IN = Case(TINY_TWO_LAYERS, 1, 64, "cpu", False, 2)
CASES = {"cuda": TWO_GPUS, "cpu": STAND_IN}


def fsdp_measure(case: Case, seed: int) -> dict[tuple[str, str], Values]:
    """Values of each side; where the ranks fail, a status of each."""
    found: dict[str, Values] = {}

    def work() -> Values:
        found.update(on_ranks(case, seed))
        return {}

    ended = attempt(work)
    return {(case.setting, side.name): {**found.get(side.name, {}), **ended} for side in SIDES}


#: How the processes of ranks begin: with nothing of this one.
START = "spawn"


def on_ranks(case: Case, seed: int) -> dict[str, Values]:
    """What the first rank finds, by side."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.json"
        mp.start_processes(on_rank, (case, seed, port, str(path)), nprocs=RANKS, start_method=START)
        made = json.loads(path.read_text())
    return {
        side: {name: (value, unit) for name, (value, unit) in values.items()} for side, values in made.items()
    }


def on_rank(rank: int, case: Case, seed: int, port: int, path: str) -> None:
    """What each rank does; the first writes what it finds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if case.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if case.device == "cuda" else "gloo", rank=rank, world_size=RANKS)
    steps = {side: Step(side, case, seed) for side in SIDES}
    found = values_of(steps, case)
    if rank == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class Step:
    """A side's model under FSDP2, and a step of it."""

    def __init__(self, side: Side, case: Case, seed: int) -> None:
        from ao_lab import convert_for_training_

        self.trainer = Trainer.of(case.shape, case.batch, case.length, case.device, seed, whole=False)
        self.layers = layers_of(self.trainer.model)
        if side.recipe:
            convert_for_training_(self.layers, side.recipe, is_linear, fsdp_float8_all_gather=side.codes)
        for layer in self.layers.layers:
            if case.compiled:
                layer.compile()
            fully_shard(layer)
        fully_shard(self.layers)
        self.optimizer = torch.optim.AdamW(self.layers.parameters(), 1e-5)

    def run(self) -> None:
        """Forward, backward, optimizer, scales."""
        from ao_lab import precompute_float8_dynamic_scale_for_fsdp

        self.trainer.backward(self.trainer.model(self.trainer.inputs))
        self.optimizer.step()
        self.trainer.clear()
        precompute_float8_dynamic_scale_for_fsdp(self.layers)

    def seconds(self) -> float:
        """Of a step, ranks beginning together."""
        dist.barrier()
        synchronize()
        started = time.perf_counter()
        self.run()
        synchronize()
        return time.perf_counter() - started


def values_of(steps: dict[Side, Step], case: Case) -> dict[str, dict[str, Any]]:
    """Times in turn, bytes and memory of a step."""
    for step in steps.values():
        for _ in range(FSDP_WARMUP):
            step.run()
        with compiled_runs(case.compiled):
            step.run()
    times: dict[Side, list[float]] = {side: [] for side in steps}
    for _ in range(case.rounds):
        for side, step in steps.items():
            times[side].append(step.seconds())
    medians = {side: statistics.median(taken) for side, taken in times.items()}
    found: dict[str, dict[str, Any]] = {}
    for side, step in steps.items():
        timing = summary(times[side])
        found[side.name] = {
            **timing.values(),
            "tokens/s": (case.batch * case.length / timing.median, "tokens/s"),
            "speed over bfloat16": (medians[Side()] / timing.median, "ratio"),
            **dict(gathering(side, medians)),
            **sent(step),
            **memory(step, case),
        }
    return found


def gathering(side: Side, medians: dict[Side, float]) -> Iterator[tuple[str, tuple[float, str]]]:
    """Of codes, the speed over the same recipe whose weights are gathered in bfloat16."""
    if side.codes:
        yield "speed over bfloat16 all-gather", (medians[Side(side.recipe)] / medians[side], "ratio")


class Traffic(TorchDispatchMode):
    """Bytes that this rank gives to collectives, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            given = args[1] if name == GATHERED[0] else args[0]
            tensors = [
                t for t in (given if isinstance(given, list) else [given]) if isinstance(t, torch.Tensor)
            ]
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def sent(step: Step) -> Values:
    """Megabytes that the first rank gives to be gathered, and of gradients, in an eager step."""
    with torch.compiler.set_stance("force_eager"), Traffic() as traffic:
        step.run()
    gathered = sum(traffic.bytes.get(name, 0) for name in GATHERED)
    if not gathered:
        raise Wrong(f"no all-gather was seen among {sorted(traffic.bytes)}")
    reduced = sum(size for name, size in traffic.bytes.items() if name in REDUCED)
    return {"all-gather": (gathered / 1e6, "MB"), "reduce-scatter": (reduced / 1e6, "MB")}


def memory(step: Step, case: Case) -> Values:
    """The largest memory of a step above what all sides hold; of a GPU."""
    if case.device != "cuda":
        return {}
    synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    synchronize()
    return {"peak memory": ((torch.cuda.max_memory_allocated() - held) / 1e9, "GB")}


def synchronize() -> None:
    """Wait for the GPU, where there is one in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
