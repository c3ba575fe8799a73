"""Weights in 2:4 storage as layers have them: by cuSPARSELt, by our own kernel, and `fast.sparsegpt`, which makes them.

Parts made on the GPU are those of the CPU, bit for bit, and come back as the dense equivalent. Algorithms are compared on
integers, whose sums are exact, and products of int8 layers with kernel "int8" of the dense layer, bit for bit. Products of
random data lie within one rounding to bfloat16 (2**-8) and the error of the sum: K additions, each within 2**-24 of the sum of
magnitudes in float32; float8 products and the sum before them are cut to 13 bits below the largest of each 32
(`reference.matmul`, tier "hopper_fp8"), so 33/32 K times 2**-13 of it, which rejects little; the two scales and the bias are
rounded to float32 once each, which the eight beyond K cover. So float8 layers are compared on integers under scales that are
powers of two as well, where everything is exact.
"""

from __future__ import annotations

import copy
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import fast
import reference
from ao_lab import Recipe, SparseQuantizedTensor, quantized_compressed, tune
from ao_lab.gemm import cusparselt, select, sparse
from ao_lab.gemm.choices import forget
from ao_lab.gemm.cusparselt import Algorithm, Probe, known, refusal
from ao_lab.gemm.cusparselt import forget as forget_algorithms
from ao_lab.gemm.dense import rounded
from ao_lab.gemm.select import PRODUCTS
from fast.sparsity.sparsegpt import sparsegpt_on_device
from reference import SCHEMES
from reference.arrays.bridges import to_numpy, to_torch
from reference.sparsity.compress import PLAIN_ELEMENTS
from tests.gpu.harness.subject import Asked, Check, Row, Subject, beyond, differs

BF16, F16 = torch.bfloat16, torch.float16
SHAPES = ((256, 512), (1024, 4096), (4096, 4096))
ROWS = (1, 5, 16, 100, 128, 512)
PARTS = (
    "int8_rowwise", "int8_rowwise_asymmetric", "int4_g128", "int4_g128_asymmetric", "int3_g64", "fp8_tensorwise", "fp8_rowwise",
    "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "bfloat16",
)  # fmt: skip
RECIPES = {
    "bfloat16": Recipe(weight=PLAIN_ELEMENTS["bfloat16"]),
    **{
        name: Recipe(weight=SCHEMES[weight], activation=SCHEMES[inputs])
        for name, weight, inputs in (
            ("int8", "int8_rowwise", "int8_rowwise"), ("int8, asymmetric inputs", "int8_rowwise", "int8_rowwise_asymmetric"),
            ("fp8 rows", "fp8_rowwise", "fp8_rowwise"), ("fp8 tensors", "fp8_tensorwise", "fp8_tensorwise"),
        )
    },
}  # fmt: skip


def pruned(n: int, k: int, *, integers: bool = False) -> torch.Tensor:
    """A 2:4 weight on the GPU, of small integers or normal numbers. Not by `fast.prune`: which two of a group stay is another
    check's matter."""
    generator = torch.Generator("cuda").manual_seed(0)
    w = torch.randn((n, k), device="cuda", generator=generator)
    if integers:
        w = torch.randint(-3, 4, (n, k), device="cuda", generator=generator).float()
    groups = w.view(-1, 4)
    mask = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2).indices, 1).view(n, k)
    return (w * mask).to(BF16)


def inputs(rows: int, k: int, *, integers: bool = False) -> torch.Tensor:
    """Of bfloat16."""
    generator = torch.Generator("cuda").manual_seed(1)
    if integers:
        return torch.randint(-3, 4, (rows, k), device="cuda", generator=generator).to(BF16)
    return torch.randn((rows, k), device="cuda", generator=generator).to(BF16)


def library_checks(asked: Asked) -> Iterator[Check]:
    """Products first, which nothing else has seen, and what takes long last."""
    shapes = asked.shapes or SHAPES
    last = shapes[-1]
    for n, k in shapes:
        for name in RECIPES:
            yield f"products {n}x{k} {name}", partial(wrong_products, name, n, k)
    for name in RECIPES:
        yield f"tuned {name}", partial(wrong_tuned, name, *last)
    for n, k in shapes:
        # NumPy takes a second for each million of elements.
        for scheme in PARTS if n * k <= 1 << 20 else ():
            yield f"parts {n}x{k} {scheme}", partial(wrong_parts, scheme, n, k)
    for name in RECIPES:
        yield f"compiled {name}", partial(wrong_compiled, name, *last)


def wrong_parts(scheme: str, n: int, k: int) -> Iterator[str]:
    """Parts made on the GPU and on the CPU, and both dense equivalents."""
    w = pruned(n, k)
    host, device = quantized_compressed(w.cpu(), scheme), quantized_compressed(w, scheme)
    if not torch.equal(host, device.cpu()):
        yield "parts are others than on the host"
    yield from differs("dense equivalent", device.dequantize().cpu(), host.dequantize())
    yield from differs("rows", device[128:256].dequantize(), device.dequantize()[128:256])
    if not torch.equal(torch.zeros_like(device).copy_(device), device):
        yield "a copy differs"


def weight(name: str, n: int, k: int, *, integers: bool = False) -> SparseQuantizedTensor:
    """By a recipe."""
    return quantized_compressed(pruned(n, k, integers=integers), RECIPES[name])


def wrong_products(name: str, n: int, k: int) -> Iterator[str]:
    """One algorithm's products of every number of rows, beside the dense layer; first that some are exact on integers."""
    w, exact = weight(name, n, k), weight(name, n, k, integers=True)
    element = cusparselt.ELEMENTS[w.scheme.element]
    if reason := cusparselt.unsupported_reason(w.t(), BF16) or refusal(n, k, element, w.device):
        yield f"cuSPARSELt does not take it: {reason}"
        return
    probe = Probe(n, k, 128, element, w.device)
    algorithm = next((one for one in probe.algorithms() if probe.is_exact(one)), None)
    if algorithm is None:
        yield "no algorithm is exact"
        return
    bias = torch.randn(n, device="cuda").to(BF16)
    for rows in ROWS:
        for line in wrong_rows(name, w, exact, rows, algorithm, bias):
            yield f"{rows} rows: {line}"


def wrong_rows(
    name: str, w: SparseQuantizedTensor, exact: SparseQuantizedTensor, rows: int, algorithm: Algorithm, bias: torch.Tensor
) -> Iterator[str]:  # fmt: skip
    """Random data within the bound, integers exactly."""
    n, k = w.shape
    x = inputs(rows, k)
    y = cusparselt._multiplied(x, w.t(), bias, algorithm)
    if name.startswith("int8"):
        dense = w.to_layout("plain")
        yield from differs("the dense int8 product", y, PRODUCTS["int8"].run(x, dense.t(), bias))
    codes = cusparselt.quantized_input(x, w.t(), w.recipe.activation) if w.recipe.activation else None
    left = (x if codes is None else fast.dequantize(codes, torch.float32)).double()
    right = w.dequantize(torch.float32).double().t()
    sums, magnitudes = left @ right + bias.double(), left.abs() @ right.abs() + bias.double().abs()
    unit = 33 / 32 * 2.0**-13 if name.startswith("fp8") else 2.0**-24
    yield from beyond("random data", y, sums, 2.0**-8 * sums.abs() + (k + 8) * unit * magnitudes)
    if name.startswith("fp8"):
        xf, wf, added = exact_float8(name, rows, n, k)
        whole = cusparselt._multiplied(xf, wf.t(), added, algorithm)
        sums = xf.double() @ wf.dequantize(torch.float32).double().t() + added.double()
        yield from differs("scales of powers of two and bias", whole, sums.float().to(BF16))
    if w.recipe.activation is None:
        xi = inputs(rows, k, integers=True)
        expected = (xi.double() @ exact.dequantize(torch.float32).double().t()).float().to(BF16)
        yield from differs("integers", cusparselt._multiplied(xi, exact.t(), None, algorithm), expected)


def exact_float8(
    name: str, rows: int, n: int, k: int
) -> tuple[torch.Tensor, SparseQuantizedTensor, torch.Tensor]:
    """Inputs, weight and bias whose product is exact: integers, under scales that are powers of two, other ones for each row.

    A scale is the largest magnitude over 448: 448 stands in a column of either operand where the other one has zeros.
    """
    x, w = inputs(rows, k, integers=True), pruned(n, k, integers=True)
    x[:, :8], w[:, :8] = 0, 0
    x[:, 0], w[:, 4] = 448, 448
    if name == "fp8 rows":
        x *= 2.0 ** (torch.arange(rows, device=x.device) % 5 - 2)[:, None]
        w *= 2.0 ** (torch.arange(n, device=w.device) % 3 - 1)[:, None]
    bias = torch.arange(n, device=w.device).remainder(17).sub(8).to(BF16)
    return x, quantized_compressed(w, RECIPES[name]), bias


def layer_of(name: str, n: int, k: int) -> nn.Linear:
    """With a weight by a recipe."""
    layer = nn.Linear(k, n, bias=True, dtype=BF16, device="cuda")
    layer.weight = nn.Parameter(weight(name, n, k), requires_grad=False)
    return layer.requires_grad_(False)


@contextmanager
def cache_of_its_own() -> Iterator[None]:
    """What is tuned here is not for others."""
    before = os.environ.get("AO_LAB_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AO_LAB_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("AO_LAB_CACHE")
            os.environ.update({} if before is None else {"AO_LAB_CACHE": before})


@torch.no_grad()
def wrong_tuned(name: str, n: int, k: int) -> Iterator[str]:
    """tune finds, verifies and keeps an algorithm; eager and captured layers follow, and one from a file."""
    with cache_of_its_own():
        layer, x = layer_of(name, n, k), inputs(512, k)
        tune(layer, x)
        if known(str(x.device), n, k, 512, str(cusparselt.ELEMENTS[layer.weight.scheme.element])) is None:
            yield "no algorithm was found and kept"
        y = layer(x)
        forget()
        forget_algorithms()
        yield from differs("after a restart", layer(x), y)
        for _ in range(10):
            yield from differs("again", layer(x), y)
        yield from differs("in a CUDA graph", captured(lambda: layer(x)), y)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        other = copy.deepcopy(layer)
        other.load_state_dict(torch.load(file, weights_only=True))
        yield from differs("from a file", other(x), y)


def captured(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a replayed graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    return y


@torch.no_grad()
def wrong_compiled(name: str, n: int, k: int) -> Iterator[str]:
    """A compiled layer with the algorithm that tune kept."""
    layer, x = layer_of(name, n, k), inputs(512, k)
    torch._dynamo.reset()
    yield from differs("compiled", torch.compile(layer, fullgraph=True)(x), layer(x))


# Layers by our own kernel.

#: Weight, input, and the dtype of inputs.
TAKEN = (
    ("int8_rowwise", "int8_rowwise", BF16), ("fp8_rowwise", "fp8_rowwise", BF16), ("bfloat16", "", BF16),
    ("fp8_tensorwise", "fp8_tensorwise", F16), ("float16", "", F16), ("fp8_rowwise", "fp8_tensorwise", torch.float32),
)  # fmt: skip
#: Outputs and inputs: whole tiles, and edges.
OWN_SHAPES = ((512, 1024), (344, 672))
#: One rounding to bfloat16 is 2**-9 of a value at most, and sums of float8 are cut.
LIMIT = 5e-3


def own_weight(scheme: str, activation: str, shape: tuple[int, int], seed: int = 0) -> SparseQuantizedTensor:
    """A random 2:4 weight (N, K)."""
    torch.manual_seed(seed)
    dense = torch.randn(shape, device="cuda").to(F16 if scheme == "float16" else BF16)
    dense = dense.masked_fill(~fast.prune(dense), 0)
    if not activation:
        return quantized_compressed(dense, scheme)
    return quantized_compressed(dense, Recipe(weight=SCHEMES[scheme], activation=SCHEMES[activation]))


def own_checks(asked: Asked) -> Iterator[Check]:
    """Layers, then tuning."""
    for shape in OWN_SHAPES:
        for scheme, activation, dtype in TAKEN:
            yield f"{scheme} {shape} {dtype}", partial(wrong_layer, scheme, activation, dtype, shape)
    for scheme, activation, dtype in TAKEN[:3]:
        yield f"tuned {scheme}", partial(wrong_own_tuned, scheme, activation, dtype)


def wrong_layer(scheme: str, activation: str, dtype: torch.dtype, shape: tuple[int, int]) -> Iterator[str]:
    """Every number of rows; a graph; a weight that was copied into, whose metadata is arranged anew."""
    w = own_weight(scheme, activation, shape)
    if reason := sparse.wgmma_unsupported_reason(w.t(), dtype):
        yield f"not taken: {reason}"
    if (default := select.select_kernel(w.t(), dtype)) != sparse.WGMMA_NAME:
        yield f"by default it is {default}"
    for rows in (1, 5, 16, 100, 300):
        x = torch.randn(rows, shape[1], device="cuda").to(dtype)
        for bias in (None, torch.randn(shape[0], device="cuda").to(dtype)):
            label, found = f"{rows} rows{'' if bias is None else ' bias'}", sparse.wgmma_run(x, w.t(), bias)
            if scheme.startswith("int8"):
                yield from differs(label, found, PRODUCTS["int8"].run(x, w.to_layout("plain").t(), bias))
            elif not (error := off(x, w, bias, found)) <= LIMIT:
                yield f"{label}: off by {error:.1e}"
            yield from differs(f"{label} again", sparse.wgmma_run(x, w.t(), bias), found)
    x = torch.randn(16, shape[1], device="cuda").to(dtype)
    yield from differs(
        "graph", captured(lambda: sparse.wgmma_run(x, w.t(), None)), sparse.wgmma_run(x, w.t(), None)
    )
    other = own_weight(scheme, activation, shape, seed=1)
    w.copy_(other)
    yield from differs("copied", sparse.wgmma_run(x, w.t(), None), sparse.wgmma_run(x, other.t(), None))


def off(x: torch.Tensor, w: SparseQuantizedTensor, bias: torch.Tensor | None, found: torch.Tensor) -> float:
    """The difference from the product of the input as it is quantized, over its norm."""
    given = x if w.recipe.activation is None else rounded(x.float(), w.t())
    exact = given.double() @ w.dequantize(torch.float32).double().t()
    exact = exact if bias is None else exact + bias.double()
    return float((found.double() - exact).norm() / exact.norm())


@torch.no_grad()
def wrong_own_tuned(scheme: str, activation: str, dtype: torch.dtype) -> Iterator[str]:
    """Candidates of a layer, and that it computes as its choice does, compiled too."""
    layer = nn.Linear(4096, 4096, bias=False, device="cuda", dtype=dtype)
    layer.weight = nn.Parameter(own_weight(scheme, activation, (4096, 4096)), requires_grad=False)
    x = torch.randn(128, 4096, device="cuda").to(dtype)
    with cache_of_its_own():
        (choice,) = tune(layer, x, launches="graph").choices
        if sparse.WGMMA_NAME not in [one.kernel for one in choice.candidates if one.seconds is not None]:
            yield f"it was not timed: {choice}"
        right = PRODUCTS[choice.kernel].run(x, layer.weight.t(), None)
        yield from differs("layer", layer(x), right)
        compiled = torch.compile(layer, fullgraph=True)(x)
    error = float((compiled.float() - right.float()).norm() / right.float().norm())
    if not error <= LIMIT:
        yield f"compiled off by {error:.1e}"


# Weights that `fast.sparsegpt` makes.

OPTIONS = {"pattern": "2:4", "block": 128}
#: Share of weights that may differ where sums are rounded in another order.
FEW = 1e-4


def integer_hessian(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of small integers and a Hessian whose factors are integers within a unit triangle."""
    rng, at = np.random.default_rng(1), np.arange(columns - 1)
    upper = np.eye(columns)
    upper[at, at + 1] = rng.integers(-1, 2, columns - 1) * (at % 8 != 7)
    inverse = np.linalg.inv(upper).round()
    w = torch.from_numpy(rng.integers(-8, 9, (rows, columns)).astype(np.float32))
    return w, torch.from_numpy(inverse @ inverse.T)


def usual_hessian(rows: int, columns: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal weights, and inputs that depend on each other."""
    torch.manual_seed(2)
    x = torch.randn(2 * columns, columns, device=device)
    x = x + x.roll(1, 1) * 0.5 + torch.randn(2 * columns, 1, device=device)
    return torch.randn(rows, columns, device=device, dtype=BF16), x.T @ x


def sparsegpt_checks(asked: Asked) -> Iterator[Check]:
    """Exact sums, whose bits are the reference's; a usual Hessian, where rounding alone decides which weights differ."""
    size = 256 if asked.device == "cpu" else 1024
    yield "exact sums", partial(wrong_sparsegpt, *integer_hessian(64, size), 0.0, asked.device, 0.0)
    yield "usual sums", partial(wrong_sparsegpt, *usual_hessian(256, size, "cpu"), 0.01, asked.device, FEW)


def wrong_sparsegpt(
    w: torch.Tensor, hessian: torch.Tensor, damping: float, device: str, most: float
) -> Iterator[str]:
    """More weights or elements of the mask than may be are not the reference's."""
    wanted = reference.sparsegpt(to_numpy(w), hessian.numpy(), damping=damping, **OPTIONS)
    made = sparsegpt_on_device(w.to(device), hessian.to(device), damping=damping, **OPTIONS)
    other = (made.weights.cpu() != to_torch(wanted.weights)) | (made.mask.cpu() != to_torch(wanted.mask))
    if (share := float(other.double().mean())) > most:
        yield f"{share:.2e} of the weights differ, losses {made.loss} and {wanted.loss}"


def sparsegpt_times(asked: Asked) -> Iterator[Row]:
    """Seconds and memory of two calls, at the sizes of layers of Llama-3.1-8B."""
    for rows, columns in asked.shapes or ((4096, 4096), (4096, 14336)):
        w, hessian = usual_hessian(rows, columns, "cuda")
        for call in ("first", "again"):
            torch.cuda.synchronize()
            start = time.perf_counter()
            made: Any = sparsegpt_on_device(w, hessian, damping=0.01, **OPTIONS)
            torch.cuda.synchronize()
            took, most = time.perf_counter() - start, torch.cuda.max_memory_allocated()
            yield {
                "shape": (rows, columns),
                "call": call,
                "seconds": took,
                "bytes": most,
                "loss": float(made.loss),
            }


SUBJECTS = (
    Subject("cusparselt", "layers of weights in 2:4 storage by cuSPARSELt", library_checks),
    Subject("sparse_wgmma", "layers of weights in 2:4 storage by our own kernel", own_checks),
    Subject("sparsegpt", "weights pruned by SparseGPT", sparsegpt_checks, sparsegpt_times, on_cpu=True),
)
