"""Gradients of RMSNorm and SwiGLU and rotary embedding on a GPU: bits beside the reference's, times beside torch's.

    python -m tests.gpu.training.validate_layers [--no-times]

Prints every comparison that fails, how many there were, and medians in milliseconds. Fails where a bit differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fast
from experiments.models.llama import apply_rotary
from fast.layers.attention import rotary
from fast.layers.gradients import rms_norm_vjp, swiglu_vjp
from reference.layers import normalize as specified_normalize
from reference.layers import rotary as specified_rotary
from reference.layers import swiglu as specified_swiglu

HALVES = (torch.bfloat16, torch.float16)
DTYPES = (*HALVES, torch.float32)
#: In registers with and without filling, one element, pieces that end early, sums in two launches, rows that no kernel takes.
NORM_SHAPES = ((64, 256), (35, 4096), (5, 14336), (3, 16384), (33, 5120), (2, 5, 160), (33, 1), (7, 3), (9000, 128),
               (256,), (2, 20000))  # fmt: skip
HEAD_SHAPES = (
    (2, 32, 64, 128),
    (2, 8, 64, 128),
    (1, 3, 7, 10),
    (2, 5, 9, 80),
    (1, 1, 3, 2),
    (1, 130, 5, 256),
)
NORM_TIMES = ((16384, 4096), (2048, 4096), (16384, 5120), (16384, 8192), (8192, 16384))
ROUNDS = 11

#: A label, what was made, and what is right.
Comparison = tuple[str, tuple[Tensor, ...], tuple[Tensor, ...]]


def norms() -> Iterator[Comparison]:
    """`rms_norm_vjp`: numbers whose magnitudes differ, so that another order of the sums shows."""
    for dtype in DTYPES:
        for shape in NORM_SHAPES:
            x, g, more = (torch.randn(shape).mul(torch.randn(shape).exp()).to(dtype) for _ in range(3))
            w = torch.randn(shape[-1:]).to(dtype)
            for other in (None, more):
                there = None if other is None else other.cuda()
                got = rms_norm_vjp(g.cuda(), x.cuda(), w.cuda(), eps=1e-5, residual_grad=there)
                wanted = specified_normalize.rms_norm_vjp(g, x, w, eps=1e-5, residual_grad=other)
                yield f"rms_norm_vjp {dtype} {shape}", got, wanted


def gates() -> Iterator[Comparison]:
    """`swiglu_vjp`: every gate, beside ones and beside random patterns; halves of a matrix."""
    for dtype in HALVES:
        gate = torch.arange(65536).to(torch.int16).view(dtype).reshape(256, 256)
        for turn in range(6):
            order = [torch.randperm(65536) for _ in range(2)]
            g, up = (gate.flatten()[o].reshape(256, 256) if turn else torch.ones_like(gate) for o in order)
            got = swiglu_vjp(g.cuda(), gate.cuda(), up.cuda())
            yield f"swiglu_vjp {dtype} {turn}", got, specified_swiglu.swiglu_vjp(g, gate, up)
        both, g = torch.randn(65, 2 * 14336).to(dtype), torch.randn(65, 14336).to(dtype)
        halves, placed = both.chunk(2, -1), both.cuda().chunk(2, -1)
        wanted = specified_swiglu.swiglu_vjp(g, *(half.contiguous() for half in halves))
        yield f"swiglu_vjp {dtype} halves", swiglu_vjp(g.cuda(), *placed), wanted


def heads() -> Iterator[Comparison]:
    """`rotary`: views of (B, T, H, D) and heads in rows of their own, both ways, not-finite elements."""
    for dtype in DTYPES:
        for batch, count, length, width in HEAD_SHAPES:
            x = torch.randn(batch, length, count, width).to(dtype)
            x[0, 0, 0, :2] = torch.tensor([float("nan"), -0.0])
            c, s = (torch.randn(length, width).to(dtype) for _ in range(2))
            for view in (x.transpose(1, 2), x.transpose(1, 2).contiguous()):
                there = x.cuda().transpose(1, 2) if not view.is_contiguous() else view.cuda()
                for inverse in (False, True):
                    wanted = specified_rotary.rotary(view.contiguous(), c, s, inverse=inverse)
                    got = rotary(there, c.cuda(), s.cuda(), inverse=inverse)
                    yield f"rotary {dtype} {tuple(view.shape)} {inverse}", (got,), (wanted,)


def differing(comparisons: Iterator[Comparison]) -> int:
    """How many of them have other bits."""
    count = bad = 0
    for label, got, wanted in comparisons:
        for one, other in zip(got, wanted, strict=True):
            bits = [t.cpu().contiguous().view(torch.uint8) for t in (one, other)]
            count += 1
            if not torch.equal(*bits):
                bad += 1
                print(f"different: {label}")
    print(f"compared {count}, different {bad}")
    return bad


def milliseconds(calls: dict[str, Callable[[], Any]]) -> str:
    """Medians, one call after the other in each round, queued behind a wait so that the host does not show."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 2):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn > 1:
                times[name].append(begin.elapsed_time(end))
    return "  ".join(f"{name} {median(values):.3f}" for name, values in times.items())


def numbers(*shape: int) -> Tensor:
    """Normal bfloat16 numbers on the device."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def show_times() -> None:
    """Each kernel beside torch's and beside a copy of x."""
    for rows, length in NORM_TIMES:
        x, g, w = numbers(rows, length), numbers(rows, length), numbers(length)
        leaves, y = (x.clone().requires_grad_(), w.clone().requires_grad_()), torch.empty_like(x)
        out = functional.rms_norm(leaves[0], (length,), leaves[1], 1e-5)
        calls = {
            "copy": lambda y=y, x=x: y.copy_(x),
            "forward": lambda x=x, w=w: fast.rms_norm(x, w, eps=1e-5),
            "torch": lambda x=x, w=w: functional.rms_norm(x, w.shape, w, 1e-5),
            "backward": lambda g=g, x=x, w=w: rms_norm_vjp(g, x, w, eps=1e-5),
            "torch's": lambda out=out, leaves=leaves, g=g: torch.autograd.grad(
                out, leaves, g, retain_graph=True
            ),
        }
        print(f"rms_norm {rows}x{length}  {milliseconds(calls)}")
    gate, up, g = (numbers(16384, 14336) for _ in range(3))
    leaves, y = (gate.clone().requires_grad_(), up.clone().requires_grad_()), torch.empty_like(g)
    out = functional.silu(leaves[0]) * leaves[1]
    calls = {
        "copy": lambda: y.copy_(g),
        "forward": lambda: fast.swiglu(gate, up),
        "torch": lambda: functional.silu(gate) * up,
        "backward": lambda: swiglu_vjp(g, gate, up),
        "torch's": lambda: torch.autograd.grad(out, leaves, g, retain_graph=True),
    }
    print(f"swiglu 16384x14336  {milliseconds(calls)}")
    for count in (32, 8):
        show_rotary(count)


def show_rotary(count: int) -> None:
    """Heads of Llama-3-8B."""
    x = numbers(2, 8192, count, 128).transpose(1, 2)
    c, s, g, leaf = numbers(8192, 128), numbers(8192, 128), torch.randn_like(x), x.clone().requires_grad_()
    out, y, rows = apply_rotary(leaf, c, s), torch.empty_like(x), g.contiguous()
    calls = {
        "copy": lambda: y.copy_(x),
        "forward": lambda: rotary(x, c, s),
        "torch": lambda: apply_rotary(x, c, s),
        "backward": lambda: rotary(g, c, s, inverse=True),
        "of rows by head": lambda: rotary(rows, c, s, inverse=True),
        "torch's": lambda: torch.autograd.grad(out, leaf, g, retain_graph=True),
    }
    print(f"rotary of {count} heads  {milliseconds(calls)}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-times", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    bad = sum(differing(kind()) for kind in (norms, gates, heads))
    if not asked.no_times:
        show_times()
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
