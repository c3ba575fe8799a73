"""Kernel `sparse_wgmma` of `ao_lab` on Hopper: layers by their bits or bounds, eager, in CUDA graphs and compiled; `tune`.

    PYTHONPATH=. python tests/gpu/sparsity/wgmma/validate_sparse_wgmma.py [--seconds 60]

Weights of int8, fp8 (scales of rows, and one), bfloat16 and float16 in 2:4 storage, several rows of inputs, with a bias and
without. int8 is compared with kernel "int8" of the dense equivalent, bit for bit; others with the dense equivalent's product in
float64, by the norm. What is replayed from a graph and what is compiled has the bits of the eager call, a weight that was
copied into those of the new one. Then `tune` of one layer of each scheme, its candidates printed. Exits with 1 where something
differs, with 2 where not all was looked at.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from ao_lab import Recipe, SparseQuantizedTensor, quantized_compressed, tune
from ao_lab.gemm import select, sparse
from ao_lab.gemm.dense import rounded
from ao_lab.gemm.select import PRODUCTS
from fast import prune
from reference import SCHEMES
from tests.gpu.sparsity.progress import Progress

BF16, F16 = torch.bfloat16, torch.float16
#: Weight, input, and the dtype of inputs.
TAKEN = (
    ("int8_rowwise", "int8_rowwise", BF16), ("fp8_rowwise", "fp8_rowwise", BF16), ("bfloat16", "", BF16),
    ("fp8_tensorwise", "fp8_tensorwise", F16), ("float16", "", F16), ("fp8_rowwise", "fp8_tensorwise", torch.float32),
)  # fmt: skip
ROWS = (1, 5, 16, 100, 300)
#: Outputs and inputs: whole tiles, and edges.
SHAPES = ((512, 1024), (344, 672))
#: One rounding to bfloat16 is 2**-9 of a value at most, and sums of float8 are cut.
LIMIT = 5e-3


def weight(
    scheme: str, activation: str, dtype: torch.dtype, shape: tuple[int, int], seed: int = 0
) -> SparseQuantizedTensor:
    """A random 2:4 weight (N, K)."""
    torch.manual_seed(seed)
    dense = torch.randn(shape, device="cuda").to(F16 if scheme == "float16" else BF16)
    dense = dense.masked_fill(~prune(dense), 0)
    if not activation:
        return quantized_compressed(dense, scheme)
    return quantized_compressed(dense, Recipe(weight=SCHEMES[scheme], activation=SCHEMES[activation]))


def layers(
    progress: Progress, scheme: str, activation: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """Every number of rows."""
    w = weight(scheme, activation, dtype, shape)
    reason = sparse.wgmma_unsupported_reason(w.t(), dtype)
    label = f"{scheme} {shape}"
    progress.check(f"{label} taken", reason is None, str(reason))
    default = select.select_kernel(w.t(), dtype)
    progress.check(f"{label} default", default == sparse.WGMMA_NAME, default)
    for rows in ROWS:
        x = torch.randn(rows, shape[1], device="cuda").to(dtype)
        for bias in (None, torch.randn(shape[0], device="cuda").to(dtype)):
            found = sparse.wgmma_run(x, w.t(), bias)
            name = f"{label} {rows} rows{'' if bias is None else ' bias'}"
            if scheme.startswith("int8"):
                right = PRODUCTS["int8"].run(x, w.to_layout("plain").t(), bias)
                progress.check(name, torch.equal(found, right), "bits differ")
            else:
                progress.check(name, (error := off(x, w, bias, found)) <= LIMIT, f"off by {error:.1e}")
            progress.check(
                f"{name} again", torch.equal(found, sparse.wgmma_run(x, w.t(), bias)), "other bits"
            )
    captured(progress, label, w, torch.randn(16, shape[1], device="cuda").to(dtype))
    renewed(progress, label, w, weight(scheme, activation, dtype, shape, seed=1), dtype)


def off(x: torch.Tensor, w: SparseQuantizedTensor, bias: torch.Tensor | None, found: torch.Tensor) -> float:
    """The difference from the product of the input as it is quantized, over its norm."""
    scheme = w.recipe.activation
    inputs = x if scheme is None else rounded(x.float(), w.t())
    exact = inputs.double() @ w.dequantize(torch.float32).double().t()
    exact = exact if bias is None else exact + bias.double()
    return float((found.double() - exact).norm() / exact.norm())


def captured(progress: Progress, label: str, w: SparseQuantizedTensor, x: torch.Tensor) -> None:
    """A CUDA graph, and a compiled program."""
    right = sparse.wgmma_run(x, w.t(), None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse.wgmma_run(x, w.t(), None)
    y.zero_()
    graph.replay()
    torch.cuda.synchronize()
    progress.check(f"{label} graph", torch.equal(y, right), "bits differ")


def renewed(
    progress: Progress, label: str, w: SparseQuantizedTensor, other: SparseQuantizedTensor, dtype: torch.dtype
) -> None:
    """A weight that was copied into: its metadata is arranged anew."""
    x = torch.randn(16, other.shape[1], device="cuda").to(dtype)
    w.copy_(other)
    same = torch.equal(sparse.wgmma_run(x, w.t(), None), sparse.wgmma_run(x, other.t(), None))
    progress.check(f"{label} copied", same, "bits differ")


def tuned(progress: Progress, scheme: str, activation: str, dtype: torch.dtype) -> None:
    """Candidates of a layer, and that it computes as its choice does, compiled too."""
    layer = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=dtype)
    layer.weight = torch.nn.Parameter(weight(scheme, activation, dtype, (4096, 4096)), requires_grad=False)
    x = torch.randn(128, 4096, device="cuda").to(dtype)
    (choice,) = tune(layer, x, launches="graph").choices
    progress.say(f"{scheme}: {choice}")
    timed = [one.kernel for one in choice.candidates if one.seconds is not None]
    reasons = {one.kernel: one.reason for one in choice.candidates}
    progress.check(f"{scheme} timed", "sparse_wgmma" in timed, reasons.get("sparse_wgmma", "not listed"))
    with torch.no_grad():
        right = PRODUCTS[choice.kernel].run(x, layer.weight.t(), None)
        progress.check(f"{scheme} layer", torch.equal(layer(x), right), "bits differ")
        compiled = torch.compile(layer, fullgraph=True)(x)
    error = float((compiled.float() - right.float()).norm() / right.float().norm())
    progress.check(f"{scheme} compiled", error <= LIMIT, f"off by {error:.1e}")


def main(arguments: list[str] | None = None) -> int:
    """Layers, then tuning."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="after these nothing new starts")
    options = parser.parse_args(arguments)
    progress = Progress(options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        # What is tuned here is not for others; cubins stay where they are only if the variable was not set.
        os.environ.setdefault("AO_LAB_CACHE", folder)
        for shape in SHAPES:
            for one in TAKEN:
                progress.attempt(f"{one[0]} {shape}", partial(layers, progress, *one, shape))
        for one in TAKEN[:3]:
            progress.attempt(f"{one[0]} tuned", partial(tuned, progress, *one))
    return progress.verdict()


if __name__ == "__main__":
    raise SystemExit(main())
