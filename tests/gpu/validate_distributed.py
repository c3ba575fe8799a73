"""Training on several GPUs: bits as on one, bytes counted, and the time of a step whose weights travel as codes.

    PYTHONPATH=. python tests/gpu/validate_distributed.py [--gpus 2] [--part bits | time] [--batch 1] [--rows 8192] [--steps 20]

1. The scripts of tests/support/distributed run with RANKS_DEVICE=cuda (NCCL, bfloat16): FSDP2 with codes and with values, bytes
   and reductions counted; compiled; tensor parallelism; a rank that is killed, and the run that goes on.
2. A step of two Llama-3-8B blocks (forward, backward, AdamW, scales) under FSDP2, compiled, gathered as bfloat16 and as codes,
   in turn: the median of `--steps` and their quotient, by recipe; the peak of memory; bytes sent in a step by the first rank.

Rows go to $OUT/distributed_PART.json where OUT is set. Exit status 1 where a script fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

import ao_lab
from tests.support.distributed.training.model import Traffic

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests/support/distributed"
RECIPES = ("tensorwise", "rowwise")
HIDDEN, HEADS, KEYS, INNER = 4096, 32, 8, 14336


def main() -> int:
    """All parts; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--part", choices=("bits", "time"), help="one of both parts alone")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.part != "time":
        rows += scripts(options.gpus)
    if options.part != "bits":
        rows += timed(options)
    text = json.dumps(rows, indent=1)
    print(text)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / f"distributed_{options.part or 'all'}.json").write_text(text)
    return int(not all(row.get("passed", True) for row in rows))


def scripts(gpus: int) -> list[dict[str, Any]]:
    """Whether each script of bits ends well."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = "training/checkpoint_ranks.py"
        runs = (
            ("training/fsdp_ranks.py", [], True),
            ("training/fsdp_ranks.py", ["tensorwise", "rowwise", "mxfp8"], True),
            ("training/tensor_parallel_ranks.py", [], True),
            (checkpoints, [folder, "backward", "2"], False),
            (checkpoints, [folder], True),
        )
        return [script(name, gpus, arguments, survives) for name, arguments, survives in runs]


def script(name: str, gpus: int, arguments: list[str], survives: bool) -> dict[str, Any]:
    """A run of a script; survives: whether it is to end well, or to be killed."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), str(gpus), *arguments],
        cwd=ROOT,
        env={**os.environ, "RANKS_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    passed = (done.returncode == 0) == survives
    if not passed:
        print(f"{name} {arguments} failed:\n{done.stdout[-500:]}\n{done.stderr[-4000:]}", flush=True)
    seconds = round(time.monotonic() - start, 1)
    return {"script": name, "arguments": arguments, "passed": passed, "seconds": seconds}


def timed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of part 2."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        mp.start_processes(measure, (options, str(rows)), nprocs=options.gpus, start_method="spawn")
        found: list[dict[str, Any]] = json.loads(rows.read_text())
        return found


def measure(rank: int, options: argparse.Namespace, path: str) -> None:
    """What each rank does; the first writes the rows."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29581")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=options.gpus)
    rows = [row for recipe in RECIPES for row in compare(recipe, options)]
    if rank == 0:
        Path(path).write_text(json.dumps(rows))
    dist.destroy_process_group()


def compare(recipe: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Steps of bfloat16, of the recipe with values gathered and with codes, in turn."""
    made = {name: Step(*kind, options) for name, kind in kinds(recipe).items()}
    for step in made.values():
        for _ in range(3):
            step.run()
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(options.steps):
        for name, step in made.items():
            times[name].append(step.timed())
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "recipe": recipe,
            "gathered": name,
            "ms": round(medians[name], 3),
            "over values": round(medians["values"] / medians[name], 4),
            "over bfloat16": round(medians["bfloat16"] / medians[name], 4),
            "bytes": made[name].bytes(),
            "peak": made[name].peak(),
        }
        for name in made
    ]


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

    def __init__(self, recipe: str | None, codes: bool, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.net = nn.Sequential(Block(), Block()).to(torch.bfloat16)
            self.x = torch.randn(options.batch, options.rows, HIDDEN, dtype=torch.bfloat16)
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


if __name__ == "__main__":
    sys.exit(main())
