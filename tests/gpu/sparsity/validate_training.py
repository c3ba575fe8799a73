"""Training with 2:4 weights on a GPU: sparse products exact on integers, layers by bits, times beside dense.

    PYTHONPATH=. python tests/gpu/sparsity/validate_training.py [--device cuda] [--no-times] [--seconds 90]
        [--products cusparselt,sparse_wgmma]

Integers whose sums are exact in float32 have one right result in any order of sums: outputs and gradients by cuSPARSELt and by
our own kernels (`--products` names them) are compared with products in float32, rounded once, bit for bit, ten times over.
Masks, SR-STE and activations are compared with the reference on the host.
Times are medians of single calls, all of them in turn in each round, of one linear layer
forward and backward with random data: torch's dense layer, masked with dense products, by cuSPARSELt with masks that stay
(compressed in both directions), and with masks found in the same call; then their parts. Kernels of masks are compiled by
processes of their own beforehand. Bits come first, then times; training.json in the folder $OUT, where that is set, is written
again after each group. After --seconds nothing new starts, and what was not compared is named. Exits with 1 where a bit differs
or a call raises, with 2 where not all was compared. --device cpu does what needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
import reference
from ao_lab.sparsity.training.layers import Rule, masked_linear, weight_gradient
from ao_lab.sparsity.training.masks import find_mask
from ao_lab.sparsity.training.products import masked
from tests.gpu.sparsity.products.training_timing import measure
from tests.gpu.sparsity.progress import Progress

HALVES = (torch.bfloat16, torch.float16)
#: (tokens, inputs, outputs): published; rows that are padded, several axes of tokens, the smallest.
TIMED = ((13008, 1024, 4096), (13008, 4096, 1024))
CHECKED = ((13008, 1024, 4096), (3, 64, 128), (1, 16, 16), (100, 48, 80), (0, 32, 32))

#: A label, what was made, and what is right.
Comparison = tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: str, most: int) -> torch.Tensor:
    """Random integers up to `most`: sums of their products are exact in float32."""
    return torch.randint(-most, most + 1, shape, device=device).to(dtype)


def products(
    device: str, dtype: torch.dtype, shape: tuple[int, int, int], transposable: bool, product: str
) -> Iterator[Comparison]:
    """Outputs and three gradients of one layer by a product."""
    tokens, k, n = shape
    x, g = (integers((tokens, width), dtype, device, 1) for width in (k, n))
    w, bias = integers((n, k), dtype, device, 2), integers((n,), dtype, device, 2)
    config = ao_lab.SparseTrainingConfig(masks="recomputed", transposable=transposable)
    mask = find_mask(w, config)
    rule = Rule("straight-through", 0.0, product, transposable)
    right = exact(x, masked(w, mask), bias, g)
    for again in range(10):
        yield f"call {again}", results(x, w, mask, bias, g, rule), right


def exact(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The output and three gradients by float32 products, which are exact, rounded once."""
    x32, w32, g32 = x.float(), w.float(), g.float()
    made = (x32 @ w32.t() + bias.float(), g32 @ w32, g32.t() @ x32, g32.sum(0))
    return tuple(t.to(x.dtype) for t in made)


def results(
    x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor, g: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, ...]:
    """The output, and gradients of input, weight and bias."""
    x, w, bias = (t.detach().requires_grad_() for t in (x, w, bias))
    y = masked_linear(x, w, mask, bias, rule)
    return (y.detach(), *torch.autograd.grad(y, (x, w, bias), g))


def rules(device: str, dtype: torch.dtype) -> Iterator[Comparison]:
    """Masks, SR-STE and activations beside the reference on the host."""
    w, g = torch.randn(256, 512).to(dtype), torch.randn(256, 512).to(dtype)
    there = w.to(device)
    for name in ("2:4", "1:4", "4:8"):
        config = ao_lab.SparseTrainingConfig(name, "recomputed")
        right = torch.as_tensor(reference.prune(w, pattern=name))
        yield f"mask {name} {dtype}", (find_mask(there, config),), (right,)
    config = ao_lab.SparseTrainingConfig(masks="recomputed", transposable=True)
    right = torch.as_tensor(reference.prune_transposable(w))
    yield f"mask transposable {dtype}", (find_mask(there, config),), (right,)
    mask = torch.as_tensor(reference.prune(w))
    for decay in (2e-4, 0.3):
        made = weight_gradient(g.to(device), there, mask.to(device), Rule("sr-ste", decay, "dense", False))
        yield (
            f"sr-ste {decay} {dtype}",
            (made,),
            (torch.as_tensor(reference.sr_ste_gradient(g, w, mask, decay=decay)),),
        )
    x, y = there.clone().requires_grad_(), w.clone().requires_grad_()
    both = [ao_lab.sparse_squared_relu(t) for t in (x, y)]
    made, right = (torch.autograd.grad(t, s, g.to(s.device))[0] for t, s in zip(both, (x, y), strict=True))
    yield (
        f"squared relu {dtype}",
        (both[0].detach(), made),
        (reference.squared_relu_24(w).values, right),
    )


def layers(device: str, product: str) -> Iterator[Comparison]:
    """Three steps of a model, compiled, beside eager; zeros where a fixed mask has them."""
    nets = []
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(device, torch.bfloat16)
        ao_lab.sparsify_(net, ao_lab.SparseTrainingConfig(products=product, transposable=True))
        nets.append(net)
    runs = (nets[0], torch.compile(nets[1], fullgraph=True, backend="aot_eager"))
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1) for net in nets]
    for step in range(3):
        x = torch.randn(40, 64, device=device, dtype=torch.bfloat16)
        for run, net, optimizer in zip(runs, nets, optimizers, strict=True):
            run(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ao_lab.step_sparsity_(net)
        ours, theirs = (tuple(p.detach() for p in net.parameters()) for net in nets)
        yield f"compiled, step {step}", ours, theirs
        weight = nets[0][0].weight.detach()
        dropped = weight[~nets[0][0].sparse_mask]
        yield f"pruned, step {step}", (dropped,), (torch.zeros_like(dropped),)


def groups(device: str, named: Sequence[str]) -> Iterator[tuple[str, Callable[[], Iterator[Comparison]]]]:
    """Comparisons by what they share, the smallest shapes first."""
    for dtype in (*HALVES, torch.float32):
        yield f"rules {dtype}", partial(rules, device, dtype)
    for shape in reversed(CHECKED if device == "cuda" else CHECKED[1:]):
        for dtype in HALVES:
            for transposable in (False, True):
                for product in named:
                    label = f"{product} {dtype} {shape}{' transposable' if transposable else ''}"
                    yield label, partial(products, device, dtype, shape, transposable, product)
    for product in dict.fromkeys(("dense", *named)):
        yield f"layers {product}", partial(layers, device, product)


def compare(progress: Progress, label: str, made: Callable[[], Iterator[Comparison]]) -> None:
    """One group."""
    for name, found, right in made():
        good = all(same(a, b) for a, b in zip(found, right, strict=True))
        progress.check(f"{label}, {name}", good, "bits differ")


#: Dtypes and shapes of weights that are compiled for: whole programs, and programs with edges.
COMPILED = [(dtype, (64, 128)) for dtype in (*HALVES, torch.float32)] + [
    (dtype, (16, 16)) for dtype in HALVES
]


def compile_one(job: tuple[torch.dtype, tuple[int, int]]) -> None:
    """Find a transposable mask, in a process of its own: the compiled kernel stays in Triton's folder."""
    dtype, shape = job
    config = ao_lab.SparseTrainingConfig(masks="recomputed", transposable=True)
    find_mask(torch.ones(shape, dtype=dtype, device="cuda"), config)


def compile_all(progress: Progress) -> None:
    """Compile side by side what takes seconds each; failures show again where a kernel is used."""
    with ProcessPoolExecutor(
        min(len(COMPILED), os.cpu_count() or 1), mp_context=get_context("spawn")
    ) as pool:
        failed = [
            str(one.exception())
            for one in [pool.submit(compile_one, job) for job in COMPILED]
            if one.exception()
        ]
    progress.say(f"{len(COMPILED)} kernels compiled, {len(failed)} not: {failed[:1]}")


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit but for the sign of zero: a product of nothing may be -0 in one library and +0 in the other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (torch.where(t == 0, torch.zeros_like(t), t) for t in (a.detach().to(b.device), b))
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


class Record:
    """What was found, written into $OUT as it comes."""

    def __init__(self, progress: Progress, device: str) -> None:
        self.progress = progress
        self.found: dict[str, Any] = {"torch": torch.__version__, "times": []}
        if device == "cuda":
            self.found["device"] = torch.cuda.get_device_name()
            self.found["cusparselt"] = torch.backends.cusparselt.version()

    def write(self, rows: list[dict[str, Any]] | None = None) -> None:
        """With further times."""
        self.found["times"] += rows or []
        self.found |= {
            "comparisons": self.progress.done,
            "differ": self.progress.wrong,
            "not compared": self.progress.left_out,
        }
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "training.json").write_text(json.dumps(self.found, indent=1))


def main(arguments: list[str] | None = None) -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument(
        "--products", type=lambda text: text.split(","), default=["cusparselt", "sparse_wgmma"]
    )
    parser.add_argument("--seconds", type=float, default=90.0, help="after these nothing new starts")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    # Partial sums of dense products are not to be rounded either.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    progress = Progress(options.seconds)
    if options.device == "cuda":
        compile_all(progress)
    record = Record(progress, options.device)
    named = options.products if options.device == "cuda" else ["dense"]
    for label, made in groups(options.device, named):
        progress.attempt(label, partial(compare, progress, label, made))
        record.write()
    progress.say("bits: " + ("all agreed" if not progress.wrong + progress.left_out else "see above"))
    for dtype in HALVES if options.device == "cuda" and not options.no_times else ():
        for shape in TIMED:
            one = partial(measure, progress, shape, dtype)
            progress.attempt(f"times {shape} {dtype}", lambda one=one: record.write(one()))
    record.write()
    return progress.verdict()


if __name__ == "__main__":
    raise SystemExit(main())
