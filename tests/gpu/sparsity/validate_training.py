"""Training with 2:4 weights on a GPU: products by cuSPARSELt exact on integers, layers by bits, times beside dense.

    PYTHONPATH=. python tests/gpu/sparsity/validate_training.py [--device cuda] [--no-times]

Integers whose sums are exact in float32 have one right result in any order of sums: outputs and gradients by cuSPARSELt are
compared with products in float32, rounded once, bit for bit, ten times over. Masks, SR-STE and activations are compared
with the reference on the host. Times are medians of single calls, all of them in turn in each round, of one linear layer
forward and backward with random data: torch's dense layer, masked with dense products, by cuSPARSELt with masks that stay
(compressed in both directions), and with masks found in the same call; then their parts. Prints all, writes training.json into
the folder $OUT where that is set, and exits with 1 where a bit differs. --device cpu does what needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import ao_lab
import reference
from ao_lab.sparsity.training.autograd import Rule, masked_linear, weight_gradient
from ao_lab.sparsity.training.masks import find_mask
from ao_lab.sparsity.training.products import masked

HALVES = (torch.bfloat16, torch.float16)
#: (tokens, inputs, outputs): published; rows that are padded, several axes of tokens, the smallest.
TIMED = ((13008, 1024, 4096), (13008, 4096, 1024))
CHECKED = ((13008, 1024, 4096), (3, 64, 128), (1, 16, 16), (100, 48, 80), (0, 32, 32))
ROUNDS, WARM = 15, 3

#: A label, what was made, and what is right.
Comparison = tuple[str, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: str, most: int) -> torch.Tensor:
    """Random integers up to `most`: sums of their products are exact in float32."""
    return torch.randint(-most, most + 1, shape, device=device).to(dtype)


def products(device: str) -> Iterator[Comparison]:
    """Outputs and three gradients of one layer; by cuSPARSELt on a GPU, by dense products on the host."""
    product = "cusparselt" if device == "cuda" else "dense"
    for dtype in HALVES:
        for tokens, k, n in CHECKED if device == "cuda" else CHECKED[1:]:
            for transposable in (False, True):
                x, g = (integers((tokens, width), dtype, device, 1) for width in (k, n))
                w, bias = integers((n, k), dtype, device, 2), integers((n,), dtype, device, 2)
                config = ao_lab.SparseTrainingConfig(masks="recomputed", transposable=transposable)
                mask = find_mask(w, config)
                rule = Rule("straight-through", 0.0, product, transposable)
                label = f"{product} {dtype} {(tokens, k, n)}{' transposable' if transposable else ''}"
                right = exact(x, masked(w, mask), bias, g)
                for again in range(10):
                    yield f"{label} {again}", results(x, w, mask, bias, g, rule), right


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


def rules(device: str) -> Iterator[Comparison]:
    """Masks, SR-STE and activations beside the reference on the host."""
    for dtype in (*HALVES, torch.float32):
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
            made = weight_gradient(
                g.to(device), there, mask.to(device), Rule("sr-ste", decay, "dense", False)
            )
            yield (
                f"sr-ste {decay} {dtype}",
                (made,),
                (torch.as_tensor(reference.sr_ste_gradient(g, w, mask, decay=decay)),),
            )
        x, y = there.clone().requires_grad_(), w.clone().requires_grad_()
        both = [ao_lab.sparse_squared_relu(t) for t in (x, y)]
        made, right = (
            torch.autograd.grad(t, s, g.to(s.device))[0] for t, s in zip(both, (x, y), strict=True)
        )
        yield (
            f"squared relu {dtype}",
            (both[0].detach(), made),
            (reference.squared_relu_24(w).values, right),
        )


def layers(device: str) -> Iterator[Comparison]:
    """Three steps of a model, compiled, beside eager; zeros where a fixed mask has them."""
    for product in ("dense", "cusparselt") if device == "cuda" else ("dense",):
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
            yield f"compiled {product}, step {step}", ours, theirs
            weight = nets[0][0].weight.detach()
            dropped = weight[~nets[0][0].sparse_mask]
            yield f"pruned {product}, step {step}", (dropped,), (torch.zeros_like(dropped),)


def compare(device: str) -> tuple[int, int]:
    """Comparisons, and those that differ."""
    done = wrong = 0
    for family in (rules, products, layers):
        for label, made, right in family(device):
            done += 1
            if not all(same(a, b) for a, b in zip(made, right, strict=True)):
                wrong += 1
                print(f"DIFFERS: {label}", flush=True)
    return done, wrong


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit but for the sign of zero: a product of nothing may be -0 in one library and +0 in the other."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (torch.where(t == 0, torch.zeros_like(t), t) for t in (a.detach().to(b.device), b))
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def calls(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """What is timed for one layer, by name."""
    tokens, k, n = shape
    x, g = (torch.randn(tokens, width, device="cuda", dtype=dtype) for width in (k, n))
    w = torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
    x.requires_grad_(), w.requires_grad_()
    config = ao_lab.SparseTrainingConfig(masks="recomputed", transposable=True)
    rows = ao_lab.SparseTrainingConfig(masks="recomputed")
    mask = find_mask(w, config)
    sparse = Rule("masked", 0.0, "cusparselt", True)
    one_way = Rule("masked", 0.0, "cusparselt", False)
    kept = masked(w.detach(), mask)
    turned, packed = kept.t().contiguous(), torch._cslt_compress(kept)
    packed_turned = torch._cslt_compress(turned)
    x0, g0 = x.detach(), g

    def both(call: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(call(), (x, w), g)

    return {
        "dense, forward and backward": both(lambda: F.linear(x, w)),
        "masked, dense products": both(
            lambda: masked_linear(x, w, mask, None, Rule("masked", 0.0, "dense", True))
        ),
        "cusparselt, transposable mask that stays": both(lambda: masked_linear(x, w, mask, None, sparse)),
        "cusparselt, transposable mask found": both(
            lambda: masked_linear(x, w, find_mask(w, config), None, sparse)
        ),
        "cusparselt, mask of rows found": both(
            lambda: masked_linear(x, w, find_mask(w, rows), None, one_way)
        ),
        "find mask of rows": lambda: find_mask(w, rows),
        "find transposable mask": lambda: find_mask(w, config),
        "mask and compress both ways": lambda: (
            torch._cslt_compress(masked(w.detach(), mask)),
            torch._cslt_compress(masked(w.detach().t(), mask.t()).contiguous()),
        ),
        "compress one way": lambda: torch._cslt_compress(kept),
        "output, dense": lambda: F.linear(x0, kept),
        "output, compressed": lambda: torch._cslt_sparse_mm(packed, x0.t(), transpose_result=True),
        "input gradient, dense": lambda: g0.mm(kept),
        "input gradient, compressed": lambda: torch._cslt_sparse_mm(
            packed_turned, g0.t(), transpose_result=True
        ),
        "weight gradient": lambda: g0.t().mm(x0),
    }


def measure(shape: tuple[int, int, int], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Medians in milliseconds, with 20 and 80 % quantiles."""
    named = calls(shape, dtype)
    took: dict[str, list[float]] = {name: [] for name in named}
    for turn in range(WARM + ROUNDS):
        for name, call in named.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= WARM:
                took[name].append(start.elapsed_time(end))
    found = []
    dense = statistics.median(took["dense, forward and backward"])
    for name, times in took.items():
        fifths = statistics.quantiles(times, n=5)
        middle = statistics.median(times)
        row = {
            "shape": shape,
            "dtype": str(dtype),
            "call": name,
            "ms": middle,
            "low": fifths[0],
            "high": fifths[-1],
        }
        found.append(row | {"dense / this": dense / middle})
        print(f"{shape} {dtype} {name}: {middle:.4f} ms, {dense / middle:.2f}x of dense", flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--no-times", action="store_true")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    # Partial sums of dense products are not to be rounded either.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    done, wrong = compare(options.device)
    print(f"{done} comparisons, {wrong} differ", flush=True)
    record: dict[str, Any] = {"comparisons": done, "differ": wrong, "torch": torch.__version__, "times": []}
    if options.device == "cuda":
        record["device"] = torch.cuda.get_device_name()
        record["cusparselt"] = torch.backends.cusparselt.version()
        if not options.no_times:
            record["times"] = [row for dtype in HALVES for shape in TIMED for row in measure(shape, dtype)]
    if os.environ.get("OUT"):
        (Path(os.environ["OUT"]) / "training.json").write_text(json.dumps(record, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
