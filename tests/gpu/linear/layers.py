"""Layers and modules of experts with preshuffled weights on a GPU, as `quantize_` makes them: bits of parts and products,
programs, graphs, states, moves, files and memory; and layers whose inputs are quantized on the way, compared and timed.

Of the latter what the kernel in front writes is what `fast.quantize` and `fast.fake_quantize` give, to the bit; products whose
sums are exact in float32 to the bit, random ones within `reference.linear_error_bound`; with a bias, as eager layers (the first
call and the prepared one) and compiled. Times have quantization in them; "only" is the same weight with inputs as they are.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import ao_lab
import fast
import reference
from ao_lab import (
    QuantizedTensor,
    Recipe,
    SchemeConfig,
    explain,
    linear_and_experts,
    load_pretrained,
    quantize_,
    quantized,
    save_pretrained,
)
from ao_lab.config.recipe import named
from ao_lab.gemm.select import families_by_rows, select_kernel
from ao_lab.tensor.quantized_tensor import from_quantized
from fast.gemm.choose import C
from fast.kernels.exact_inputs import exact_inputs as inputs_of_kernel
from fast.kernels.triton_small_m.host import INPUTS
from fast.matmul.preshuffled.dynamic import CODES, kind_of
from reference import Quantized, Scheme
from tests.gpu.harness.subject import Asked, Check, Row, Subject, beyond, differs
from tests.gpu.harness.timing import host_time, measured, several
from tests.gpu.linear.family import by_torch, dense_weights
from tests.support.linear_cases import exact_inputs, exact_result, exact_weight, outside, weight

DEVICE = "cuda"
#: Schemes, and those of which whole programs are compiled.
NAMES = (
    "int4_g128", "int4_g128_asymmetric", "int4_g32", "int8_rowwise", "int8_g128", "fp8_rowwise", "fp8_tensorwise", "mxfp4",
    "nvfp4", "mxfp8_e4m3",
)  # fmt: skip
COMPILED = ("int4_g128", "int8_rowwise", "nvfp4")
#: Lengths that are no whole tiles, where blocks are no multiple of 128 along K too.
FILLED = {
    "int4_g128": (200, 640), "int4_g128_asymmetric": (333, 640), "int4_g32": (200, 544), "int8_rowwise": (333, 1001),
    "int8_g128": (70, 1152), "fp8_rowwise": (1000, 1096), "fp8_tensorwise": (70, 130), "mxfp4": (200, 544), "nvfp4": (100, 528),
    "mxfp8_e4m3": (1000, 160),
}  # fmt: skip
#: Out and in features: N and K that a program has parts of, and not.
SHAPE, SMALL = (2048, 1024), (384, 640)
ROWS = (1, 2, 16, 64, 128, 129, 300)
BF16, LAYOUT = torch.bfloat16, "preshuffled"
#: Families that multiply by elements times scales, rounded to the inputs' dtype.
DEQUANTIZED = ("sm90_w4a16_gemm", "torch_dequantize")
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
    for shape in (SHAPE, SMALL, FILLED[name]):
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
    stored = rows_as_stored(made.weight.detach())  # type: ignore[arg-type]
    for count in ROWS:
        x = torch.randn((count, plain.shape[1]), dtype=BF16, device=DEVICE)
        with torch.no_grad():
            y = made(x)
            if not torch.equal(y, made(x)):
                yield f"{count} rows have other bits the second time"
        if count > 128:
            if not torch.equal(y, functional.linear(x, plain.dequantize(), made.bias)):
                yield f"{count} rows are not those of the dequantized weight"
        elif count > stored:
            yield from dense_products(count, y, x, plain.dequantize(), made.bias.detach())
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


def dense_products(
    count: int, y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None
) -> Iterator[str]:
    """Of the dequantized weight in the inputs' dtype, in any order. Tensor cores cut off where additions round, an error of two
    roundings for one: twice what float32 sums may lose, and the rounding of the result."""
    truth = x.double() @ w.double().t() + (0.0 if bias is None else bias.double())
    allowed: Any = sum(
        reference.matmul_error_bound(x, w.t(), accumulation="blocked", out_dtype=out, bias=bias)
        for out in ("float32", "bfloat16")
    )
    if bad := int((~((y.double() - truth).abs() <= allowed)).sum()):
        yield f"{count} rows: {bad} outside the bound of the dequantized weight"


def rows_as_stored(w: QuantizedTensor) -> int:
    """The most rows that are multiplied by scales and elements apart; more are by the weight dequantized to their dtype."""
    ranges, _ = families_by_rows(w if w.block_axis == -2 else w.transposed(), BF16)
    names = ((one.name.partition(" ")[0], one.last) for one in ranges)
    return max((last or max(ROWS) for name, last in names if name not in DEQUANTIZED), default=0)


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


EXPERT_NAMES = (
    "int4_g128",
    "int4_g128_asymmetric",
    "int4_g32",
    "int8_rowwise",
    "fp8_rowwise",
    "mxfp4",
    "nvfp4",
)
COMPILED_EXPERTS = ("int4_g128", "fp8_rowwise")
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


def model_of(name: str) -> tuple[nn.ModuleDict, list[torch.Tensor]]:
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


def wrong_experts(name: str) -> Iterator[str]:
    """What is wrong with experts of a scheme."""
    made, dense = model_of(name)
    if not all("fused" in layer.kernel for layer in explain(made).changed):
        yield f"{name}: {explain(made)}"
    for (which, parameter), before in zip(made.experts.named_parameters(), dense, strict=True):
        t: Any = parameter.detach()
        plain = quantized(before, name)
        if t.meta.layout != LAYOUT:
            yield f"{name} {which}: {t!r} is not what quantize_ chooses"
            continue
        for found in (*expert_parts(t, plain), *expert_products(t, plain), *expert_gradients(t, plain)):
            yield f"{name} {which}: {found}"
    yield from (f"{name}: {found}" for found in exact_experts(name))


def expert_parts(t: QuantizedTensor, plain: QuantizedTensor) -> Iterator[str]:
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


def expert_products(t: QuantizedTensor, plain: QuantizedTensor) -> Iterator[str]:
    """Of random numbers: within the bound of each expert's product, the same bits twice; of many those of dense weights."""
    for tokens in TOKENS:
        x, ends = rows_of(tokens, t.shape[2]), ends_of(tokens)
        y = torch._grouped_mm(x, t.mT, offs=ends)
        if not torch.equal(y, torch._grouped_mm(x, t.mT, offs=ends)):
            yield f"{tokens} tokens have other bits the second time"
        if len(x) > C.most_of_expert * EXPERTS:
            if not torch.equal(y, torch._grouped_mm(x, plain.dequantize().mT, offs=ends)):
                yield f"{tokens} tokens are not those of the dequantized weights"
            continue
        bounds = [0, *ends.tolist()]
        for at in range(EXPERTS):
            rows, got = x[bounds[at] : bounds[at + 1]], y[bounds[at] : bounds[at + 1]]
            if len(rows) and (bad := outside(got, rows, plain[at].quantized, None)):
                yield f"{tokens} tokens, expert {at}: {bad} outside the bound"
            alone = functional.linear(rows, t[at])
            if 0 < len(rows) <= rows_as_stored(t[at]) and (
                bad := outside(alone, rows, plain[at].quantized, None)
            ):
                yield f"{len(rows)} rows of expert {at} alone: {bad} outside the bound"
    batch = torch.randn((EXPERTS, 5, t.shape[2]), dtype=BF16, device=DEVICE)
    if not torch.equal(torch.bmm(batch, t.mT), torch.bmm(batch, plain.dequantize().mT)):
        yield "a batch is not multiplied by the dequantized weights"


def expert_gradients(t: QuantizedTensor, plain: QuantizedTensor) -> Iterator[str]:
    """Of the rows, by the dequantized weights."""
    x, ends = rows_of(60, t.shape[2]).requires_grad_(), ends_of(60)
    g = rows_of(60, t.shape[1])
    torch._grouped_mm(x, t.mT, offs=ends).backward(g)
    if x.grad is None or not torch.equal(x.grad, torch._grouped_mm(g, plain.dequantize(), offs=ends)):
        yield "the gradient of rows differs"


def exact_experts(name: str) -> Iterator[str]:
    """Integers: every sum is exact; rows behind the last expert's are nobody's."""
    for shape in ((384, 640 if "128" in name else 512), (200, 640 if "128" in name else 544)):
        yield from (f"{shape}: {found}" for found in exact_experts_of(name, shape))


def exact_experts_of(name: str, matrix: tuple[int, int]) -> Iterator[str]:
    """Of matrices of a shape."""
    stored = [exact_weight(named(name), *matrix, seed) for seed in range(4)]
    given = {part: [getattr(w, part) for w in stored] for part in ("codes", "scale", "zero")}
    joined = {part: None if each[0] is None else torch.stack(each) for part, each in given.items()}
    outer = stored[0].outer  # one of all experts, which all of these have
    meta = quantized(torch.zeros(2, 128, 128, dtype=BF16), name).meta
    shape = (4, *stored[0].shape)
    t = QuantizedTensor({**joined, "outer": outer}, meta, shape).to(DEVICE)
    if t.meta.layout != LAYOUT:
        yield "weights that are moved to the GPU stay plain"
    for counts in ((1, 0, 1, 0), (7, 0, 30, 3), (64, 1, 0, 150), (100, 1, 0, 170)):
        for dtype in (BF16, torch.float16):
            x, total = exact_inputs(sum(counts) + 3, shape[2], dtype), sum(counts)
            ends = torch.tensor(counts).cumsum(0).to(torch.int32).to(DEVICE)
            got = torch._grouped_mm(x.to(DEVICE), t.mT, offs=ends)[:total].cpu()
            each = zip(x[:total].split(counts), stored, strict=True)
            if not torch.equal(got, torch.cat([exact_result(rows, w, None) for rows, w in each])):
                yield f"{counts} rows of integers in {dtype} differ"


def expert_programs(name: str) -> Iterator[str]:
    """torch.compile with CUDA graphs and with rows left open, a captured graph that meets other offsets: as eager calls."""
    torch.compiler.reset()
    made, _ = model_of(name)
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


def expert_files(name: str) -> Iterator[str]:
    """Saved and loaded: preshuffled again, the same outputs."""
    made, _ = model_of(name)
    x, ends = rows_of(60, HIDDEN), ends_of(60)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(made, folder, layout="ao_lab", config={"dtype": "bfloat16"})
        found = load_pretrained(folder, nn.ModuleDict({"experts": Experts()}))
    if any(parameter.meta.layout != LAYOUT for parameter in found.parameters()):
        yield f"{name}: experts that are loaded are plain"
    other = model_of(name)[0]
    other.load_state_dict({key: value.cpu() for key, value in made.state_dict().items()})
    with torch.no_grad():
        wanted = made.experts(x, ends)
        if not torch.equal(found.experts(x, ends), wanted) or not torch.equal(other.experts(x, ends), wanted):
            yield f"{name}: experts that are loaded have other outputs"


# Layers whose inputs are quantized on the way.

#: Schemes of inputs and weight that are timed, and what else is compared.
TIMED = {
    "int8 x int4 g32": ("int8_rowwise_asymmetric", "int4_g32"), "int8 x int4 g128": ("int8_rowwise", "int4_g128"),
    "fp8 x int4 g128": ("fp8_rowwise", "int4_g128"), "mxfp8 x mxfp8": ("mxfp8_e4m3_rceil", "mxfp8_e4m3_rceil"),
}  # fmt: skip
COMPARED = (
    *TIMED.values(), ("int8_rowwise", "int8_g128"), ("mxfp4_rceil", "int4_g32_asymmetric"),
    ("torchao.int8_rowwise_asymmetric", "int4_g64"), ("fp8_rowwise_e5m2", "int8_rowwise"), ("mxint8", "int4_g128"),
    ("compressed_tensors.fp8_token", "fp8_1x128"),
)  # fmt: skip
#: A layer whose products are compared.
QUANTIZED_SHAPE = (384, 1024)


def hard_rows(count: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows of many sizes; zeros, the ends of the range, an infinity and NaN among them where there are enough."""
    generator = torch.Generator("cuda").manual_seed(count)
    x = torch.randn(count, length, device="cuda", generator=generator)
    x = (x * 2.0 ** (torch.arange(count, device="cuda") % 13 - 6)[:, None]).to(dtype)
    if count >= 16:
        info = torch.finfo(dtype)
        x[1], x[2], x[3, 5], x[4] = 0.0, -0.0, info.max, info.smallest_normal
        x[5, 1:], x[6, 7], x[7, 9] = 0.0, float("inf"), float("nan")
        x[8] = x[8].abs()
    return x


def inputs_differ(scheme: Scheme, x: torch.Tensor) -> int:
    """How many elements and scales of the kernel in front are not those of `fast.quantize`."""
    made = inputs_of_kernel(x, scheme, str(kind_of(scheme)))
    if made is None:
        return x.numel()
    if kind_of(scheme) != CODES:
        return different(made[0], fast.fake_quantize(x, scheme))
    q = fast.quantize(x, scheme)
    values = torch.tensor(scheme.format.values, device="cuda")[q.codes.long()]
    values = values if q.zero is None else values - q.zero.float()
    scale = (
        q.scale[:, 0].float()
        if scheme.scale.storage == "float32"
        else q.scale.view(torch.bfloat16)[:, 0].float()
    )
    real = ~scale.isnan()
    return different(made[1], scale) + different(made[0][real].float() + 0.0, values[real] + 0.0)


def different(a: Any, b: torch.Tensor) -> int:
    """How many are neither equal nor both NaN."""
    return int(((a != b) & ~(a.isnan() & b.isnan())).sum())


def preshuffled(made: Quantized, recipe: Recipe, dtype: torch.dtype) -> Any:
    """A preshuffled weight on the GPU."""
    return from_quantized(made, recipe, dtype).to(DEVICE).to_layout(LAYOUT).requires_grad_(False)


def exact_rows(count: int, length: int, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """Small integers times a power of two, and the largest in each block, so that nothing is rounded."""
    top = scheme.scale.target
    top = top if kind_of(scheme) == CODES else 2.0 ** int(torch.tensor(top).log2().floor())
    x = torch.randint(-2, 3, (count, length), generator=torch.Generator().manual_seed(count)).float()
    x *= 2.0 ** max(int(torch.tensor(top).log2().floor()) - 8, 0)
    x[:, ::32] = top
    if scheme.zero is not None:
        x[:, ::32], x[:, 1::32] = top // 2 + 1, -(top // 2)
    return x.to(dtype).cuda()


@torch.no_grad()
def wrong_dynamic(scheme: str, name: str, count: int) -> Iterator[str]:
    """What is wrong with products of a small layer."""
    given, dtype, (n, length) = named(scheme), INPUTS[count == 16], QUANTIZED_SHAPE
    recipe = Recipe(weight=named(name), activation=given)
    w, bias = exact_weight(named(name), n, length), 64 * (torch.arange(n, device=DEVICE) % 7 - 3).to(dtype)
    t, x = preshuffled(w, recipe, dtype), exact_rows(count, length, given, dtype)
    values = reference.dequantize(reference.quantize(x.cpu(), given)).double()
    sums = values @ fast.dequantize(w).double().t() + bias.cpu().double()
    assert torch.equal(sums.float().double(), sums), "the sums of this case are not exact"
    wanted = sums.float().to(dtype)
    for call in ("eager", "prepared", "prepared again"):
        yield from differs(call, functional.linear(x, t, bias).cpu(), wanted)
    torch.compiler.reset()
    compiled = torch.compile(lambda x, t, bias: functional.linear(x, t, bias), backend="aot_eager")
    if count == 16:
        yield from differs("compiled", compiled(x, t, bias).cpu(), wanted)
    w = weight(named(name), n, length)
    t, x = preshuffled(w, recipe, dtype), hard_rows(count, length, dtype)
    x = torch.where(x.isfinite() & (x.abs() < 1e4), x, 1.0).to(dtype)
    values = reference.dequantize(reference.quantize(x.cpu(), given))
    bound: Any = reference.linear_error_bound(
        values, w, bias.cpu(), out_dtype=str(dtype).removeprefix("torch.")
    )
    exact = values.double() @ fast.dequantize(w).double().t() + bias.cpu().double()
    made = functional.linear(x, t, bias)
    yield from beyond("random numbers", made, exact, bound)
    yield from differs("a second call", functional.linear(x, t, bias), made)


def wrong_inputs(scheme: str) -> Iterator[str]:
    """What the kernel in front writes otherwise than `fast.quantize`."""
    for count, length in ((1, 4096), (33, 14336), (128, 4096), (17, 28672), (16, 384)):
        for dtype in INPUTS:
            if found := inputs_differ(named(scheme), hard_rows(count, length, dtype)):
                yield f"{count} x {length} {dtype}: {found} differ"


def wrong_configurations() -> Iterator[str]:
    """`quantize_` chooses the layout, and `explain` says what multiplies."""
    families = {"sm90_w4a16_gemv", "triton_small_m", "sm90_w4a16_gemm"}
    configurations = (
        ao_lab.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4),
        ao_lab.Float8DynamicActivationInt4WeightConfig(), ao_lab.MXDynamicActivationMXWeightConfig(),
    )  # fmt: skip
    for config in configurations:
        net = nn.Sequential(nn.Linear(512, 256, device=DEVICE, dtype=BF16))
        quantize_(net, config)
        layer = explain(net).changed[0]
        if not layer.kernel.startswith("fused") or not families <= {one.name for one in layer.families}:
            yield f"{config}: {explain(net)}"


@torch.no_grad()
def times(asked: Asked) -> Iterator[Row]:
    """Quantization included; and microseconds of the host for an eager layer."""
    for shape in asked.shapes or ((14336, 4096),):
        dense = dense_weights(shape)
        held = {"bf16": dense}
        for label, (inputs, name) in TIMED.items():
            first = fast.quantize(dense[0], name, packed=named(name).format.bits < 8)
            for kind, activation in ((label, named(inputs)), (f"only {name}", None)):
                t = preshuffled(first, Recipe(weight=named(name), activation=activation), BF16)
                size = sum(part.nbytes for part in t.parts.values() if part is not None)
                held[kind] = several(t.clone, size)
        for rows in asked.rows or (1, 16, 64, 128):
            x = torch.randn(rows, shape[1], device=DEVICE).to(BF16)
            calls = {name: by_torch(each, x) for name, each in held.items()}
            host_us = {name: round(host_time(each[0]), 1) for name, each in calls.items()}
            yield {"shape": shape, "rows": rows, **measured(calls), "host": host_us}


def layer_checks(asked: Asked) -> Iterator[Check]:
    """Of layers."""
    for name in asked.schemes or NAMES:
        yield name, partial(wrong_of, name)
    for name in ("int4_g128", "int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise"):
        yield f"memory {name}", partial(memory, name)
    for name in COMPILED:
        yield f"programs {name}", partial(programs, name)


def expert_checks(asked: Asked) -> Iterator[Check]:
    """Of modules of experts."""
    for name in asked.schemes or EXPERT_NAMES:
        yield name, partial(wrong_experts, name)
    for name in COMPILED_EXPERTS:
        yield f"programs {name}", partial(expert_programs, name)
        yield f"files {name}", partial(expert_files, name)


def dynamic_checks(asked: Asked) -> Iterator[Check]:
    """Of layers whose inputs are quantized on the way."""
    yield "configurations", wrong_configurations
    for scheme in dict.fromkeys(scheme for scheme, _ in COMPARED):
        yield f"inputs {scheme}", partial(wrong_inputs, scheme)
    for scheme, name in COMPARED:
        for count in (1, 16, 128):
            yield f"products {scheme} x {name}, {count} rows", partial(wrong_dynamic, scheme, name, count)


SUBJECTS = (
    Subject("layers", "linear layers with preshuffled weights, as quantize_ makes them", layer_checks),
    Subject("expert_layers", "modules of experts with preshuffled weights", expert_checks),
    Subject(
        "dynamic_inputs",
        "layers of preshuffled weights whose inputs are quantized on the way",
        dynamic_checks,
        times,
    ),
)
