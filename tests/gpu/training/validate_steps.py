"""Prepared training steps on a GPU: the bits of the general way, under every way of calling them.

    PYTHONPATH=. python tests/gpu/training/validate_steps.py

Output and gradients of the third step of a layer (prepared) against those of the same layer with nothing prepared: three-
dimensional inputs, biases, both 16-bit dtypes, output gradients that do not lie in rows or begin at odd addresses, layers with
one input, several layers before one backward, CUDA graphs. Prints what differs and exits with 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from ao_lab.training import autograd
from ao_lab.training import reuse as steps
from ao_lab.training.autograd import training_linear
from ao_lab.training.products import PRODUCTS
from reference.training import RECIPES
from reference.training.recipe import Product

Tensors = list[torch.Tensor]
GENERAL = lambda *call: None  # noqa: E731
FIND = autograd.prepared_step
NAMES = ("tensorwise", "rowwise")
SHAPES = (((256,), 384, 128), ((2, 1024), 1024, 512), ((4096,), 1024, 2048))
#: How the output's gradient lies.
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in rows": lambda g: g,
    "one number for all": lambda g: g[..., :1].mean().expand(g.shape),
    "in columns": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
    "at an odd address": lambda g: torch.cat([g.flatten()[:1], g.flatten()])[1:].view(g.shape),
}


def operands(shape: tuple[Any, ...], dtype: torch.dtype, bias: bool) -> Tensors:
    """x, w, perhaps a bias, and the output's gradient."""
    leading, k, n = shape
    generator = torch.Generator("cuda").manual_seed(k + n)
    draw = {"generator": generator, "device": "cuda", "dtype": dtype}
    x, w = torch.randn(*leading, k, **draw), torch.randn(n, k, **draw) / 30
    x.view(-1, k)[3] = 0
    given = [x, w] + [torch.randn(n, **draw)] * bias
    return [*(t.requires_grad_() for t in given), torch.randn(*leading, n, **draw)]


def step(name: str, given: Tensors) -> Tensors:
    """Output and gradients."""
    *leaves, g = given
    x, w, *bias = leaves
    y = training_linear(x, w, bias[0] if bias else None, RECIPES[name])
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def general(name: str, given: Tensors) -> Tensors:
    """The same with nothing prepared."""
    autograd.prepared_step = GENERAL
    try:
        return step(name, given)
    finally:
        autograd.prepared_step = FIND


def same(found: Tensors, expected: Tensors) -> bool:
    """Whether bits are the same."""
    return all(
        torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(found, expected, strict=True)
    )


def check_steps() -> list[str]:
    """One layer after the other."""
    wrong = []
    for name in NAMES:
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float16):
                for bias in (False, True):
                    given = operands(shape, dtype, bias)
                    expected = general(name, given)
                    for turn in range(3):
                        if not same(step(name, given), expected):
                            wrong.append(f"{name} {shape} {dtype} bias {bias}: step {turn}")
                    if not any(isinstance(one, steps.Step) for one in steps._steps.values()):
                        wrong.append(f"{name} {shape} {dtype} bias {bias}: nothing was prepared")
                    for how, lay in GRADIENTS.items():
                        turned = [*given[:-1], lay(given[-1])]
                        if not same(step(name, turned), general(name, turned)):
                            wrong.append(f"{name} {shape} {dtype} bias {bias}: gradient {how}")
                    steps.forget()
    return wrong


def check_shared(name: str) -> list[str]:
    """Three layers with one input, whose outputs are added; then each alone."""
    x, w, g = operands(SHAPES[1], torch.bfloat16, False)
    weights = [(w.detach() * factor).requires_grad_() for factor in (1.0, -2.0, 3.0)]

    def run() -> Tensors:
        given = x + 0  # inputs that a graph computed share their cast
        y = sum(training_linear(given, one, None, RECIPES[name]) for one in weights)
        return [y.detach(), *torch.autograd.grad(y, [x, *weights], g)]

    autograd.prepared_step = GENERAL
    expected = run()
    autograd.prepared_step = FIND
    found = [run() for _ in range(3)]
    return [
        f"{name}: layers with one input, step {at}" for at, one in enumerate(found) if not same(one, expected)
    ]


def check_graph(name: str) -> list[str]:
    """A graph of a prepared step, replayed on other numbers."""
    given = operands(SHAPES[1], torch.bfloat16, True)
    for _ in range(3):
        step(name, given)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(name, given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step(name, given)
    with torch.no_grad():
        given[0].mul_(-3), given[-1].mul_(0.5)
    expected = general(name, given)
    for one in made:
        one.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    return [] if same(made, expected) else [f"{name}: a graph on other numbers"]


def check_brief() -> list[str]:
    """Products under powers of two have the same bits by both functions that compute them, as `BRIEF` supposes."""
    wrong, scheme = [], RECIPES["rowwise"].output.a.scheme
    for m, n, k in (
        (2048, 1024, 1024),
        (4096, 2048, 1024),
        (1024, 1024, 2048),
        (128, 128, 8192),
        (2048, 4096, 1024),
    ):
        for dtype in (torch.bfloat16, torch.float16):
            x, w = (
                torch.randn(rows, k, device="cuda", dtype=dtype) * torch.rand(rows, 1, device="cuda")
                for rows in (m, n)
            )
            a, b = (fast.quantize(one.to(dtype), scheme) for one in (x, w))
            for bias in (None, torch.randn(n, device="cuda", dtype=dtype)):
                for sums in ("fast", "precise"):
                    made = [
                        PRODUCTS[name].run(a, b, Product(accumulation=sums), dtype, bias)
                        for name in ("codes", "scaled_mm")
                    ]
                    apart = int((made[0] != made[1]).sum())
                    if apart:
                        wrong.append(
                            f"{m} {n} {k} {dtype} {sums} bias {bias is not None}: {apart} of {m * n} differ"
                        )
    return wrong


def main() -> int:
    """Run all parts, print what differs."""
    wrong = check_brief() + check_steps()
    for name in NAMES:
        wrong += check_shared(name) + check_graph(name)
    print("\n".join(wrong) or "all steps agree", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
