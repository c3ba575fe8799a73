"""On a GPU: tiles of the FP8 matmul by itself and of the one with block norm in its epilogue, timed in turn at large shapes.

    PYTHONPATH=. python tests/gpu/linear/wide_tiles.py [--part norm codes mm] [--shapes 6144x18432x8192 ...] [--out FOLDER]

Shapes are M x K x N. norm: block norm and hard swish, bfloat16 results; codes: the same with codes of e4m3 and scales of 128
columns; mm: `linear_of_codes`, sums of the tensor core. Beside each torch's matmul of the same operands. Every variant has the
bits of the first one, or counts the values that differ. A line a variant (microseconds, over torch's) and the best of a shape;
rows in FOLDER/wide_tiles.csv (else $OUT). About 40 seconds, most of them compilation, in threads.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from fast.kernels.triton_scaled_mm import block_norm, host
from fast.kernels.triton_scaled_mm.block_norm import SCHEME_NAME, Variant
from fast.kernels.triton_scaled_mm.host import WIDE, Tile
from reference import Quantized
from tests.gpu.harness.lines import run_parts, say
from tests.gpu.harness.timing import measured, several

SHAPES = ("6144x18432x8192", "6144x4608x4096", "8192x3456x1024")
BF16, EPS, TORCH, ROUNDS = torch.bfloat16, 1e-6, "torch._scaled_mm", 15
#: The first is what serves today.
NORMS = (
    block_norm.USUAL, Variant(), Variant(along=4), Variant(along=16), Variant(stages=3), Variant(length=64, stages=8),
    Variant(persistent=1), Variant(stages=3, along=16, persistent=1),
    Variant(64, stages=2, warps=4), Variant(64, stages=2, warps=4, persistent=2),
)  # fmt: skip
CODES = (*NORMS[:2], NORMS[6])
TILES = (
    WIDE, Tile(128, 128, 128, 1, 5, 8, False), Tile(128, 256, 128, 1, 4, 8, False), Tile(128, 256, 128, 1, 4, 8, False, 4),
    Tile(128, 256, 128, 1, 4, 8, False, 16), Tile(128, 256, 128, 1, 3, 8, False, 8), Tile(256, 128, 128, 1, 4, 8, False, 8),
    Tile(128, 128, 128, 1, 5, 8, False, 8), Tile(64, 256, 128, 1, 2, 4, False, 16),
)  # fmt: skip
Operands = tuple[Quantized, Quantized, torch.Tensor]
Method = Callable[[Operands], Any]


def operands(m: int, k: int, n: int) -> Operands:
    """Codes of normal numbers, and a gain."""
    x, w = (
        fast.quantize(torch.randn((rows, k), device="cuda", dtype=BF16), "fp8_rowwise") for rows in (m, n)
    )
    return x, w, 1 + 0.1 * torch.rand(n, device="cuda")


def normed(scheme: str, variant: Variant) -> Method:
    """The matmul with block norm by a variant."""

    def run(given: Operands) -> Any:
        x, w, gain = given
        made = block_norm.linear_block_norm(x, w, gain, None, EPS, True, scheme, BF16, True, variant)
        if made is None:
            raise ValueError(f"the kernel does not take {x.shape} by {w.shape}")
        return made

    return run


def plain(tile: Tile) -> Method:
    """The matmul alone by a tile."""
    return lambda given: [
        host.linear_of_codes(given[0], given[1], None, BF16, None, fast_sums=True, tile=tile)
    ]


def by_torch(given: Operands) -> Any:
    """torch's."""
    a, b = (one.codes.view(torch.float8_e4m3fn) for one in given[:2])
    return [
        torch._scaled_mm(a, b.t(), given[0].scale, given[1].scale.t(), out_dtype=BF16, use_fast_accum=True)
    ]


def name_of(one: Variant | Tile) -> str:
    """Its numbers by name, those that matter."""
    return " ".join(f"{name}={value}" for name, value in vars(one).items() if value is not False)


def compare(part: str, methods: Mapping[str, Method], shapes: list[str]) -> None:
    """Compile all on small operands, then for each shape bits and times in turn."""
    tiny = operands(256, 512, 512)
    with ThreadPoolExecutor(8) as pool:
        for made in [pool.submit(method, tiny) for method in methods.values()]:
            made.exception()
    for shape in shapes:
        m, k, n = map(int, shape.split("x"))
        sets = several(partial(operands, m, k, n), (m + n) * k)
        able = bits(part, shape, methods, sets[0])
        calls = {name: [partial(methods[name], one) for one in sets] for name in able}
        times = measured({TORCH: [partial(by_torch, one) for one in sets], **calls}, ROUNDS)
        us = times["us"]
        for name, taken in us.items():
            say(
                part,
                f"{shape} {name}",
                taken,
                "us",
                over_torch=round(taken / us[TORCH], 4),
                spread=times["spread"][name],
            )
        best = min((name for name in us if name != TORCH), key=us.__getitem__)
        say(part, f"{shape} BEST {best}", us[best] / us[TORCH], "of torch's")


def bits(part: str, shape: str, methods: Mapping[str, Method], given: Operands) -> list[str]:
    """The variants that run; values that differ from the first one's are counted."""
    expected, able = None, []
    for name, method in methods.items():
        try:
            found = method(given)
        except Exception as error:  # noqa: BLE001  others go on
            say(part, f"{shape} {name} FAILED: {type(error).__name__}: {str(error)[:90]}", float("nan"), "")
            continue
        expected = expected or found
        raw = lambda t: t.view(torch.uint8)  # noqa: E731
        wrong = sum(int((raw(one) != raw(other)).sum()) for one, other in zip(found, expected, strict=True))
        if wrong:
            say("bits", f"{part} {shape} {name}", wrong, "differ")
        able.append(name)
    return able


def main() -> int:
    """The parts that were asked for; 1 where bits differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", nargs="+", default=["norm", "codes", "mm"])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    norm, codes = (
        {name_of(one): normed(scheme, one) for one in some}
        for scheme, some in (("", NORMS), (SCHEME_NAME, CODES))
    )
    mm = {name_of(one): plain(one) for one in TILES}
    parts: dict[str, Callable[[], None]] = {
        part: partial(compare, part, methods, list(options.shapes))
        for part, methods in (("norm", norm), ("codes", codes), ("mm", mm))
    }
    return run_parts(parts, options.part, "wide_tiles.csv", options.out)


if __name__ == "__main__":
    sys.exit(main())
