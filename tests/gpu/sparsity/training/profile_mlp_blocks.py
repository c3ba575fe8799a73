"""MLP blocks of SAM's ViT-L in training on a GPU, compiled, dense and 2:4 by our own kernels: where a step's time goes.

    PYTHONPATH=. python tests/gpu/sparsity/training/profile_mlp_blocks.py [--blocks 6] [--batch 8] [--rounds 7]

A block is what a ViT-L block has of an MLP: x + lin2(gelu(lin1(norm(x)))), at the rows of the step that is measured
(`experiments.sparsity.encoders`: 64 x 64 patches an image), float16, each block compiled by itself, masks found anew in
each step. Printed are for both sides the MB that forward keeps and the peak of memory beside what was there before,
microseconds that a block takes of a step (CUDA graphs, medians of rounds in turn), what the step of all of ViT-L would save,
and the kernels that torch's profiler saw, by microseconds of a block, at the clocks of a GPU that was idle before. Exits with 1
where a sparse block's output differs from that of its masked weights in float32 by more than float16 explains.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

import ao_lab
from experiments.models.encoders import VIT_L, SamMlp, is_mlp
from tests.gpu.sparsity.training.column_sums import replayed
from tests.gpu.sparsity.training.profile_training_layer import graph_of

Step = Callable[[], object]
PROFILED, LIMIT = 3, 4e-3


class MlpBlock(nn.Module):
    """The second half of a `SamBlock`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(VIT_L.width, eps=1e-6), SamMlp(VIT_L.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


def model_of(blocks: int, sparse: bool) -> nn.Sequential:
    """Blocks with the weights of a seed; dense, or with 2:4 layers."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(*(MlpBlock() for _ in range(blocks))).half()
    if sparse:
        config = ao_lab.SparseTrainingConfig(
            masks="recomputed", transposable=True, gradient="straight-through", products="sparse_wgmma"
        )
        ao_lab.sparsify_(model, config, is_mlp)
    return model


def step_of(model: nn.Sequential, batch: int, sparse: bool) -> Step:
    """Forward and backward without an optimizer, as in the measured step."""
    shape = (batch, VIT_L.side, VIT_L.side, VIT_L.width)
    x, g = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(2))
    x.requires_grad_()
    for block in model:
        block.compile()

    def step() -> None:
        model(x).backward(g)
        model.zero_grad(set_to_none=True)
        x.grad = None
        if sparse:
            ao_lab.step_sparsity_(model)

    return step


def microseconds(steps: dict[str, Step], blocks: int, rounds: int) -> dict[str, float]:
    """Of a block by side: medians of replays of steps in CUDA graphs, in turn; launched one by one, few blocks wait for the
    host."""
    graphs = {name: graph_of(step)[0] for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(replayed(graph) / blocks)
    return {name: statistics.median(found) for name, found in times.items()}


def memory(model: nn.Sequential, step: Step, batch: int) -> tuple[float, float]:
    """MB that forward keeps for backward, and that a step has at its peak beside what was there before."""
    shape = (batch, VIT_L.side, VIT_L.side, VIT_L.width)
    x = torch.randn(shape, device="cuda", dtype=torch.float16, requires_grad=True)
    before = torch.cuda.memory_allocated()
    y = model(x)
    kept = torch.cuda.memory_allocated() - before
    del x, y
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return kept / 1e6, (torch.cuda.max_memory_allocated() - before) / 1e6


def kernels(step: Step, blocks: int) -> list[tuple[float, float, str]]:
    """Microseconds and launches of a block, by name, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    each = PROFILED * blocks
    events = [one for one in seen.key_averages() if str(one.device_type).endswith("CUDA")]
    rows = [(one.self_device_time_total / each, one.count / each, one.key[:96]) for one in events]
    return sorted(rows, reverse=True)


def error() -> float:
    """Of a sparse block's output beside that of its masked weights in float32, relative to its size."""
    block = model_of(1, sparse=True)[0]
    mlp, x = block.mlp, torch.randn(4096, VIT_L.width, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        found = torch.compile(mlp)(x).float()
        first, second = (
            torch.where(layer.sparse_mask, layer.weight, 0).float() for layer in (mlp.lin1, mlp.lin2)
        )
        inner = nn.functional.gelu(nn.functional.linear(x.float(), first, mlp.lin1.bias.float()))
        right = nn.functional.linear(inner, second, mlp.lin2.bias.float())
    return float((found - right).norm() / right.norm())


def main() -> int:
    """Both sides in turn, then each one's kernels."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    steps = {}
    for name, sparse in (("dense", False), ("2:4", True)):
        model = model_of(options.blocks, sparse)
        steps[name] = step_of(model, options.batch, sparse)
        steps[name]()
        kept, peak = memory(model, steps[name], options.batch)
        print(f"{name}: forward keeps {kept:.1f} MB, a step's peak is {peak:.1f} MB", flush=True)
    times = microseconds(steps, options.blocks, options.rounds)
    for name, each in times.items():
        print(f"{name}: a block {each:.0f} us", flush=True)
    saved = (times["dense"] - times["2:4"]) * VIT_L.layers / 1e3
    print(
        f"{times['dense'] / times['2:4']:.4f} times dense; ViT-L's step would save {saved:.2f} ms", flush=True
    )
    for name, step in steps.items():
        rows = kernels(step, options.blocks)
        print(f"== {name}: kernels {sum(row[0] for row in rows):.0f} us a block", flush=True)
        for spent, launched, key in rows[:24]:
            print(f"  {spent:8.1f} us {launched:5.1f} x {key}", flush=True)
    off = error()
    print(f"a block's output is {off:.1e} of its size off (limit {LIMIT})", flush=True)
    return int(not off <= LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
