"""On a GPU: norms that write FP8 codes with a scale a row: RMSNorm by elements of a program and of a thread, LayerNorm's bits.

    PYTHONPATH=. python tests/gpu/layers/norm_tiles.py [--rows 36032] [--width 512] [--out FOLDER]

Microseconds of the kernel alone in turn with what torch.compile makes of the same formula, with copies of as many bytes, and
with the matmul behind it (2048 outputs) alone; of norm and matmul in a row, where the codes lie in the L2 cache unless x drives
them out: as it is, by x that is to leave the cache first, and by torch.compile, which asks for that. Codes and scales are
compared with those of the tiles that serve. `layer_norm_quantize` is compared with the reference first (rows of several
programs, filled up, with NaN and infinities), and timed. A line each, and rows in FOLDER/norm_tiles.csv (else $OUT); 25 s.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
import reference
from experiments.loka.fused_speed import EPS, ROWWISE, by_compiler, rms, scaled_mm
from fast.kernels.layers import rms_norm as kernel
from reference import Quantized
from tests.gpu.harness.lines import differs, say, write_rows
from tests.gpu.harness.timing import measured, several

#: Elements of a program, of a thread; the first ones serve.
TILES = ((1024, 32), (4096, 64), (2048, 64), (4096, 32), (2048, 32), (1024, 16), (512, 16))
OUTPUTS = 2048
#: How the L2 cache keeps x.
POLICIES = (kernel.EVICT, "")


def quantized(
    x: torch.Tensor, gain: torch.Tensor, elements: int, per_thread: int, policy: str = POLICIES[0]
) -> Quantized:
    """Codes and scales by tiles of a size; no call is remembered."""
    tile = mock.Mock(return_value=(elements, per_thread))
    with mock.patch.object(kernel, "_program", tile), mock.patch.object(kernel, "EVICT", policy):
        made = kernel.rms_norm_quantize(x, gain, ROWWISE, EPS, None, False)
    if made is None:
        raise ValueError(f"no kernel for {tuple(x.shape)}")
    return made[0]


#: Shapes and schemes of LayerNorm whose bits are compared.
LAYER_SHAPES = ((67, 512), (33, 96), (65, 1536), (16, 4096), (5, 14336), (129, 1))
LAYER_SCHEMES = ("fp8_rowwise", "int8_rowwise_asymmetric", "mxfp8_e4m3", "mxfp4")


def layer_norm_bits() -> None:
    """Values of codes and scales that differ from the reference's, dtype by dtype, with a bias and without."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, width in LAYER_SHAPES:
            x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, width), (width,), (width,)))
            x[0, 0], x[1, -1], x[2] = float("nan"), float("inf"), 1
            for name in LAYER_SCHEMES:
                if width % max(reference.SCHEMES[name].scale.block, 1) == 0:
                    compare_layer_norm(x, weight, None, name)
                    compare_layer_norm(x, weight, bias, name)


def compare_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, name: str) -> None:
    """A line of how many bytes differ."""
    wanted = reference.layer_norm_quantize(x, weight, name, bias=bias)
    found = fast.layer_norm_quantize(
        x.cuda(), weight.cuda(), name, bias=None if bias is None else bias.cuda()
    )
    pairs = [(found.codes, wanted.codes), (found.scale, wanted.scale), (found.zero, wanted.zero)]
    wrong = sum(
        int((a.cpu().view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in pairs if b is not None
    )
    what = f"LayerNorm {name} {x.dtype} {tuple(x.shape)}{'' if bias is None else ', bias'}"
    say("bits", what, wrong, "differ", of=wanted.codes.numel())


def formula(x: torch.Tensor, gain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch.compile fuses."""
    y = rms(x, gain).float()
    scales = y.abs().amax(-1, keepdim=True) / 448
    return (y / scales).to(torch.float8_e4m3fn), scales


def tiles(rows: int, width: int) -> None:
    """Lines of all tiles."""
    gain = (1 + 0.1 * torch.randn(width, device="cuda")).to(torch.bfloat16)
    sets = several(lambda: torch.randn((rows, width), device="cuda", dtype=torch.bfloat16), 3 * rows * width)
    expected, calls = quantized(sets[0], gain, *TILES[0]), dict[str, list[Callable[[], object]]]()
    for tile, policy in [(one, POLICIES[0]) for one in TILES] + [
        (TILES[0], policy) for policy in POLICIES[1:]
    ]:
        found = quantized(sets[0], gain, *tile, policy)
        wrong = int((found.codes != expected.codes).sum()) + int((found.scale != expected.scale).sum())
        name = f"{tile[0]} elements a program, {tile[1]} a thread {policy}".rstrip()
        say("bits", name, wrong, "differ")
        calls[name] = [partial(quantized, x, gain, *tile, policy) for x in sets]
    compiled = torch.compile(formula, dynamic=False)
    calls["torch.compile's"] = [partial(compiled, x, gain) for x in sets]
    w = fast.quantize(torch.randn((OUTPUTS, width), device="cuda", dtype=torch.bfloat16), ROWWISE)
    calls |= with_matmul(sets, gain, w)
    calls["LayerNorm"] = [partial(fast.layer_norm_quantize, x, gain, ROWWISE) for x in sets]
    codes = [quantized(x, gain, *TILES[0]) for x in sets]
    calls["torch's matmul behind it"] = [partial(scaled_mm, x, w) for x in codes]
    sources = several(
        lambda: torch.empty(3 * rows * width // 2, dtype=torch.uint8, device="cuda"), 3 * rows * width
    )
    calls["a copy of as many bytes"] = [partial(torch.empty_like(one).copy_, one) for one in sources]
    for name, us in measured(calls)["us"].items():
        say("tiles", f"{rows} x {width}: {name}", us, "us")


def with_matmul(
    sets: list[torch.Tensor], gain: torch.Tensor, w: Quantized
) -> dict[str, list[Callable[[], object]]]:
    """Norm and matmul in a row."""

    def both(x: torch.Tensor, tile: tuple[int, int], policy: str) -> torch.Tensor:
        return scaled_mm(quantized(x, gain, *tile, policy), w)

    calls = dict[str, list[Callable[[], object]]]()
    for tile, policy in ((TILES[0], POLICIES[0]), (TILES[0], POLICIES[1]), (TILES[1], POLICIES[0])):
        name = f"{tile[0]} elements a program, {tile[1]} a thread {policy}".rstrip()
        calls[f"{name}, and the matmul"] = [partial(both, x, tile, policy) for x in sets]
    compiled = by_compiler(rms)
    calls["torch.compile's, and the matmul"] = [partial(compiled, x, gain, None, w) for x in sets]
    return calls


def main() -> int:
    """All tiles; 1 where bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=36032)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    try:
        layer_norm_bits()
        tiles(options.rows, options.width)
    finally:
        write_rows("norm_tiles.csv", options.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
