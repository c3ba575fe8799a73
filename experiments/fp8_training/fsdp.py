"""A training step of decoder layers under FSDP2 on two ranks: weights gathered as bfloat16 and as float8 codes, bytes counted.

A step is forward, backward, AdamW and the scales of the next gather. The models of all sides live side by side on each rank and
take turns; a time is the first rank's, until its GPU is done, ranks beginning together. On two GPUs NCCL sends, of a model like
the published one's, compiled; on a CPU two processes with gloo train a tiny stand-in, whose bytes mean what they say and whose
times mean nothing. Layers between the linear ones are the model's own (`fuse=False`), compiled with them.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.fp8_training.methods import BASELINE, OURS, is_linear
from experiments.harness.bench import summary
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Values, Wrong, attempt
from experiments.models.llama import LLAMA_3_8B_TWO_LAYERS, TINY_TWO_LAYERS, LlamaConfig
from experiments.qat_overhead.step import Trainer, layers_of

KIND = "fsdp"
RANKS, WARMUP = 2, 3
#: What ranks give to collectives, by torch's names of them: tensors that are gathered, and gradients.
GATHERED, REDUCED = ("_allgather_base_", "allgather_"), ("_reduce_scatter_base_", "reduce_scatter_")
FLOAT8, WIDE = "float8", "bfloat16"


@dataclass(frozen=True)
class Side:
    """One way to train: bfloat16, or a recipe whose weights are gathered in bfloat16 or, codes, as float8."""

    recipe: str = ""
    codes: bool = False

    @property
    def name(self) -> str:
        """The name of its rows."""
        gathered = FLOAT8 if self.codes else WIDE
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


def measure(case: Case, seed: int) -> dict[tuple[str, str], Values]:
    """Values of each side; where the ranks fail, a status of each."""
    found: dict[str, Values] = {}

    def work() -> Values:
        found.update(on_ranks(case, seed))
        return {}

    ended = attempt(work)
    return {(case.setting, side.name): {**found.get(side.name, {}), **ended} for side in SIDES}


def on_ranks(case: Case, seed: int) -> dict[str, Values]:
    """What the first rank finds, by side."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values.json"
        mp.start_processes(on_rank, (case, seed, port, str(path)), nprocs=RANKS, start_method="spawn")
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
        for _ in range(WARMUP):
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
            "time": (timing.median * 1e3, "ms"),
            "time, 20%": (timing.low * 1e3, "ms"),
            "time, 80%": (timing.high * 1e3, "ms"),
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
