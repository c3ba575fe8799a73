"""The kernels of a 2:4 training step on a GPU: masked weights by bits, products of their shapes by bits and by time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F

import fast
import reference
from ao_lab.sparsity.training.products import PRODUCTS
from fast.kernels.sm90_sparse24_gemm import host
from fast.kernels.sm90_sparse24_gemm.arrange import restore
from fast.kernels.sm90_sparse24_gemm.variants import ELEMENTS, Variant, fitted, sources
from fast.launch.nvrtc import cached_cubin
from fast.sparsity.compress import COMPRESS_MASKED, DTYPES, compress_masked
from tests.gpu.sparsity.progress import Progress
from tests.gpu.sparsity.training.masked_weights import SHAPES, weights

#: Tokens, inputs, outputs.
Shape = tuple[int, int, int]
PUBLISHED: tuple[Shape, ...] = ((13008, 1024, 4096), (13008, 4096, 1024))
#: Tokens beside a tile's, features that fill no tile, K that fills no panel.
CUT: tuple[Shape, ...] = ((417, 272, 264), (700, 144, 200), (1037, 1040, 392))
REPEATS = 10


def variants() -> list[Variant]:
    """Tiles that the copy engine writes, with and without skew, and what they are compared with."""
    stored = [
        fitted(tokens, 2, 1, pair, 1, 16, stored=True)
        for pair in (2, 1)
        for tokens in (256, 208, 128, 192, 224, 240)
    ]
    even = [one._replace(skew=0) for one in stored[:2]]
    return [*stored, *even, *(fitted(tokens, 2, 1, 2, 1, 16) for tokens in (256, 208, 128))]


def compile_variant(job: tuple[Variant, str]) -> None:
    """Into the folder of cubins, in a process of its own."""
    variant, name = job
    cached_cubin(*sources(variant, ELEMENTS[name, name], name))


def compile_masked(job: tuple[torch.dtype, tuple[int, int], bool]) -> None:
    """Into Triton's folder."""
    dtype, shape, turned = job
    w = torch.zeros(shape, dtype=dtype, device="cuda")
    compress_masked(w, w != 0, turned)


def compile_mask(dtype: torch.dtype) -> None:
    """The search of transposable masks, into Triton's folder."""
    fast.prune_transposable(torch.zeros(128, 128, dtype=dtype, device="cuda"))


def check_masked(progress: Progress, dtype: torch.dtype) -> None:
    """Against the reference on small shapes; on large ones what comes back is the masked weight."""
    for shape in SHAPES:
        for turned in (False, True):
            for at, (w, mask) in enumerate(weights(shape, dtype, turned)):
                wanted = COMPRESS_MASKED.reference(None, (turned,), (w, mask))
                # The first call compiles, the second is the remembered one.
                for again in range(2):
                    made = compress_masked(w.cuda(), mask.cuda(), turned)
                    good = all(_same(one.cpu(), other) for one, other in zip(made, wanted, strict=True))
                    progress.check(f"masked {dtype} {shape} {turned} {at} {again}", good, "bits differ")
    for shape in ((4096, 1024), (1024, 4096), (1040, 528)):
        for turned in (False, True):
            for w, mask in weights(shape, dtype, turned, "cuda"):
                values, metadata = compress_masked(w, mask, turned)
                canonical = restore(metadata, 16, (values.shape[0], values.shape[1] // 4))
                right = torch.where(mask, w, torch.zeros_like(w))
                right = right.t().contiguous() if turned else right
                good = _same(fast.decompress(values, canonical), right)
                progress.check(f"masked {dtype} {shape} {turned}", good, "another weight comes back")


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, of NaN too."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def operands(shape: Shape, dtype: torch.dtype, *, integers: bool) -> list[torch.Tensor]:
    """x, the masked weight, its values and arranged metadata, a bias. integers: sums are exact in float32."""
    tokens, k, n = shape
    if integers:
        x, w = (torch.randint(-2, 3, size, device="cuda").to(dtype) for size in ((tokens, k), (n, k)))
        bias = torch.randint(-9, 10, (n,), device="cuda").to(dtype)
    else:
        x, w, bias = (torch.randn(size, device="cuda").to(dtype) for size in ((tokens, k), (n, k), (n,)))
    ranks = torch.rand(n, k // 4, 4, device="cuda").argsort(-1)
    mask = (ranks < 2).view(n, k)
    return [x, torch.where(mask, w, torch.zeros_like(w)), *compress_masked(w, mask), bias]


def check_products(progress: Progress, shape: Shape, dtype: torch.dtype, few: bool) -> None:
    """Every variant, and the one that is chosen, on integers, again and again."""
    x, w, values, metadata, bias = operands(shape, dtype, integers=True)
    name = str(dtype).removeprefix("torch.")
    for given in (bias, None):
        exact = x.float() @ w.float().t()
        exact = (exact if given is None else exact + given.float()).to(dtype)
        call: Callable[..., torch.Tensor]
        for variant in (None, *variants()[: 8 if few else None]):
            if variant is None:
                call, label = fast.linear_sparse, "chosen"
            else:
                call = host.product(name, True, (x, values, metadata, given, None, None), variant)
                label = variant.name
            made = [call(x, values, metadata, given) for _ in range(REPEATS)]
            good = all(torch.equal(one, exact) for one in made)
            progress.check(f"product {dtype} {shape} {label} bias {given is not None}", good, "bits differ")


def time_products(progress: Progress, shape: Shape, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of the dense product, of what is chosen and of every variant, in turn."""
    x, w, values, metadata, bias = operands(shape, dtype, integers=False)
    name = str(dtype).removeprefix("torch.")
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: F.linear(x, w, bias),
        "chosen": lambda: fast.linear_sparse(x, values, metadata, bias),
    }
    for variant in variants():
        call = host.product(name, True, (x, values, metadata, bias, None, None), variant)
        calls[variant.name] = partial(call, x, values, metadata, bias)
    found: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(9):
        for label, one in calls.items():
            found[label].append(microseconds(one))
    times = {label: statistics.median(each) for label, each in found.items()}
    progress.say(f"products {shape} {dtype}, us: " + ", ".join(f"{k} {v:.1f}" for k, v in times.items()))
    return times


def microseconds(call: Callable[[], object], calls: int = 10) -> float:
    """The mean of calls in a row, the first hidden behind a wait of the GPU."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(400_000)
    start.record()
    for _ in range(calls):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / calls


def checks(progress: Progress) -> Iterator[tuple[str, Callable[[], None]]]:
    """By name, the quickest first."""
    for dtype in DTYPES:
        yield f"masked {dtype}", partial(check_masked, progress, dtype)
        for shape in (*CUT, *PUBLISHED):
            yield (
                f"products {shape} {dtype}",
                partial(check_products, progress, shape, dtype, shape in PUBLISHED),
            )
        for shape in ((700, 144, 208), *PUBLISHED, (32768, 1024, 4096)):
            yield f"gradients {shape} {dtype}", partial(check_gradients, progress, shape, dtype)
        yield f"reference {dtype}", partial(check_reference, progress, dtype)


def check_gradients(progress: Progress, shape: Shape, dtype: torch.dtype) -> None:
    """All three gradients, W compressed beside dW's product or not: those of two calls, bit for bit, in replays too."""
    tokens, k, n = shape
    g, x, w = (torch.randn(size, device="cuda").to(dtype) for size in ((tokens, n), (tokens, k), (n, k)))
    mask = torch.as_tensor(fast.prune_transposable(w))
    ops, all_grads = torch.ops.ao_lab, PRODUCTS["sparse_wgmma"].all_grads
    right = (ops.sparse_wgmma_linear(g, w, mask, None, True), *ops.weight_and_bias_gradients(g, x))
    assert all_grads is not None
    eager = all_grads(g, x, w, mask, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = all_grads(g, x, w, mask, True)
    compiled = ops.sparse_wgmma_gradients(g, x, w, mask)
    for name, made in (("eager", eager), ("operator", compiled), *[("replay", captured)] * REPEATS):
        if name == "replay":
            graph.replay()
        good = all(torch.equal(one, other) for one, other in zip(made, right, strict=True))
        progress.check(f"gradients {dtype} {shape} {name}", good, "bits differ")


def check_reference(progress: Progress, dtype: torch.dtype) -> None:
    """The whole way beside the reference on the host."""
    x, _, values, metadata, bias = operands((300, 96, 80), dtype, integers=True)
    canonical = restore(metadata, 16, (values.shape[0], values.shape[1] // 4))
    wanted = reference.linear_sparse(*(t.cpu() for t in (x, values, canonical, bias)))
    progress.check(f"reference {dtype}", _same(fast.linear_sparse(x, values, metadata, bias).cpu(), wanted))


__all__ = [
    "PUBLISHED",
    "checks",
    "compile_mask",
    "compile_masked",
    "compile_variant",
    "time_products",
    "variants",
]
