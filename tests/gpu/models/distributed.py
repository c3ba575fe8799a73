"""Training on several GPUs: bits as on one, bytes counted, and the time of a step whose weights travel as codes.

1. The scripts of tests/support/distributed run with RANKS_DEVICE=cuda (NCCL, bfloat16): FSDP2 with codes and with values, bytes
   and reductions counted; compiled; tensor parallelism; a rank that is killed, and the run that goes on.
2. A step of two Llama-3-8B blocks (forward, backward, AdamW, scales) under FSDP2, compiled, gathered as bfloat16 and as codes,
   in turn: the median of STEPS, by recipe; the peak of memory; bytes sent in a step by the first rank.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import ao_lab
from tests.gpu.harness.subject import Asked, Check, Row, Subject
from tests.support.distributed.training.model import Traffic

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "tests/support/distributed"
RECIPES = ("tensorwise", "rowwise")
HIDDEN, HEADS, KEYS, INNER = 4096, 32, 8, 14336


#: Sequences of a batch, tokens of one, steps that are timed.
BATCH, ROWS, STEPS = 1, 8192, 20


def checks(asked: Asked) -> Iterator[Check]:
    """Scripts that end well, and one that is to be killed, whose run then goes on."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = "training/checkpoint_ranks.py"
        runs = (
            ("training/fsdp_ranks.py", [], True),
            ("training/fsdp_ranks.py", ["tensorwise", "rowwise", "mxfp8"], True),
            ("training/tensor_parallel_ranks.py", [], True),
            (checkpoints, [folder, "backward", "2"], False),
            (checkpoints, [folder], True),
        )
        for name, arguments, survives in runs:
            yield f"{name} {' '.join(arguments[1:])}", partial(wrong_script, name, arguments, survives)


def wrong_script(name: str, arguments: list[str], survives: bool) -> Iterator[str]:
    """The last lines of a script that did not end as it is to."""
    command = [sys.executable, str(SCRIPTS / name), str(torch.cuda.device_count()), *arguments]
    env = {**os.environ, "RANKS_DEVICE": "cuda"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=240
    )
    if (done.returncode == 0) != survives:
        yield f"{done.stdout[-500:]}\n{done.stderr[-4000:]}"


def times(asked: Asked) -> Iterator[Row]:
    """The rows of part 2."""
    with tempfile.TemporaryDirectory() as folder:
        rows, gpus = Path(folder) / "rows.json", torch.cuda.device_count()
        mp.start_processes(
            measure, (gpus, (*asked.rows, ROWS)[0], str(rows)), nprocs=gpus, start_method="spawn"
        )
        yield from json.loads(rows.read_text())


def measure(rank: int, gpus: int, tokens: int, path: str) -> None:
    """What each rank does; the first writes the rows."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29581")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus)
    rows = [row for recipe in RECIPES for row in compare(recipe, tokens)]
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    dist.destroy_process_group()


def compare(recipe: str, tokens: int) -> list[Row]:
    """Steps of bfloat16, of the recipe with values gathered and with codes, in turn."""
    made = {name: Step(*kind, tokens) for name, kind in kinds(recipe).items()}
    for step in made.values():
        for _ in range(3):
            step.run()
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(STEPS):
        for name, step in made.items():
            taken[name].append(step.timed())
    ms = {name: round(statistics.median(values), 3) for name, values in taken.items()}
    return [
        {"recipe": recipe, "gathered": name, "ms": ms[name], "bytes": step.bytes(), "peak": step.peak(),
         "over values": round(ms["values"] / ms[name], 4), "over bfloat16": round(ms["bfloat16"] / ms[name], 4)}
        for name, step in made.items()
    ]  # fmt: skip


def kinds(recipe: str) -> dict[str, tuple[str | None, bool]]:
    """What is compared: recipe and whether codes are gathered."""
    return {"bfloat16": (None, False), "values": (recipe, False), "codes": (recipe, True)}


class Block(nn.Module):
    """A block of Llama-3-8B without rotary positions, which no weight takes part in."""

    def __init__(self) -> None:
        super().__init__()
        self.head = HIDDEN // HEADS
        self.first, self.second = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(HIDDEN, KEYS * self.head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, rows, HIDDEN)."""
        h = self.first(x)
        q, k, v = (one(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.second(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Step:
    """A model of two blocks under FSDP2, and a step of it."""

    def __init__(self, recipe: str | None, codes: bool, tokens: int) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.net = nn.Sequential(Block(), Block()).to(torch.bfloat16)
            self.x = torch.randn(BATCH, tokens, HIDDEN, dtype=torch.bfloat16)
        if recipe is not None:
            ao_lab.convert_for_training_(self.net, recipe, fsdp_float8_all_gather=codes)
        for block in self.net:
            block.compile()
            fully_shard(block)
        fully_shard(self.net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-5, fused=False)
        self.precompute = ao_lab.precompute_float8_dynamic_scale_for_fsdp

    def run(self) -> None:
        """Forward, backward, optimizer, scales."""
        self.net(self.x).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.precompute(self.net)

    def timed(self) -> float:
        """Milliseconds of a step, ranks beginning together."""
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.run()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    def bytes(self) -> dict[str, int]:
        """What this rank gives to collectives in a step."""
        with torch.compiler.set_stance("force_eager"), Traffic() as traffic:
            self.run()
        return traffic.bytes

    def peak(self) -> int:
        """The largest memory of a step above what all models hold, in bytes."""
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - held


SUBJECTS = (Subject("distributed", "training on several GPUs", checks, times),)
