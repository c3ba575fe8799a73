"""Part "cost" of `loka`: what an online probe adds to steps of training, on the clock of the machine at hand.

Steps of small networks on drawn impressions; on a GPU, of the dense part of exact shapes, compiled (a step that is sampled runs
eagerly); and, on a CPU, of a dense part on two ranks, under DistributedDataParallel and under FSDP2.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ao_lab import Probe
from experiments.harness.measuring import Values
from experiments.loka.dense_speed import WORKLOADS, Workload, dcn, many_programs
from experiments.loka.subjects import SIZES, impressions, subject
from experiments.models.dlrm import DLRMConfig

COST = "cost"
STEP, SAMPLED = "ordinary step", "sampled step over an ordinary one"
KEPT, GATHERED = "kept of a site, at most", "joining the ranks' samples"
CADENCES = (1, 10, 100, 1000)
#: Steps, every second of them sampled; tokens that are kept of a site.
STEPS, TOKENS = 14, 1024
#: Workloads of exact shapes, on a GPU.
EXACT = ("DLRMv2-DCN", "Wukong 5.6 GFLOP")
RANKS, THREADS = 2, 1
#: What ranks train: a cross network and a feed-forward network of 32 tables of 32 columns.
SMALL = DLRMConfig(
    name="DCN, small", dense=13, sizes=(1,) * 31, hots=(1,) * 31, width=32, bottom=(256,), cross=3, rank=256,
    top=(1024, 512),
)  # fmt: skip


def cost_values(name: str, scale: str, seed: int, device: str) -> Values:
    """Of a small network on impressions."""
    model = subject(name, scale, seed, device).model.train()
    data, size = impressions(scale, seed), SIZES[scale]

    def step(batch: Any) -> None:
        functional.binary_cross_entropy_with_logits(
            model(batch.dense, batch.ids).float(), batch.labels
        ).backward()

    values = timed(model, step, data.batches(size.plan.batch, seed, STEPS, device), device)
    model.eval()
    return values


def exact_values(name: str, device: str) -> Values:
    """Of a workload of exact shapes, compiled."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model, inputs = workload.make(device), workload.inputs(workload.batch, device)
    inputs[-1].requires_grad_()
    for part in workload.parts(model):
        part.compile(dynamic=False)

    def step(batch: Any) -> None:
        model(*batch).float().mean().backward()
        inputs[-1].grad = None

    with many_programs():
        return timed(model, step, [inputs] * STEPS, device)


def timed(model: nn.Module, step: Callable[[Any], None], batches: Iterable[Any], device: str) -> Values:
    """Ordinary and sampled steps in turn; what a sample every so many steps adds."""
    probe = Probe(model, ["rowwise"], every=2, tokens=TOKENS)
    times: dict[bool, list[float]] = {True: [], False: []}
    for batch in batches:
        _wait(device)
        started = time.perf_counter()
        with probe.step() as sampled:
            step(batch)
        _wait(device)
        times[sampled].append(time.perf_counter() - started)
        model.zero_grad()
    # The first of each kind warms up.
    plain, with_sample = (statistics.median(times[kind][1:]) for kind in (False, True))
    values: Values = {
        STEP: (1e3 * plain, "ms"),
        SAMPLED: (with_sample / plain, "x"),
        KEPT: (_kept(probe), "MB"),
    }
    return values | dict(_shares(max(with_sample / plain - 1, 0.0))) | dict(_gathered(probe))


def _shares(more: float) -> Iterator[tuple[str, tuple[float, str]]]:
    for every in CADENCES:
        yield f"a sample every {every} steps", (100 * more / every, "%")


def _kept(probe: Probe) -> float:
    """Megabytes of the largest sample."""
    return max(
        sum(part.nbytes for part in (one.x, one.g) if part is not None) / 1e6
        for one in probe.samples.values()
    )


def _gathered(probe: Probe) -> Iterator[tuple[str, tuple[float, str]]]:
    """Seconds that ranks take to join what they kept."""
    if torch.distributed.is_initialized():
        started = time.perf_counter()
        probe.gather()
        yield GATHERED, (time.perf_counter() - started, "s")


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# On several ranks, which are processes of this machine's CPU.


def with_ddp(model: nn.Module) -> nn.Module:
    """Gradients are averaged."""
    return nn.parallel.DistributedDataParallel(model)


def with_fsdp2(model: nn.Module) -> nn.Module:
    """Weights are sharded."""
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return model


WRAPPED: dict[str, Callable[[nn.Module], nn.Module]] = {"DDP": with_ddp, "FSDP2": with_fsdp2}


def rank_values(wrapped: str, batch: int = 1024) -> Values:
    """The first rank's values of a small dense part that trains on RANKS ranks."""
    with tempfile.TemporaryDirectory() as folder:
        work = partial(_train, wrapped=wrapped, batch=batch, folder=Path(folder))
        torch.multiprocessing.spawn(work, nprocs=RANKS)
        told = json.loads((Path(folder) / "values.json").read_text(encoding="utf-8"))
    return {name: (value, unit) for name, (value, unit) in told.items()}


def _train(rank: int, *, wrapped: str, batch: int, folder: Path) -> None:
    """On one rank; the first writes what it found."""
    torch.set_num_threads(THREADS)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=RANKS
    )
    try:
        values = _values_of(dcn(SMALL, batch), wrapped, rank)
    finally:
        torch.distributed.destroy_process_group()
    if not rank:
        (folder / "values.json").write_text(json.dumps(values), encoding="utf-8")


def _values_of(workload: Workload, wrapped: str, rank: int) -> Values:
    torch.manual_seed(0)
    dense = workload.make("cpu").float()
    # FSDP2 hangs a hook on what a module returns, and warns of views.
    dense.run, run = lambda *given: run(*given).clone(), dense.run
    model = WRAPPED[wrapped](dense)
    torch.manual_seed(rank)
    inputs = tuple(one.float() for one in workload.inputs(workload.batch, "cpu"))

    def step(batch: Any) -> None:
        model(*batch).mean().backward()

    return timed(model, step, [inputs] * STEPS, "cpu")


__all__ = ["COST", "EXACT", "WRAPPED", "cost_values", "exact_values", "rank_values"]
