"""Layers with preshuffled weights on a GPU, as `quantize_` makes them: bits of parts and products, programs, graphs, states,
moves and memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from ao_lab import SchemeConfig, quantize_, quantized
from ao_lab.config.recipe import named
from ao_lab.gemm.select import select_kernel
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, outside

DEVICE = "cuda"
#: Schemes, and those of which whole programs are compiled.
NAMES = (
    "int4_g128",
    "int4_g128_asymmetric",
    "int4_g32",
    "int8_rowwise",
    "int8_g128",
    "fp8_rowwise",
    "fp8_tensorwise",
    "mxfp4",
    "nvfp4",
    "mxfp8_e4m3",
)
COMPILED = ("int4_g128", "int8_rowwise", "nvfp4")
#: Out and in features: N and K that a program has parts of, and not.
SHAPE, SMALL = (2048, 1024), (384, 640)
ROWS = (1, 2, 16, 64, 128, 129, 300)
BF16, LAYOUT = torch.bfloat16, "preshuffled"
#: Bytes more than those of the plain weight.
MEMORY = 1.06


def layer(name: str, shape: tuple[int, int]) -> tuple[nn.Linear, torch.Tensor]:
    """A layer as `quantize_` leaves it, and its dense weight before."""
    torch.manual_seed(0)
    made = nn.Linear(shape[1], shape[0], dtype=BF16, device=DEVICE)
    dense = made.weight.detach().clone()
    quantize_(made, SchemeConfig(scheme=name))
    return made, dense


def same_parts(first: QuantizedTensor, second: QuantizedTensor) -> bool:
    """Whether two weights are stored alike, to the bit."""
    pairs = [(first.parts[part], second.parts[part]) for part in first.parts]
    alike = all(
        a is b or (a is not None and b is not None and torch.equal(a.cpu(), b.cpu())) for a, b in pairs
    )
    return alike and first.meta == second.meta


def wrong_of(name: str) -> Iterator[str]:
    """What is wrong with layers of a scheme."""
    for shape in (SHAPE, SMALL):
        made, dense = layer(name, shape)
        weight: QuantizedTensor = made.weight.detach()  # type: ignore[assignment]
        if weight.meta.layout != LAYOUT or select_kernel(weight.transposed(), BF16) != "fused":
            yield f"{name} {shape}: {weight!r} is not what quantize_ chooses"
            continue
        plain = quantized(dense, name)
        if not same_parts(weight.to_layout("plain"), plain):
            yield f"{name} {shape}: parts do not come back"
        if not torch.equal(weight.dequantize(), plain.dequantize()):
            yield f"{name} {shape}: dequantize has other bits"
        for found in (*products(made, plain), *exact(name, shape), *moves(made, plain)):
            yield f"{name} {shape}: {found}"


def products(made: nn.Linear, plain: QuantizedTensor) -> Iterator[str]:
    """Of random numbers: within the bound, the same bits twice; of many rows, those of the dequantized weight."""
    for count in ROWS:
        x = torch.randn((count, plain.shape[1]), dtype=BF16, device=DEVICE)
        with torch.no_grad():
            y = made(x)
            if not torch.equal(y, made(x)):
                yield f"{count} rows have other bits the second time"
        if count > 128:
            if not torch.equal(y, functional.linear(x, plain.dequantize(), made.bias)):
                yield f"{count} rows are not those of the dequantized weight"
        elif bad := outside(y, x, plain.quantized, made.bias.detach()):
            yield f"{count} rows: {bad} outside the bound"
    x = torch.randn((6, plain.shape[1]), dtype=torch.float32, device=DEVICE)
    with torch.no_grad():
        if not torch.equal(
            functional.linear(x, made.weight), functional.linear(x, plain.dequantize(x.dtype))
        ):
            yield "float32 inputs are not multiplied by the dequantized weight"
    index = torch.tensor([5, 0, 17], device=DEVICE)
    if not torch.equal(functional.embedding(index, made.weight), plain.dequantize()[index]):
        yield "rows that are looked up differ"


def exact(name: str, shape: tuple[int, int]) -> Iterator[str]:
    """Integers: every sum is exact; the gradient of x too."""
    w = exact_weight(named(name), *shape)
    t = QuantizedTensor(_parts(w), quantized(torch.zeros(128, 128, dtype=BF16), name).meta, shape)
    t = t.to(DEVICE)
    if t.meta.layout != LAYOUT:
        yield "a weight that is moved to the GPU stays plain"
    for count in (1, 16, 100):
        x, bias = exact_inputs(count, shape[1], BF16), torch.arange(shape[0]).remainder(7).sub(3).to(BF16)
        given = x.to(DEVICE).requires_grad_()
        y = functional.linear(given, t, bias.to(DEVICE))
        if not torch.equal(y.detach().cpu(), exact_result(x, w, bias)):
            yield f"{count} rows of integers differ"
        y.sum().backward()
        if given.grad is None or not given.grad.isfinite().all():
            yield f"{count} rows have no gradient"


def _parts(w: object) -> dict[str, torch.Tensor | None]:
    return {part: getattr(w, part) for part in ("codes", "scale", "outer", "zero")}


def moves(made: nn.Linear, plain: QuantizedTensor) -> Iterator[str]:
    """States both ways, and to the host and back."""
    weight: QuantizedTensor = made.weight.detach()  # type: ignore[assignment]
    host = weight.cpu()
    if host.meta.layout != "plain" or not same_parts(host, plain.cpu()):
        yield "on the host it is not the plain weight"
    if not same_parts(host.to(DEVICE), weight):
        yield "it does not come back from the host"
    if weight.to(torch.float16).meta.layout != LAYOUT or weight.float().meta.layout != "plain":
        yield "another dtype has the wrong layout"
    for target in (weight, plain):
        copy = torch.zeros_like(target).to_layout(target.meta.layout)
        for source in (weight, plain, host):
            copy.copy_(source)
            if not same_parts(copy, target):
                yield f"copied from {source!r} into {target!r} it is another weight"


def programs(name: str) -> Iterator[str]:
    """torch.compile with CUDA graphs, rows left open, and a captured graph: the bits of eager calls."""
    torch.compiler.reset()
    made, _ = layer(name, SHAPE)
    with torch.no_grad():
        for options in ({"mode": "reduce-overhead"}, {"dynamic": True}):
            compiled = torch.compile(made, fullgraph=True, **options)
            for count in (1, 16, 128, 300):
                x = torch.randn((count, SHAPE[1]), dtype=BF16, device=DEVICE)
                for _ in range(3):
                    got = compiled(x).clone()
                if not torch.equal(got, made(x)):
                    yield f"{name} {options} {count} rows: compiled programs have other bits"
        for count in (1, 64, 300):
            x = torch.randn((count, SHAPE[1]), dtype=BF16, device=DEVICE)
            wanted = made(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = made(x)
            y.zero_()
            graph.replay()
            if not torch.equal(y, wanted):
                yield f"{name} {count} rows: a graph has other bits"


def memory(name: str) -> Iterator[str]:
    """One copy: no more than the plain weight's bytes, and a little for wider scales."""
    used = []
    # The first turn is for what libraries allocate once.
    for layout in ("plain", "plain", LAYOUT):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        made, dense = layer(name, (4096, 4096))
        del dense
        if layout == "plain":
            made.weight = nn.Parameter(made.weight.detach().to_layout("plain"), requires_grad=False)  # type: ignore[operator]
        with torch.no_grad():
            for count in (1, 300):
                made(torch.zeros((count, 4096), dtype=BF16, device=DEVICE))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated() - before)
        del made
    if used[2] > MEMORY * used[1]:
        yield f"{name}: {used[2]} bytes in place of {used[1]}"


def checks() -> Iterator[tuple[str, Iterator[str]]]:
    """What is looked at, with what is wrong of it."""
    for name in NAMES:
        yield name, wrong_of(name)
    for name in ("int4_g128", "int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise"):
        yield f"memory {name}", memory(name)
    for name in COMPILED:
        yield f"programs {name}", programs(name)
