"""On a GPU: weights in 2:4 storage and cuSPARSELt's product of them, against the dense layer.

    PYTHONPATH=. python tests/gpu/sparsity/validate_tensor.py [--shapes 4096x4096] [--seconds 150] [--no-compile]

Parts made on the GPU are those of the CPU, bit for bit, and come back as the dense equivalent. Algorithms are compared on
integers, whose sums are exact, and products of int8 layers with kernel "int8" of the dense layer, bit for bit. Products of
random data lie within one rounding to bfloat16 (2**-8) and the error of the sum: K additions, each within 2**-24 of the sum of
magnitudes in float32; float8 products and the sum before them are cut to 13 bits below the largest of each 32
(`reference.matmul`, tier "hopper_fp8"), so 33/32 K times 2**-13 of it, which rejects little; the two scales and the bias are
rounded to float32 once each, which the eight beyond K cover. So float8 layers are compared on integers under scales that are
powers of two as well, where everything is exact. Then files, CUDA graphs, torch.compile, and `ao_lab.tune`, whose choices and
algorithms are printed. What raises is counted, and the rest goes on; after --seconds nothing new starts. Exits with 1 where
anything differs, else with 2 where not all was compared.
"""

from __future__ import annotations

import argparse
import copy
import io
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from ao_lab import Recipe, SparseQuantizedTensor, quantized_compressed, tune
from ao_lab.gemm import cusparselt
from ao_lab.gemm.choices import forget
from ao_lab.gemm.cusparselt import Algorithm, Probe, known, refusal
from ao_lab.gemm.cusparselt import forget as forget_algorithms
from ao_lab.gemm.select import PRODUCTS
from reference import SCHEMES
from reference.sparsity.stored_codes import PLAIN_ELEMENTS
from tests.gpu.sparsity.progress import Progress

DTYPE = torch.bfloat16
SCHEMES_OF_PARTS = (
    "int8_rowwise", "int8_rowwise_asymmetric", "int4_g128", "int4_g128_asymmetric", "int3_g64", "fp8_tensorwise", "fp8_rowwise",
    "fp8_128x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "bfloat16",
)  # fmt: skip
RECIPES = {
    "bfloat16": Recipe(weight=PLAIN_ELEMENTS["bfloat16"]),
    "int8": Recipe(weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise"]),
    "int8, asymmetric inputs": Recipe(
        weight=SCHEMES["int8_rowwise"], activation=SCHEMES["int8_rowwise_asymmetric"]
    ),
    "fp8 rows": Recipe(weight=SCHEMES["fp8_rowwise"], activation=SCHEMES["fp8_rowwise"]),
    "fp8 tensors": Recipe(weight=SCHEMES["fp8_tensorwise"], activation=SCHEMES["fp8_tensorwise"]),
}
ROWS = (1, 5, 16, 100, 128, 512)
#: Elements of a weight whose parts the host makes too: NumPy takes a second for each million.
MOST_OF_PARTS = 1 << 20
PROGRESS = Progress(float("inf"))


def check(label: str, good: bool) -> None:
    """Count, and print what is wrong."""
    PROGRESS.check(label, good)


def pruned(n: int, k: int, *, integers: bool = False, seed: int = 0) -> torch.Tensor:
    """A 2:4 weight on the GPU, of small integers or normal numbers."""
    generator = torch.Generator("cuda").manual_seed(seed)
    w = (
        torch.randint(-3, 4, (n, k), device="cuda", generator=generator).float()
        if integers
        else torch.randn((n, k), device="cuda", generator=generator)
    )
    groups = w.view(-1, 4)
    # Not `fast.prune`: which two of a group stay is another command's matter.
    kept = torch.zeros_like(groups).scatter_(1, groups.abs().topk(2).indices, 1).view(n, k)
    return (w * kept).to(DTYPE)


def parts(scheme: str, n: int, k: int) -> None:
    """Parts made on the GPU and on the CPU, and both dense equivalents."""
    w = pruned(n, k)
    host, device = quantized_compressed(w.cpu(), scheme), quantized_compressed(w, scheme)
    check(f"parts of {scheme}, {n}x{k}", torch.equal(host, device.cpu()))
    check(
        f"dense equivalent of {scheme}, {n}x{k}",
        torch.equal(device.dequantize().cpu(), host.dequantize()),
    )
    rows = device[128:256]
    check(f"rows of {scheme}", torch.equal(rows.dequantize(), device.dequantize()[128:256]))
    check(f"copy of {scheme}", torch.equal(torch.zeros_like(device).copy_(device), device))


def weight(name: str, n: int, k: int, *, integers: bool = False) -> SparseQuantizedTensor:
    return quantized_compressed(pruned(n, k, integers=integers), RECIPES[name])


def inputs(rows: int, k: int, *, integers: bool = False) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    if integers:
        return torch.randint(-3, 4, (rows, k), device="cuda", generator=generator).to(DTYPE)
    return torch.randn((rows, k), device="cuda", generator=generator).to(DTYPE)


def verified(name: str, w: SparseQuantizedTensor) -> list[Algorithm]:
    """The algorithms that compute integers of this shape exactly, the library's choice first."""
    element = cusparselt.ELEMENTS[w.scheme.element]
    probe = Probe(w.shape[0], w.shape[1], 128, element, w.device)
    every = list(probe.algorithms())
    found = [one for one in every if probe.is_exact(one)]
    said = every[0] if every else "nothing"
    PROGRESS.say(f"      {name}: {len(found)} of {len(every)} algorithms are exact; the search said {said}")
    check(f"an exact algorithm for {name}", bool(found))
    return found


def products(name: str, n: int, k: int) -> None:
    """One algorithm's products of every number of rows, beside the dense layer."""
    w, exact = weight(name, n, k), weight(name, n, k, integers=True)
    reason = cusparselt.unsupported_reason(w.t(), DTYPE) or refusal(
        n, k, cusparselt.ELEMENTS[w.scheme.element], w.device
    )
    check(f"cuSPARSELt takes {name}: {reason}", reason is None)
    found = [] if reason is not None else verified(name, w)
    for algorithm in found[:1]:
        bias = torch.randn(n, device="cuda").to(DTYPE)
        for rows in ROWS:
            run(name, w, exact, rows, algorithm, bias)


def run(
    name: str,
    w: SparseQuantizedTensor,
    exact: SparseQuantizedTensor,
    rows: int,
    algorithm: Algorithm,
    bias: torch.Tensor,
) -> None:
    """Random data within the bound, integers exactly."""
    n, k = w.shape
    x = inputs(rows, k)
    y = cusparselt._multiplied(x, w.t(), bias, algorithm)
    label = f"{name}, {n}x{k}, {rows} rows"
    if name.startswith("int8"):
        dense = w.to_layout("plain")
        check(
            f"{label}: the bits of the dense int8 product",
            torch.equal(y, PRODUCTS["int8"].run(x, dense.t(), bias)),
        )
    a, b = cusparselt.quantized_input(x, w.t(), w.recipe.activation) if w.recipe.activation else None, w
    left = x if a is None else fast.dequantize(a, torch.float32)
    right = b.dequantize(torch.float32)
    sums = left.double() @ right.double().t() + bias.double()
    magnitudes = left.double().abs() @ right.double().abs().t() + bias.double().abs()
    unit = 33 / 32 * 2.0**-13 if name.startswith("fp8") else 2.0**-24
    bound = 2.0**-8 * sums.abs() + (k + 8) * unit * magnitudes
    check(f"{label}: random data within the bound", bool(((y.double() - sums).abs() <= bound).all()))
    if name.startswith("fp8"):
        xf, wf, bias = exact_float8(name, rows, n, k)
        whole = cusparselt._multiplied(xf, wf.t(), bias, algorithm)
        sums = xf.double() @ wf.dequantize(torch.float32).double().t() + bias.double()
        check(
            f"{label}: scales of powers of two and bias exactly", torch.equal(whole, sums.float().to(DTYPE))
        )
    xi = inputs(rows, k, integers=True)
    if w.recipe.activation is None:
        whole = cusparselt._multiplied(xi, exact.t(), None, algorithm)
        expected = (xi.double() @ exact.dequantize(torch.float32).double().t()).float().to(DTYPE)
        check(f"{label}: integers exactly", torch.equal(whole, expected))


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
    bias = torch.arange(n, device=w.device).remainder(17).sub(8).to(DTYPE)
    return x, quantized_compressed(w, RECIPES[name]), bias


def layer_of(name: str, n: int, k: int) -> nn.Linear:
    layer = nn.Linear(k, n, bias=True, dtype=DTYPE, device="cuda")
    layer.weight = nn.Parameter(weight(name, n, k), requires_grad=False)
    return layer.requires_grad_(False)


@torch.no_grad()
def tuned(name: str, n: int, k: int) -> None:
    """tune finds, verifies and keeps an algorithm; eager and captured layers follow, and one from a file."""
    layer, x = layer_of(name, n, k), inputs(512, k)
    made = tune(layer, x)
    PROGRESS.say(f"      {made}")
    found = known(str(x.device), n, k, 512, str(cusparselt.ELEMENTS[layer.weight.scheme.element]))
    check(f"{name}: an algorithm was found and kept: {found}", found is not None)
    y = layer(x)
    forget()
    forget_algorithms()
    check(f"{name}: the same bits after a restart", torch.equal(layer(x), y))
    check(f"{name}: the same bits ten times", all(torch.equal(layer(x), y) for _ in range(10)))
    check(f"{name}: the same bits in a CUDA graph", torch.equal(captured(lambda: layer(x)), y))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(layer)
    other.load_state_dict(torch.load(file, weights_only=True))
    check(f"{name}: the same bits from a file", torch.equal(other(x), y))


def captured(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a replayed graph."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    graph.replay()
    torch.cuda.synchronize()
    return y


@torch.no_grad()
def compiled(name: str, n: int, k: int) -> None:
    """A compiled layer with the algorithm that tune kept."""
    layer, x = layer_of(name, n, k), inputs(512, k)
    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True)(x)
    check(f"{name}: the same bits compiled", torch.equal(y, layer(x)))


def perform(shapes: list[tuple[int, int]], compiles: bool) -> None:
    """All of it: products first, which nothing else has seen, and what takes long last."""
    last = shapes[-1]
    for n, k in shapes:
        for name in RECIPES:
            PROGRESS.attempt(f"products {n}x{k} {name}", lambda name=name, n=n, k=k: products(name, n, k))
    for name in RECIPES:
        PROGRESS.attempt(f"tuned {name}", lambda name=name: tuned(name, *last))
    for n, k in shapes:
        for scheme in SCHEMES_OF_PARTS if n * k <= MOST_OF_PARTS else ():
            PROGRESS.attempt(f"parts {n}x{k} {scheme}", lambda one=scheme, n=n, k=k: parts(one, n, k))
    for name in RECIPES if compiles else ():
        PROGRESS.attempt(f"compiled {name}", lambda name=name: compiled(name, *last))


def main(arguments: list[str] | None = None) -> int:
    """All of it; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="*", default=["256x512", "1024x4096", "4096x4096"])
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args(arguments)
    PROGRESS.end = PROGRESS.begin + options.seconds
    shapes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes)]
    PROGRESS.say(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuSPARSELt {torch.backends.cusparselt.version()}"
    )
    with tempfile.TemporaryDirectory() as cache:
        os.environ["AO_LAB_CACHE"] = cache
        perform(shapes, not options.no_compile)
    return PROGRESS.verdict()


if __name__ == "__main__":
    sys.exit(main())
