"""On a GPU: RMSNorm that writes FP8 codes with a scale a row, by elements of a program and of a thread.

    PYTHONPATH=. python tests/gpu/layers/norm_tiles.py [--rows 36032] [--width 512] [--out FOLDER]

Microseconds of the kernel alone in turn with what torch.compile makes of the same formula, with copies of as many bytes, and
with the matmul behind it (2048 outputs) alone; of norm and matmul in a row, where the codes lie in the L2 cache unless x drives
them out: as it is, by x that is to leave the cache first, and by torch.compile, which asks for that. Codes and scales are
compared with those of the tiles that serve. A line each, and rows in FOLDER/norm_tiles.csv (else $OUT); 20 seconds.
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
from experiments.loka.fused_speed import EPS, ROWWISE, by_compiler, rms, scaled_mm
from fast.kernels.layers import rms_norm as kernel
from reference import Quantized
from tests.gpu.harness.lines import differs, say, write_rows
from tests.gpu.harness.timing import measured, several

#: Elements of a program, of a thread; the first ones serve.
TILES = ((1024, 32), (4096, 64), (2048, 64), (4096, 32), (2048, 32), (1024, 16), (512, 16))
OUTPUTS = 2048
#: How the L2 cache keeps x.
POLICIES = ("", "evict_first")


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
    for tile, policy in [(one, "") for one in TILES] + [(TILES[0], policy) for policy in POLICIES[1:]]:
        found = quantized(sets[0], gain, *tile, policy)
        wrong = int((found.codes != expected.codes).sum()) + int((found.scale != expected.scale).sum())
        name = f"{tile[0]} elements a program, {tile[1]} a thread {policy}".rstrip()
        say("bits", name, wrong, "differ")
        calls[name] = [partial(quantized, x, gain, *tile, policy) for x in sets]
    compiled = torch.compile(formula, dynamic=False)
    calls["torch.compile's"] = [partial(compiled, x, gain) for x in sets]
    w = fast.quantize(torch.randn((OUTPUTS, width), device="cuda", dtype=torch.bfloat16), ROWWISE)
    calls |= with_matmul(sets, gain, w)
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
        tiles(options.rows, options.width)
    finally:
        write_rows("norm_tiles.csv", options.out)
    return int(differs())


if __name__ == "__main__":
    sys.exit(main())
