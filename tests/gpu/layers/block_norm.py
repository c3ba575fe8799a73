"""On a GPU: the FP8 product with block norm, hard swish and codes in its epilogue, against the reference and plain products.

    PYTHONPATH=. python tests/gpu/layers/block_norm.py [--part bits times] [--shapes 6144x18432x8192 ...] [--out FOLDER]

bits: cases of tests/support/block_norm.py, whose sums are exact. times: M x K x N, CUDA graphs over operands that the
second-level cache cannot hold: the product with its epilogue (bfloat16, and codes with scales of 128 columns); torch's product
with scales of rows alone; that product, and what torch.compile makes of norm, activation and codes behind it. A line each, and
rows in FOLDER/block_norm.csv (else $OUT). About 90 seconds, of which compiling takes half.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
import reference
from fast.kernels.triton_scaled_mm import block_norm as host
from reference import Quantized
from tests.gpu.harness.lines import differs, on_gpu, say, write_rows
from tests.gpu.harness.timing import captured, elapsed, several
from tests.support.block_norm import CASES, operands

REPLAYS = 15
SHAPES = ("6144x18432x8192", "6144x8192x8192", "8192x3456x1024", "6144x4608x4096")


def bits() -> None:
    """Values that differ."""
    for case in CASES:
        _, activation, scheme, dtype, _ = case
        x, w, gain, bias = operands(case)
        options = {"activation": activation, "scheme": scheme or None, "dtype": dtype}
        expected = reference.linear_block_norm(x, w, gain, bias=bias, **options)
        found = fast.linear_block_norm(
            on_gpu(x), on_gpu(w), gain.cuda(), bias=None if bias is None else bias.cuda(), **options
        )
        pairs = (
            [(found.codes, expected.codes), (found.scale, expected.scale)] if scheme else [(found, expected)]
        )
        wrong = sum(int((one.cpu() != other).sum()) for one, other in pairs)
        say("bits", str(case), wrong, "differ")


def graph_time(calls: list[Callable[[], object]]) -> float:
    """Microseconds of one of the calls, all of them in a CUDA graph; the median of replays."""
    graph, count = captured(calls)
    return statistics.median(elapsed(graph.replay) for _ in range(REPLAYS)) / count


@torch.compile
def behind(y: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block norm, hard swish, scales of 128 columns and codes, as the compiler fuses them."""
    blocks = functional.rms_norm(y.float().reshape(y.shape[0], -1, host.BLOCK), (host.BLOCK,), None, 1e-6)
    v = functional.hardswish(blocks.reshape(y.shape) * gain).reshape(y.shape[0], -1, host.GROUP)
    scale = v.abs().amax(-1, keepdim=True) / 448
    return (v / scale).to(torch.float8_e4m3fn).reshape(y.shape), scale[..., 0]


def times(shape: str) -> None:
    """Microseconds of a shape, and ratios to the plain product."""
    m, k, n = map(int, shape.split("x"))
    gain = torch.rand(n, device="cuda")

    def made() -> tuple[Quantized, Quantized]:
        x, w = (torch.randn((rows, k), device="cuda", dtype=torch.bfloat16) for rows in (m, n))
        return fast.quantize(x, "fp8_rowwise"), fast.quantize(w, "fp8_rowwise")

    pairs = several(made, (m + n) * k)
    element = torch.float8_e4m3fn

    def plain(x: Quantized, w: Quantized) -> torch.Tensor:
        a, b = x.codes.view(element), w.codes.view(element)
        return torch._scaled_mm(a, b.t(), x.scale, w.scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    def ours(x: Quantized, w: Quantized, scheme: str | None) -> object:
        return fast.linear_block_norm(x, w, gain, activation="hard_swish", scheme=scheme)

    base = graph_time([lambda p=p: plain(*p) for p in pairs])
    say("times", f"{shape} torch's product", base, "us", tflops=round(2 * m * n * k / base / 1e6))
    for name, scheme in (("bfloat16", None), ("codes", host.SCHEME_NAME)):
        us = graph_time([lambda p=p, s=scheme: ours(*p, s) for p in pairs])
        say("times", f"{shape} epilogue, {name}", us, "us", ratio=round(us / base, 3))
    us = graph_time([lambda p=p: behind(plain(*p), gain) for p in pairs])
    say("times", f"{shape} product, then one fused kernel", us, "us", ratio=round(us / base, 3))


def main() -> int:
    """The parts that were asked for; 1 where bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["bits", "times"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    try:
        if "bits" in options.part:
            bits()
        for shape in options.shapes if "times" in options.part else ():
            times(shape)
    finally:
        write_rows("block_norm.csv", options.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
