"""Training with 2:4 weights on a GPU: kernels of a step, products, gradients and layers, bit for bit; times of what rules
choose.

Integers whose sums are exact in float32 have one right result in any order of sums: outputs and gradients by cuSPARSELt
and by our own kernels are compared with products in float32, rounded once. Masks, SR-STE and activations are compared with
the reference on the host, sums of columns with the model of their order, masks kept as bits with those kept as bytes,
steps in CUDA graphs with eager ones. Times are of ways that a rule chooses among; layers and models are timed by the
experiment `sparsity`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import ao_lab
import fast
import reference
from ao_lab.sparsity.training import api
from ao_lab.sparsity.training.layers import Rule, masked_linear, weight_gradient
from ao_lab.sparsity.training.masks import find_mask
from ao_lab.sparsity.training.products import PRODUCTS, masked
from experiments.sparsity.products import layer_of, step_of
from fast.gemm.choose import gradients
from fast.kernels import cublaslt
from fast.kernels.layers import column_sums as sums_host
from fast.kernels.layers.column_sums import WIDTHS, plan_of
from fast.kernels.sm90_sparse24_gemm.arrange import pack_bits, restore
from fast.kernels.sm90_sparse24_gemm.host import ELEMENTS, KERNEL, Problem, Variant, fitted
from fast.layers.column_sums import LEAST, column_sums
from fast.layers.linear_gradients import apart, beside, weight_and_bias_gradients
from fast.sparsity.compress import COMPRESS_MASKED, DTYPES, compress_masked
from fast.sparsity.compress import masked as masked_in_place
from fast.sparsity.prune import prune_into
from tests.gpu.harness.products import sparse24_gemm
from tests.gpu.harness.subject import Asked, Check, Row, Subject, differs, in_processes, in_threads, same_bits
from tests.gpu.harness.timing import Call, measured, several
from tests.gpu.sparsity.cases import MASKED_SHAPES, masked_weights, sum_bound, sum_model

#: Tokens, inputs, outputs.
Shape = tuple[int, int, int]
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
PUBLISHED: tuple[Shape, ...] = ((13008, 1024, 4096), (13008, 4096, 1024))
#: Rows that are padded, several axes of tokens, the smallest, none.
LAYERS: tuple[Shape, ...] = (*PUBLISHED[:1], (3, 64, 128), (1, 16, 16), (100, 48, 80), (0, 32, 32))
#: Tokens beside a tile's, features that fill no tile, K that fills no panel.
CUT: tuple[Shape, ...] = ((417, 272, 264), (700, 144, 200), (1037, 1040, 392))
REPEATS = 10


def all_equal(label: str, found: Any, wanted: Any, same: Callable[..., bool] = same_bits) -> Iterator[str]:
    """A line where tensors of a tuple differ in their bits."""
    wrong = [at for at, pair in enumerate(zip(found, wanted, strict=True)) if not same(*pair)]
    if wrong:
        yield f"{label}: bits of {wrong} differ"


def same_but_zeros(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit but for the sign of zero: a product of nothing may be -0 in one library and +0 in the other."""
    a, b = (torch.where(t == 0, torch.zeros_like(t), t) for t in (a.detach(), b.detach()))
    return same_bits(a, b)


# Masks, products and layers.


def checks(asked: Asked) -> Iterator[Check]:
    """The smallest shapes first."""
    torch.manual_seed(0)
    # Partial sums of dense products are not to be rounded either.
    for name in ("bf16", "fp16"):
        setattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", False)
    device, on_gpu = asked.device, asked.device != "cpu"
    named = ("cusparselt", "sparse_wgmma") if on_gpu else ("dense",)
    if on_gpu:
        in_processes(compile_mask, [(dtype, shape) for dtype in FLOATS for shape in ((64, 128), (16, 16))])
    for dtype in FLOATS:
        yield f"rules {dtype}", partial(wrong_rules, device, dtype)
    for shape in reversed(LAYERS if on_gpu else LAYERS[1:]):
        for dtype in HALVES:
            for transposable in (False, True):
                for product in named:
                    label = f"{product} {dtype} {shape}{' transposable' * transposable}"
                    yield label, partial(wrong_product, device, dtype, shape, transposable, product)
    for product in dict.fromkeys(("dense", *named)):
        yield f"layers {product}", partial(wrong_layers, device, product)


def compile_mask(job: tuple[torch.dtype, tuple[int, int]]) -> None:
    """Find a transposable mask, in a process of its own: the compiled kernel stays in Triton's folder."""
    dtype, shape = job
    find_mask(torch.ones(shape, dtype=dtype, device="cuda"), config_of("recomputed"))


def config_of(masks: str, gradient: str = "straight-through", product: str = "sparse_wgmma") -> Any:
    """Transposable masks."""
    return ao_lab.SparseTrainingConfig(masks=masks, transposable=True, gradient=gradient, products=product)


def integers(shape: tuple[int, ...], dtype: torch.dtype, device: str, most: int) -> torch.Tensor:
    """Random integers up to `most`: sums of their products are exact in float32."""
    return torch.randint(-most, most + 1, shape, device=device).to(dtype)


def wrong_product(
    device: str, dtype: torch.dtype, shape: Shape, transposable: bool, product: str
) -> Iterator[str]:
    """The output and three gradients of one layer beside float32 products, which are exact, rounded once."""
    tokens, k, n = shape
    x, g = (integers((tokens, width), dtype, device, 1) for width in (k, n))
    w, bias = integers((n, k), dtype, device, 2), integers((n,), dtype, device, 2)
    mask = find_mask(w, ao_lab.SparseTrainingConfig(masks="recomputed", transposable=transposable))
    rule = Rule("straight-through", 0.0, product, transposable)
    x32, w32, g32 = x.float(), masked(w, mask).float(), g.float()
    right = [t.to(dtype) for t in (x32 @ w32.t() + bias.float(), g32 @ w32, g32.t() @ x32, g32.sum(0))]
    for again in range(REPEATS):
        leaves = [t.detach().requires_grad_() for t in (x, w, bias)]
        y = masked_linear(leaves[0], leaves[1], mask, leaves[2], rule)
        made = (y.detach(), *torch.autograd.grad(y, leaves, g))
        yield from all_equal(f"call {again}", made, right, same_but_zeros)


def wrong_rules(device: str, dtype: torch.dtype) -> Iterator[str]:
    """Masks, SR-STE and activations beside the reference on the host."""
    w, g = torch.randn(256, 512).to(dtype), torch.randn(256, 512).to(dtype)
    there = w.to(device)
    for name in ("2:4", "1:4", "4:8"):
        found = find_mask(there, ao_lab.SparseTrainingConfig(name, "recomputed"))
        yield from differs(f"mask {name}", found.cpu(), torch.as_tensor(reference.prune(w, pattern=name)))
    right = torch.as_tensor(reference.prune_transposable(w))
    yield from differs("mask transposable", find_mask(there, config_of("recomputed")).cpu(), right)
    mask = torch.as_tensor(reference.prune(w))
    for decay in (2e-4, 0.3):
        made = weight_gradient(g.to(device), there, mask.to(device), Rule("sr-ste", decay, "dense", False))
        wanted = torch.as_tensor(reference.sr_ste_gradient(g, w, mask, decay=decay))
        yield from all_equal(f"sr-ste {decay}", (made,), (wanted,), same_but_zeros)
    x, y = there.clone().requires_grad_(), w.clone().requires_grad_()
    both = [ao_lab.sparse_squared_relu(t) for t in (x, y)]
    made, right = (torch.autograd.grad(t, s, g.to(s.device))[0] for t, s in zip(both, (x, y), strict=True))
    wanted = (reference.squared_relu_24(w).values, right)
    yield from all_equal("squared relu", (both[0].detach(), made), wanted, same_but_zeros)


def wrong_layers(device: str, product: str) -> Iterator[str]:
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
        yield from all_equal(
            f"compiled, step {step}", *(list(net.parameters()) for net in nets), same_but_zeros
        )  # type: ignore[misc]
        if nets[0][0].weight.detach()[~nets[0][0].sparse_mask].any():
            yield f"step {step}: a weight that was pruned is not zero"


# Kernels of a step.


def kernel_checks(asked: Asked) -> Iterator[Check]:
    """By dtype, the quickest first."""
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    in_threads(
        lambda job: KERNEL.cubin(job[0], Problem(ELEMENTS[job[1], job[1]], job[1])),
        [(one, name) for one in tiles() for name in names],
    )
    for dtype in DTYPES:
        yield f"masked {dtype}", partial(wrong_masked, dtype)
        for shape in (*CUT, *PUBLISHED):
            yield f"products {shape} {dtype}", partial(wrong_tiles, shape, dtype)
        for shape in ((700, 144, 208), *PUBLISHED, (32768, 1024, 4096)):
            yield f"gradients {shape} {dtype}", partial(wrong_gradients, shape, dtype)
    for dtype in FLOATS:
        yield f"bits of masks {dtype}", partial(wrong_bits, dtype)
    yield "steps by bits and by bytes", wrong_steps
    for shape in PUBLISHED:
        yield f"graph {shape}", partial(wrong_graph, shape)


def tiles() -> list[Variant]:
    """Tiles that the copy engine writes, with and without skew, and what they are compared with."""
    sizes = (256, 208, 128, 192, 224, 240)
    stored = [fitted(tokens, 2, 1, pair, 1, 16, stored=True) for pair in (2, 1) for tokens in sizes]
    even = [one._replace(skew=0) for one in stored[:2]]
    return [*stored, *even, *(fitted(tokens, 2, 1, 2, 1, 16) for tokens in (256, 208, 128))]


def wrong_masked(dtype: torch.dtype) -> Iterator[str]:
    """Against the reference on small shapes; on large ones what comes back is the masked weight."""
    for shape in MASKED_SHAPES:
        for turned in (False, True):
            for w, mask in masked_weights(shape, dtype, turned):
                wanted = COMPRESS_MASKED.reference(None, (turned,), (w, mask))
                # The first call compiles, the second is the remembered one.
                for call in ("first", "again"):
                    made = compress_masked(w.cuda(), mask.cuda(), turned)
                    yield from all_equal(f"{shape} {turned} {call}", made, wanted)
    for shape in ((4096, 1024), (1024, 4096), (1040, 528)):
        for turned in (False, True):
            for w, mask in masked_weights(shape, dtype, turned, "cuda"):
                values, metadata = compress_masked(w, mask, turned)
                canonical = restore(metadata, 16, (values.shape[0], values.shape[1] // 4))
                right = torch.where(mask, w, torch.zeros_like(w))
                right = right.t().contiguous() if turned else right
                yield from all_equal(
                    f"{shape} {turned} back", (fast.decompress(values, canonical),), (right,)
                )


def wrong_tiles(shape: Shape, dtype: torch.dtype) -> Iterator[str]:
    """Every tile, and what is chosen, on integers, again and again; a small product beside the reference on the host."""
    tokens, k, n = shape
    x, w = (torch.randint(-2, 3, size, device="cuda").to(dtype) for size in ((tokens, k), (n, k)))
    bias = torch.randint(-9, 10, (n,), device="cuda").to(dtype)
    mask = (torch.rand(n, k // 4, 4, device="cuda").argsort(-1) < 2).view(n, k)
    values, metadata = compress_masked(w, mask)
    sums = x.float() @ torch.where(mask, w, 0).float().t()
    name = str(dtype).removeprefix("torch.")
    for added in (bias, None):
        exact = (sums if added is None else sums + added.float()).to(dtype)
        calls: dict[str, Any] = {"chosen": fast.linear_sparse}
        for one in tiles()[: 8 if shape in PUBLISHED else None]:
            calls[one.name] = partial(sparse24_gemm, name, one)
        for label, call in calls.items():
            for _ in range(REPEATS):
                yield from differs(
                    f"{label} bias {added is not None}", call(x, values, metadata, added), exact
                )
    if tokens < 500:
        canonical = restore(metadata, 16, (values.shape[0], values.shape[1] // 4))
        wanted = reference.linear_sparse(*(t.cpu() for t in (x, values, canonical, bias)))
        yield from all_equal("reference", (fast.linear_sparse(x, values, metadata, bias).cpu(),), (wanted,))


def wrong_gradients(shape: Shape, dtype: torch.dtype) -> Iterator[str]:
    """All three gradients, W compressed beside dW's product or not: those of two calls, bit for bit, in replays too."""
    tokens, k, n = shape
    g, x, w = (torch.randn(size, device="cuda").to(dtype) for size in ((tokens, n), (tokens, k), (n, k)))
    mask = torch.as_tensor(fast.prune_transposable(w))
    ops, all_grads = torch.ops.ao_lab, PRODUCTS["sparse_wgmma"].all_grads
    right = (ops.sparse_wgmma_linear(g, w, mask, None, True), *ops.weight_and_bias_gradients(g, x))
    assert all_grads is not None
    yield from all_equal("eager", all_grads(g, x, w, mask, True), right)
    yield from all_equal("operator", ops.sparse_wgmma_gradients(g, x, w, mask), right)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = all_grads(g, x, w, mask, True)
    for _ in range(REPEATS):
        graph.replay()
        yield from all_equal("replay", made, right)


def wrong_bits(dtype: torch.dtype) -> Iterator[str]:
    """Masks that kernels write as bits, weights that are masked by bits and compressed, each against the same by a bool
    mask."""
    for shape in ((4096, 1024), (1024, 4096), (80, 144), (16, 16), (1040, 528)):
        for transposable in (False, True):
            for call in ("first", "again"):
                w = torch.randn(shape, device="cuda").to(dtype)
                mask = torch.zeros(shape, dtype=torch.bool, device="cuda")
                bits = torch.full((shape[0], shape[1] // 8), 255, dtype=torch.uint8, device="cuda")
                for out in (mask, bits):
                    prune_into(w, out, transposable=transposable)
                yield from all_equal(f"prune {shape} {transposable} {call}", [bits], [pack_bits(mask)])
        for w, mask in masked_weights(shape, torch.float16, False, "cuda"):
            w = w.to(dtype) if dtype == torch.float32 else w.view(dtype)
            right, bits = torch.where(mask, w, 0), pack_bits(mask)
            for call in ("first", "again"):
                own = w.clone()
                masked_in_place(own, bits, own)
                yield from all_equal(f"kept {shape} {call}", [masked_in_place(w, bits), own], [right, right])
        for turned in (False, True) if dtype != torch.float32 else ():
            for w, mask in masked_weights(shape, dtype, turned, "cuda"):
                for call in ("first", "again"):
                    pair = [compress_masked(w, one, turned) for one in (pack_bits(mask), mask)]
                    yield from all_equal(f"compressed {shape} {turned} {call}", *pair)


def counted_step(shape: Shape, config: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A step of a layer that gives its gradients, its weight and its mask."""
    net, x, g = layer_of(shape, "cuda", 0, torch.float16)
    ao_lab.sparsify_(net, config)
    step = step_of(net, x, g)

    def counted() -> tuple[torch.Tensor, ...]:
        made: Any = step()
        ao_lab.step_sparsity_(net)
        return (*made, net[0].weight.detach(), net[0].sparse_mask)

    return counted


def wrong_steps() -> Iterator[str]:
    """Gradients, weights and masks of steps whose masks are kept as bits, and as bytes."""
    for masks, gradient in (
        ("fixed", "masked"),
        ("recomputed", "sr-ste"),
        ("recomputed", "straight-through"),
    ):
        steps = []
        for dtype in (torch.uint8, torch.bool):
            with mock.patch.object(api, "stored_dtype", lambda config, dtype=dtype: dtype):
                steps.append(counted_step((640, 256, 512), config_of(masks, gradient)))
        for again in range(3):
            yield from all_equal(f"{masks} {gradient} {again}", *(step() for step in steps))


def wrong_graph(shape: Shape) -> Iterator[str]:
    """Replays of a step after the weight has changed: masks, outputs and gradients of eager steps, bit for bit."""
    net, x, g = layer_of(shape, "cuda", 0, torch.float16)
    ao_lab.sparsify_(net, config_of("recomputed"))

    def step() -> tuple[torch.Tensor, ...]:
        ao_lab.step_sparsity_(net)
        y = net(x)
        return (y.detach(), *torch.autograd.grad(y, (x, *net.parameters()), g), net[0].sparse_mask)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for again in range(3):
        with torch.no_grad():
            net[0].weight.normal_(std=0.03)
        graph.replay()
        yield from all_equal(f"replay {again}", [t.clone() for t in made], step())
    # Three before the capture, three replays and three eager steps; a capture adds nothing.
    if (count := int(net[0].sparse_step)) != 9 or ao_lab.step_sparsity_(net).step != 10:
        yield f"{count} steps were counted, not 9"


# Sums of columns, and gradients of weight and bias together.

#: Rows and columns. Whole chunks and cut ones, columns that fill no program, all of their widths.
SUMMED = ((13008, 4096), (13008, 1024), (2048, 1024), (4099, 1040), (8200, 256), (2051, 11008), (65536, 1024))
#: More elements than 32 bits count.
WIDE = (150_000, 14336)
#: Rows, outputs, inputs.
GRADIENTS = (
    (13008, 4096, 1024),
    (13008, 1024, 4096),
    (8193, 1024, 264),
    (4099, 1040, 4096),
    (2048, 1024, 1024),
)
WAYS: dict[str, Callable[..., Any]] = {
    "apart": apart, "beside": beside, "epilogue": cublaslt.weight_and_bias_gradients,
}  # fmt: skip


def gradient_checks(asked: Asked) -> Iterator[Check]:
    """A capture by a process that has made no plan before comes first."""
    yield "a plan in a capture", wrong_capture
    for dtype in HALVES:
        for shape in GRADIENTS:
            yield f"gradients {shape} {dtype}", partial(wrong_ways, shape, dtype)
    yield "gradients elsewhere", wrong_elsewhere
    for dtype in FLOATS:
        yield f"column sums {dtype}", partial(wrong_sums, dtype)
    yield "column sums, 64-bit offsets", wrong_wide


def wrong_sums(dtype: torch.dtype) -> Iterator[str]:
    """Both outputs against the model, of a second call, the operator and a matrix at an odd address too; what torch sums."""
    for rows, length in SUMMED:
        memory = torch.randn(rows * length + 1, device="cuda").mul(1.5).exp().to(dtype)
        memory *= torch.where(torch.rand_like(memory, dtype=torch.float32) < 0.5, -1, 1).to(dtype)
        for first in (0, 1):
            g = memory[first : first + rows * length].view(rows, length)
            plan, wide = plan_of(rows, length), g.float().cpu().numpy()
            right, label = sum_model(wide, plan.parts, plan.chunk), f"{(rows, length)} from element {first}"
            if (abs(right - wide.astype("float64").sum(0)) > sum_bound(wide, plan.parts, plan.chunk)).any():
                yield f"{label}: the model is outside of its bound"
            for out in dict.fromkeys((dtype, torch.float32)):
                for call in (column_sums, column_sums, torch.ops.ao_lab.column_sums):
                    yield from differs(f"{label} {out}", call(g, out).cpu(), torch.from_numpy(right).to(out))
    g = torch.randint(-3, 4, (LEAST // 1024 - 1, 1024), device="cuda").to(dtype)
    for small in (g, g[:, :1000], g.t(), g[:0]):
        yield from differs(f"{tuple(small.shape)}", column_sums(small), small.double().sum(0).to(dtype))


def wrong_wide() -> Iterator[str]:
    """Of a matrix of WIDE."""
    codes = torch.randint(-3, 4, WIDE, device="cuda", dtype=torch.int8)
    wanted = codes.sum(0, dtype=torch.int64).double()
    g = codes.to(torch.bfloat16)
    del codes
    yield from differs(str(WIDE), column_sums(g, torch.float32).double(), wanted)


def matrices(shape: Shape, dtype: torch.dtype, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """g and x, random normal or random integers up to `most`."""
    rows, n, k = shape
    if most is None:
        g, x = (torch.randn(rows, width, device="cuda") for width in (n, k))
    else:
        g, x = (torch.randint(-most, most + 1, (rows, width), device="cuda") for width in (n, k))
    return g.to(dtype), x.to(dtype)


@contextmanager
def whole_sums() -> Iterator[None]:
    """Partial sums of torch's products are not rounded."""
    settings = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(settings, name, value)


def exact(g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of integers: float32 sums, rounded once."""
    return (g.float().t() @ x.float()).to(g.dtype), g.double().sum(0).to(g.dtype)


def wrong_capture() -> Iterator[str]:
    """A plan that is made while a graph is captured."""
    g, x = matrices(GRADIENTS[0], torch.float16, 2)
    g.t().mm(x), apart(g, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = weight_and_bias_gradients(g, x)
    g.copy_(g.roll(1, 1)), graph.replay()
    yield from all_equal("a plan made in a capture", made, exact(g, x))
    if cublaslt.FAILED:
        yield f"the plan has no algorithm: {cublaslt.FAILED}"


def wrong_ways(shape: Shape, dtype: torch.dtype) -> Iterator[str]:
    """Every way, whichever the rule takes: integers; random numbers within the bound of float32 sums in any order, the
    same bits a hundred times over; the weight's gradient beside torch's product, bit for bit."""
    with whole_sums():
        whole, (g, x) = matrices(shape, dtype, 2), matrices(shape, dtype)
        right = exact(*whole)
        for name, way in WAYS.items():
            made = way(*whole)
            if made is None:
                continue
            # Torch's products may round partial sums.
            wanted = right[0] if name == "epilogue" else whole[0].t().mm(whole[1])
            yield from differs(f"{name}: weight of integers", made[0], wanted)
            yield from differs(f"{name}: bias of integers", made[1], right[1])
            # Sums far from zero too, where a sum of fewer bits would show.
            for data in (g, g.abs() + 1):
                dw, db = way(data, x)
                if name != "epilogue":
                    yield from differs(f"{name}: weight", dw, data.t().mm(x))
                elif not within(dw, data, x):
                    yield f"{name}: the weight is outside of its bound"
                if not within(db[None], torch.ones_like(data[:, :1]), data):
                    yield f"{name}: the bias is outside of its bound"
                other = sum(not all(map(torch.equal, way(data, x), (dw, db))) for _ in range(100))
                if other:
                    yield f"{name}: {other} of 100 calls differ"


def within(made: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether sums of products, each exact in float32, are within M 2^-24 / (1 - M 2^-24) of the sum of absolute values before
    their rounding."""
    (a, b), unit = (g.double().t(), x.double()), len(g) * 2.0**-24
    right, allowed = a @ b, unit / (1 - unit) * (a.abs() @ b.abs())
    low, high = (right - allowed).to(made.dtype), (right + allowed).to(made.dtype)
    return bool(((low <= made) & (made <= high)).all())


def wrong_elsewhere() -> Iterator[str]:
    """The public function and its operator; operands that no fast way takes; another stream."""
    with whole_sums():
        for dtype in HALVES:
            for shape in GRADIENTS[:2]:
                g, x = matrices(shape, dtype, 2)
                right, compiled = exact(g, x), torch.compile(lambda g, x: weight_and_bias_gradients(g, x))
                for call in (weight_and_bias_gradients, torch.ops.ao_lab.weight_and_bias_gradients, compiled):
                    yield from all_equal(f"{call} {shape} {dtype}", call(g, x), right)
                views = {
                    "columns": torch.cat([g, g], 1)[:, : g.shape[1]],
                    "odd address": torch.cat([g.new_zeros(1), g.view(-1)])[1:].view(g.shape),
                    "transposed": g.t().contiguous().t(),
                }
                for name, other in views.items():
                    yield from all_equal(
                        f"{name} {shape} {dtype}", weight_and_bias_gradients(other, x), right
                    )
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    made = weight_and_bias_gradients(g, x)
                torch.cuda.current_stream().wait_stream(side)
                yield from all_equal(f"another stream {shape} {dtype}", made, right)


def gradient_times(asked: Asked) -> Iterator[Row]:
    """Ways of the gradients of weight and bias; then plans of sums of columns, beside torch's and a copy of as many bytes."""
    for rows, n, k in asked.shapes or (
        *GRADIENTS[:2],
        (4096, 4096, 1024),
        (32768, 4096, 1024),
        (8192, 14336, 4096),
    ):
        for dtype in HALVES:
            data = several(partial(matrices, (rows, n, k), dtype), 2 * rows * (n + k))
            calls: dict[str, list[Call]] = {"product alone": [partial(torch.mm, g.t(), x) for g, x in data]}
            calls |= {
                name: [partial(way, *one) for one in data] for name, way in WAYS.items() if way(*data[0])
            }
            yield {
                "shape": (rows, n, k),
                "dtype": str(dtype),
                "rule": gradients(rows, n, k, dtype),
                **measured(calls, 7),
            }
    for rows, length in (*SUMMED[:2], (16384, 14336), (4096, 1024), (1024, 1024), (512, 4096), (8192, 256)):
        data = several(
            lambda rows=rows, length=length: torch.randn(rows, length, device="cuda").half(),
            2.0 * rows * length,
        )
        plan, widths = plan_of(rows, length), [width for width in WIDTHS if length % width == 0]
        plans = dict.fromkeys(
            [plan, *(plan_of(rows, length, one, warps) for one in widths for warps in (8, 16, 32, 48))]
        )
        calls = {
            "torch": [partial(torch.sum, g, 0) for g in data],
            "copy": [
                partial(torch.empty_like(g[: math.ceil(rows / 2)]).copy_, g[: math.ceil(rows / 2)])
                for g in data
            ],
        }
        for one in plans:
            name = "x".join(map(str, one))
            calls[name] = [partial(sums_host.column_sums, g, g.dtype, None, one) for g in data]
        yield {"shape": (rows, length), "rule": "x".join(map(str, plan)), **measured(calls)}


SUBJECTS = (
    Subject("sparse_training", "training with 2:4 weights: masks, products, layers", checks, on_cpu=True),
    Subject(
        "sparse_training_kernels",
        "kernels of a 2:4 training step, masks as bits, steps in graphs",
        kernel_checks,
    ),
    Subject(
        "linear_gradients",
        "gradients of weight and bias together, sums of columns",
        gradient_checks,
        gradient_times,
    ),
)
