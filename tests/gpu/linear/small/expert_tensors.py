"""Modules of experts on a GPU, as `quantize_` makes them: grouped products through the tensor, experts one by one, gradients,
programs, graphs, moves and files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ao_lab import SchemeConfig, linear_and_experts, load_pretrained, quantize_, quantized, save_pretrained
from ao_lab.config.recipe import named
from ao_lab.quantization.report import explain
from ao_lab.tensor.quantized_tensor import QuantizedTensor
from tests.gpu.linear.small.tensors import BF16, DEVICE, LAYOUT, same_parts
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, outside

NAMES = ("int4_g128", "int4_g128_asymmetric", "int4_g32", "int8_rowwise", "fp8_rowwise", "mxfp4", "nvfp4")
COMPILED = ("int4_g128", "fp8_rowwise")
#: Experts, hidden and intermediate features.
EXPERTS, HIDDEN, INNER = 8, 1024, 768
#: Tokens, two rows of each: one expert without rows, up to MOST_AVERAGE rows an expert, and more.
TOKENS = (1, 4, 60, 250, 400)


class Experts(nn.Module):
    """Two projections of each expert as transformers stores and multiplies them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
        made = [torch.randn(shape, dtype=BF16, device=DEVICE) / 32 for shape in shapes]
        self.gate_up_proj, self.down_proj = map(nn.Parameter, made)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows sorted by expert."""
        gate, up = torch._grouped_mm(x, self.gate_up_proj.transpose(-2, -1), offs=ends).chunk(2, -1)
        return torch._grouped_mm(functional.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)


def model(name: str) -> tuple[nn.ModuleDict, list[torch.Tensor]]:
    """Experts as `quantize_` leaves them, and their weights before."""
    made = nn.ModuleDict({"experts": Experts()})
    dense = [parameter.detach().clone() for parameter in made.parameters()]
    quantize_(made, SchemeConfig(scheme=name), linear_and_experts)
    return made.requires_grad_(False), dense


def ends_of(tokens: int) -> torch.Tensor:
    """Two experts of each token, none of them the third one."""
    draw = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens))
    draw[:, 2] = -1
    chosen = draw.topk(2, 1).indices.flatten()
    return torch.bincount(chosen, minlength=EXPERTS).cumsum(0).to(torch.int32).to(DEVICE)


def rows_of(tokens: int, length: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn((2 * tokens, length), dtype=dtype, device=DEVICE)


def wrong_of(name: str) -> Iterator[str]:
    """What is wrong with experts of a scheme."""
    made, dense = model(name)
    if not all("fused" in layer.kernel for layer in explain(made).changed):
        yield f"{name}: {explain(made)}"
    for (which, parameter), before in zip(made.experts.named_parameters(), dense, strict=True):
        t: Any = parameter.detach()
        plain = quantized(before, name)
        if t.meta.layout != LAYOUT:
            yield f"{name} {which}: {t!r} is not what quantize_ chooses"
            continue
        for found in (*parts(t, plain), *products(t, plain), *gradients(t, plain)):
            yield f"{name} {which}: {found}"
    yield from (f"{name}: {found}" for found in exact(name))


def parts(t: QuantizedTensor, plain: QuantizedTensor) -> Iterator[str]:
    """All of them come back, those of single experts too, from the host and from a file."""
    if not same_parts(t.to_layout("plain"), plain) or not torch.equal(t.dequantize(), plain.dequantize()):
        yield "parts do not come back"
    for one, wanted in ((t[3], plain[3]), (t[2:5], plain[2:5]), (t[[7, 0]], plain[[7, 0]])):
        if one.meta.layout != LAYOUT or not same_parts(one.plain, wanted):
            yield f"{one!r} is not the piece"
    if not same_parts(t.cpu(), plain.cpu()) or not same_parts(t.cpu().to(DEVICE), t):
        yield "it does not come back from the host"
    if not same_parts(torch.zeros_like(plain).to_layout(LAYOUT).copy_(plain), t):
        yield "copied from the plain weights it is another one"


def products(t: QuantizedTensor, plain: QuantizedTensor) -> Iterator[str]:
    """Of random numbers: within the bound of each expert's product, the same bits twice; of many those of dense weights."""
    for tokens in TOKENS:
        x, ends = rows_of(tokens, t.shape[2]), ends_of(tokens)
        y = torch._grouped_mm(x, t.mT, offs=ends)
        if not torch.equal(y, torch._grouped_mm(x, t.mT, offs=ends)):
            yield f"{tokens} tokens have other bits the second time"
        if len(x) > 64 * EXPERTS:
            if not torch.equal(y, torch._grouped_mm(x, plain.dequantize().mT, offs=ends)):
                yield f"{tokens} tokens are not those of the dequantized weights"
            continue
        bounds = [0, *ends.tolist()]
        for at in range(EXPERTS):
            rows, got = x[bounds[at] : bounds[at + 1]], y[bounds[at] : bounds[at + 1]]
            if len(rows) and (bad := outside(got, rows, plain[at].quantized, None)):
                yield f"{tokens} tokens, expert {at}: {bad} outside the bound"
            alone = functional.linear(rows, t[at])
            if len(rows) and (bad := outside(alone, rows, plain[at].quantized, None)):
                yield f"{len(rows)} rows of expert {at} alone: {bad} outside the bound"
    batch = torch.randn((EXPERTS, 5, t.shape[2]), dtype=BF16, device=DEVICE)
    if not torch.equal(torch.bmm(batch, t.mT), torch.bmm(batch, plain.dequantize().mT)):
        yield "a batch is not multiplied by the dequantized weights"


def gradients(t: QuantizedTensor, plain: QuantizedTensor) -> Iterator[str]:
    """Of the rows, by the dequantized weights."""
    x, ends = rows_of(60, t.shape[2]).requires_grad_(), ends_of(60)
    g = rows_of(60, t.shape[1])
    torch._grouped_mm(x, t.mT, offs=ends).backward(g)
    if x.grad is None or not torch.equal(x.grad, torch._grouped_mm(g, plain.dequantize(), offs=ends)):
        yield "the gradient of rows differs"


def exact(name: str) -> Iterator[str]:
    """Integers: every sum is exact; rows behind the last expert's are nobody's."""
    weights = [exact_weight(named(name), 384, 640 if "128" in name else 512, seed) for seed in range(4)]
    given = {part: [getattr(w, part) for w in weights] for part in ("codes", "scale", "zero")}
    joined = {part: None if each[0] is None else torch.stack(each) for part, each in given.items()}
    meta = quantized(torch.zeros(2, 128, 128, dtype=BF16), name).meta
    shape = (4, *weights[0].shape)
    t = QuantizedTensor({**joined, "outer": None}, meta, shape).to(DEVICE)
    if t.meta.layout != LAYOUT:
        yield "weights that are moved to the GPU stay plain"
    for counts in ((1, 0, 1, 0), (7, 0, 30, 3), (64, 1, 0, 150)):
        for dtype in (BF16, torch.float16):
            x, total = exact_inputs(sum(counts) + 3, shape[2], dtype), sum(counts)
            ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
            got = torch._grouped_mm(x.to(DEVICE), t.mT, offs=ends)[:total].cpu()
            each = zip(x[:total].split(counts), weights, strict=True)
            if not torch.equal(got, torch.cat([exact_result(rows, w, None) for rows, w in each])):
                yield f"{counts} rows of integers in {dtype} differ"


def programs(name: str) -> Iterator[str]:
    """torch.compile with CUDA graphs and with rows left open, a captured graph that meets other offsets: as eager calls."""
    torch.compiler.reset()
    made, _ = model(name)
    with torch.no_grad():
        for options in ({"mode": "reduce-overhead"}, {"dynamic": True}):
            compiled: Any = torch.compile(projected, fullgraph=True, **options)
            for tokens in (1, 60, 400):
                x, ends = rows_of(tokens, HIDDEN), ends_of(tokens)
                for _ in range(3):
                    got = compiled(made.experts.gate_up_proj, x, ends).clone()
                if not torch.equal(got, projected(made.experts.gate_up_proj, x, ends)):
                    yield f"{name} {options} {tokens} tokens: compiled programs have other bits"
        x, ends = rows_of(60, HIDDEN), ends_of(60)
        made.experts(x, ends)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = made.experts(x, ends)
        ends.copy_(torch.arange(1, EXPERTS + 1, device=DEVICE) * 15)
        graph.replay()
        if not torch.equal(y, made.experts(x, ends)):
            yield f"{name}: a graph has other bits"


def projected(w: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One projection: what a compiler joins to it would round in other places."""
    return torch._grouped_mm(x, w.transpose(-2, -1), offs=ends)


def files(name: str) -> Iterator[str]:
    """Saved and loaded: preshuffled again, the same outputs."""
    made, _ = model(name)
    x, ends = rows_of(60, HIDDEN), ends_of(60)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(made, folder, layout="ao_lab", config={"dtype": "bfloat16"})
        found = load_pretrained(folder, nn.ModuleDict({"experts": Experts()}))
    if any(parameter.meta.layout != LAYOUT for parameter in found.parameters()):
        yield f"{name}: experts that are loaded are plain"
    other = model(name)[0]
    other.load_state_dict({key: value.cpu() for key, value in made.state_dict().items()})
    with torch.no_grad():
        wanted = made.experts(x, ends)
        if not torch.equal(found.experts(x, ends), wanted) or not torch.equal(other.experts(x, ends), wanted):
            yield f"{name}: experts that are loaded have other outputs"


def checks() -> Iterator[tuple[str, Iterator[str]]]:
    """What is looked at, with what is wrong of it."""
    for name in NAMES:
        yield name, wrong_of(name)
    for name in COMPILED:
        yield f"programs {name}", programs(name)
        yield f"files {name}", files(name)
