"""Training steps of layers on a GPU: prepared ones with the bits of the general way under every way of calling them, steps on
dequantized values beside steps on codes, SwiGLU with the layer behind it as one step.

Of a prepared step output and gradients of the third step of a layer against those of the same layer with nothing prepared:
three- dimensional inputs, biases, both 16-bit dtypes, output gradients that do not lie in rows or begin at odd addresses,
layers with one input, several layers before one backward, CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import ao_lab
import fast
from ao_lab.training import autograd
from ao_lab.training import reuse as steps
from ao_lab.training.autograd import training_linear
from ao_lab.training.fused_modules import swiglu_linear
from ao_lab.training.products import PRODUCTS
from reference.training.recipe import RECIPES, Product
from tests.gpu.harness.subject import Asked, Check, Row, Subject, same_bits
from tests.gpu.harness.timing import launched

Tensors = list[torch.Tensor]
HALVES = (torch.bfloat16, torch.float16)
NAMES = ("tensorwise", "rowwise")
SHAPES = (((256,), 384, 128), ((2, 1024), 1024, 512), ((4096,), 1024, 2048))
#: How the output's gradient lies.
GRADIENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in rows": lambda g: g,
    "one number for all": lambda g: g[..., :1].mean().expand(g.shape),
    "in columns": lambda g: g.transpose(0, -1).contiguous().transpose(0, -1),
    "at an odd address": lambda g: torch.cat([g.flatten()[:1], g.flatten()])[1:].view(g.shape),
}
#: Recipes whose steps are on values.
BY_VALUES = ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "blockwise")


def nothing_prepared() -> AbstractContextManager[Any]:
    """The general way."""
    return mock.patch.object(autograd, "prepared_step", return_value=None)


def operands(shape: tuple[Any, ...], dtype: torch.dtype, bias: bool) -> Tensors:
    """x, w, perhaps a bias, and the output's gradient."""
    leading, k, n = shape
    draw: Any = {"generator": torch.Generator("cuda").manual_seed(k + n), "device": "cuda", "dtype": dtype}
    x, w = torch.randn(*leading, k, **draw), torch.randn(n, k, **draw) / 30
    x.view(-1, k)[3] = 0
    given = [x, w] + [torch.randn(n, **draw)] * bias
    return [*(t.requires_grad_() for t in given), torch.randn(*leading, n, **draw)]


def step(name: str, given: Tensors, kernel: str = "auto", *, tuned: bool = True) -> Tensors:
    """Output and gradients."""
    *leaves, g = given
    x, w, *bias = leaves
    y = training_linear(x, w, bias[0] if bias else None, RECIPES[name], kernel, tuned=tuned)
    return [y.detach(), *torch.autograd.grad(y, leaves, g)]


def general(name: str, given: Tensors) -> Tensors:
    """The same with nothing prepared."""
    with nothing_prepared():
        return step(name, given)


def unlike(label: str, found: Tensors, wanted: Tensors) -> Iterator[str]:
    """A line where bits differ."""
    if not all(map(same_bits, found, wanted)):
        yield f"{label} differs"


def wrong_steps(name: str, shape: Any, dtype: torch.dtype, bias: bool) -> Iterator[str]:
    """One layer after the other."""
    given = operands(shape, dtype, bias)
    wanted = general(name, given)
    for turn in range(3):
        yield from unlike(f"step {turn}", step(name, given), wanted)
    if not any(isinstance(one, steps.Step) for one in steps._steps.values()):
        yield "nothing was prepared"
    for how, lay in GRADIENTS.items():
        other = [*given[:-1], lay(given[-1])]
        yield from unlike(f"gradient {how}", step(name, other), general(name, other))
    steps.forget()


def wrong_shared(name: str) -> Iterator[str]:
    """Three layers with one input, whose outputs are added; then each alone."""
    x, w, g = operands(SHAPES[1], torch.bfloat16, False)
    weights = [(w.detach() * factor).requires_grad_() for factor in (1.0, -2.0, 3.0)]

    def run() -> Tensors:
        given = x + 0  # inputs that a graph computed share their cast
        y: Any = sum(training_linear(given, one, None, RECIPES[name]) for one in weights)
        return [y.detach(), *torch.autograd.grad(y, [x, *weights], g)]

    with nothing_prepared():
        wanted = run()
    for at in range(3):
        yield from unlike(f"step {at}", run(), wanted)


def wrong_graph(name: str) -> Iterator[str]:
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
    wanted = general(name, given)
    for one in made:
        one.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    yield from unlike("a graph on other numbers", made, wanted)


def wrong_functions() -> Iterator[str]:
    """Products under powers of two have the same bits by both functions that compute them, as `BRIEF` supposes."""
    scheme = RECIPES["rowwise"].output.a.scheme
    for m, n, k in (
        (2048, 1024, 1024),
        (4096, 2048, 1024),
        (1024, 1024, 2048),
        (128, 128, 8192),
        (2048, 4096, 1024),
    ):
        for dtype in HALVES:
            rows = (
                torch.randn(count, k, device="cuda", dtype=dtype) * torch.rand(count, 1, device="cuda")
                for count in (m, n)
            )
            a, b = (fast.quantize(one.to(dtype), scheme) for one in rows)
            for bias in (None, torch.randn(n, device="cuda", dtype=dtype)):
                for sums in ("fast", "precise"):
                    rule = Product(accumulation=sums)
                    one, other = (
                        PRODUCTS[name].run(a, b, rule, dtype, bias) for name in ("codes", "scaled_mm")
                    )
                    if not torch.equal(one, other):
                        yield f"{m} {n} {k} {dtype} {sums} bias {bias is not None}: {int((one != other).sum())} differ"


def on_codes() -> AbstractContextManager[Any]:
    """Steps by `TrainingLinear`, whichever recipe it is."""
    return mock.patch.object(autograd, "serves", return_value=False)


def value_operands(m: int, k: int, n: int) -> Tensors:
    """Of a step on values or codes."""
    x, w, g = (torch.randn(shape, device="cuda").bfloat16() for shape in ((m, k), (n, k), (m, n)))
    return [x.requires_grad_(), (w / 50).requires_grad_(), g]


def wrong_values(name: str) -> Iterator[str]:
    """The same output and, but for the order of sums, gradients as `TrainingLinear` on dequantized operands."""
    given = value_operands(1024, 512, 768)
    with mock.patch.object(autograd, "new_seed", return_value=7):
        found = step(name, given, "dequantize", tuned=False)
        with on_codes():
            wanted = step(name, given, "dequantize", tuned=False)
    far = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(found, wanted, strict=True)
    ]
    if max(far) > 2e-3:
        yield f"a step is off by {far}"


def wrong_swiglu(name: str, shape: tuple[int, int, int], compiled: bool) -> Iterator[str]:
    """Output and gradients of `swiglu_linear` beside those of `fast.swiglu` followed by the layer."""
    m, k, n = shape
    torch.manual_seed(0)
    down = nn.Sequential(nn.Linear(k, n, bias=True, device="cuda", dtype=torch.bfloat16))
    ao_lab.convert_for_training_(down, name)
    layer = down[0]
    gate, up = (torch.randn(2, m // 2, k, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    g = torch.randn(2, m // 2, n, device="cuda").bfloat16()
    leaves = [gate, up, layer.weight, layer.bias]
    run = torch.compile(swiglu_linear, fullgraph=True, dynamic=False) if compiled else swiglu_linear
    made = run(gate, up, layer), layer(fast.swiglu(gate, up))
    found, wanted = ([y.detach(), *torch.autograd.grad(y, leaves, g)] for y in made)
    yield from unlike(type(made[0].grad_fn).__name__, found, wanted)


def checks(asked: Asked) -> Iterator[Check]:
    """Prepared steps, steps on values, fused ones."""
    yield "products by both functions", wrong_functions
    for name in NAMES:
        for shape in SHAPES:
            for dtype in HALVES:
                for bias in (False, True):
                    yield (
                        f"{name} {shape} {dtype} bias {bias}",
                        partial(wrong_steps, name, shape, dtype, bias),
                    )
        yield f"{name} layers with one input", partial(wrong_shared, name)
        yield f"{name} graph", partial(wrong_graph, name)
    for name in BY_VALUES:
        yield f"{name} on values", partial(wrong_values, name)
    #: Whole tiles; and fewer rows than a tile.
    for shape in ((512, 1024, 256), (128, 256, 384)):
        for name in (name for name, recipe in RECIPES.items() if not recipe.is_stochastic):
            yield f"swiglu {name} {shape}", partial(wrong_swiglu, name, shape, False)
    for name in ("rowwise", "rowwise_with_gw_hp", "mxfp8"):
        yield f"swiglu {name} compiled", partial(wrong_swiglu, name, (512, 1024, 256), True)


def times(asked: Asked) -> Iterator[Row]:
    """Steps beside torch's in bfloat16, on values and on codes."""
    for m, k, n in asked.shapes or ((16384, 4096, 14336),):
        x, w, g = value_operands(m, k, n)

        def codes(name: str, given: Tensors) -> Tensors:
            with on_codes():
                return step(name, given, tuned=False)

        calls: dict[str, Callable[[], Any]] = {
            "bf16": lambda x=x, w=w, g=g: torch.autograd.grad(torch.nn.functional.linear(x, w), (x, w), g)
        }
        for name in asked.schemes or BY_VALUES:
            calls[f"{name} on values"] = partial(step, name, [x, w, g], "dequantize", tuned=False)
            calls[f"{name} on codes"] = partial(codes, name, [x, w, g])
        yield {"shape": (m, k, n), **launched(calls)}


SUBJECTS = (
    Subject(
        "training_steps", "steps of training layers: prepared, on values, fused with SwiGLU", checks, times
    ),
)
