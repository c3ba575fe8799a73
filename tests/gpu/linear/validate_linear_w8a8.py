"""On a GPU: layers of 8-bit weights and 8-bit dynamic inputs, quantization included, beside bfloat16 and torch's products.

    PYTHONPATH=. python tests/gpu/linear/validate_linear_w8a8.py [--seconds 90] [--rows 1 16 64] [--shapes 0 1]
        [--schemes int8_rowwise]

For each shape and number of rows, as CUDA graphs in turn over more weights than the second-level cache holds (`graph_times`):

bf16      `F.linear` of bfloat16
layer     `F.linear` of a QuantizedTensor whose recipe quantizes its inputs
codes     `fast.linear_of_codes` of inputs that are codes already; and of integers every tile of `TILES`, by its numbers
torch     `torch._int_mm` or `torch._scaled_mm` of the same codes, with scales as one compiled pass, or torch's own

Integers are compared first: every tile's bits are those of torch's exact sums. Prints a line a row, writes
$OUT/linear_w8a8.json; exits with 1 on any difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fast
from ao_lab import Recipe
from ao_lab.tensor.quantized_tensor import from_quantized
from fast.kernels.scaled_mm import host
from fast.kernels.scaled_mm.tiles import Tile
from reference import SCHEMES, Quantized
from tests.gpu.harness.graph_times import captured, in_turn

SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096))
ROWS = (1, 2, 16, 64, 256, 1024, 8192)
SCHEME_NAMES = ("int8_rowwise", "int8_rowwise_asymmetric", "fp8_rowwise")
#: Tiles beside the rule's, of few and of many rows; those that do not fit a product are left out.
FEW = [Tile(rows, *rest) for rows in (16, 64) for rest in (
    (64, 128, 1, 5, 4, True), (64, 256, 1, 4, 4, True), (64, 256, 2, 4, 4, True), (128, 128, 1, 5, 4, True),
    (128, 256, 1, 3, 8, True))]  # fmt: skip
MANY = [Tile(128, 256, 128, 1, stages, 8, False) for stages in (3, 4)] + [
    Tile(128, 128, 128, 1, 4, 8, False), Tile(128, 128, 128, 1, 5, 4, False), Tile(64, 256, 128, 1, 4, 4, False),
    Tile(256, 128, 128, 1, 4, 8, False), Tile(128, 64, 128, 1, 6, 4, False), Tile(256, 128, 64, 1, 6, 8, False)]  # fmt: skip
#: Bytes that weights in turn have together at least, and rounds.
COLD, ROUNDS = 200e6, 7
INPUT_OF = {"int8_rowwise_asymmetric": "int8_rowwise"}


def weights(name: str, shape: tuple[int, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Dense and quantized ones in turn; an asymmetric scheme is that of inputs, whose weights are symmetric."""
    size, stored = shape[0] * shape[1], INPUT_OF.get(name, name)
    dense = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(int(COLD / (2 * size)) + 2)
    ]
    recipe = Recipe(weight=SCHEMES[stored], activation=SCHEMES[name])
    first = fast.quantize(dense[0], stored)
    made = [
        from_quantized(copied(first), recipe, torch.bfloat16).requires_grad_(False)
        for _ in range(int(COLD / size) + 2)
    ]
    return dense, made


def copied(q: Quantized) -> Quantized:
    """In memory of its own."""
    from dataclasses import replace

    return replace(q, codes=q.codes.clone(), scale=q.scale.clone())


@torch.compile(dynamic=False)
def scaled(sums: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What follows torch's integer sums, in one pass."""
    return (sums.float() * x * w).to(torch.bfloat16)


def by_torch(x: Quantized, w: Quantized) -> Callable[[], torch.Tensor] | None:
    """torch's product of the same codes; None where it has none."""
    if x.scheme.element == "int8":
        if x.zero is not None or len(x.codes) < 17:
            return None
        a, b = x.codes.view(torch.int8), w.codes.view(torch.int8)
        return lambda: scaled(torch._int_mm(a, b.t()), x.scale, w.scale.t())
    a, b = (q.codes.view(torch.float8_e4m3fn) for q in (x, w))
    right = w.scale.t().contiguous()
    return lambda: torch._scaled_mm(a, b.t(), x.scale, right, out_dtype=torch.bfloat16)


def tiles_of(name: str, rows: int) -> list[Tile]:
    """Those that are timed of integers."""
    if not name.startswith("int8") or rows == 1:
        return []
    return [t for t in FEW if t.rows >= min(rows, 16)] if rows <= 64 else MANY


def exact(x: Quantized, w: Quantized) -> torch.Tensor:
    """Float64 sums of codes, which are exact, then scales in float32."""
    a, b = (q.codes.view(torch.int8).double() for q in (x, w))
    a = a if x.zero is None else a - x.zero.double()
    return ((a @ b.t()).float() * x.scale * w.scale.t()).to(torch.bfloat16)


def measured(name: str, rows: int, dense: Any, stored: Any, wrong: list[str]) -> dict[str, float]:
    """Microseconds by what computes it."""
    n, k = dense[0].shape
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) + 0.3
    codes = fast.quantize(x, name)
    calls: dict[str, list[Callable[[], Any]]] = {
        "bf16": [lambda w=w: torch.nn.functional.linear(x, w) for w in dense],
        "layer": [lambda w=w: torch.nn.functional.linear(x, w) for w in stored],
        "codes": [lambda w=w: fast.linear_of_codes(codes, w.quantized, dtype=torch.bfloat16) for w in stored],
    }
    if by_torch(codes, stored[0].quantized) is not None:
        calls["torch"] = [by_torch(codes, w.quantized) for w in stored]  # type: ignore[misc]
    for tile in tiles_of(name, rows):
        key = ",".join(str(int(number)) for number in astuple(tile))
        calls[key] = [
            lambda w=w, t=tile: host.linear_of_codes(codes, w.quantized, None, torch.bfloat16, None, t)
            for w in stored
        ]
    return in_turn(graphs_of(calls, codes, stored[0].quantized, f"{name} {(n, k)} {rows}", wrong), ROUNDS)


def graphs_of(calls: Any, codes: Quantized, w: Quantized, label: str, wrong: list[str]) -> Any:
    """Graphs of what runs and is right."""
    graphs, wanted = {}, exact(codes, w) if codes.scheme.element == "int8" else None
    for key, each in calls.items():
        try:
            made = each[0]()
            if wanted is not None and key != "bf16" and not torch.equal(made, wanted):
                wrong.append(f"{label} {key}: {int((made != wanted).sum())} of {made.numel()} differ")
            graphs[key] = captured(each)
        except Exception as error:  # noqa: BLE001  others go on
            sys.stdout.write(f"{label} {key}: {type(error).__name__}: {str(error)[-160:]}\n")
    return graphs


def told(label: str, times: dict[str, float]) -> str:
    """A row as a line."""
    base = times.get("bf16", float("nan"))
    tiles = {key: value for key, value in times.items() if "," in key}
    best = min(tiles, key=tiles.__getitem__) if tiles else ""
    named = "  ".join(f"{key} {value:.2f}" for key, value in times.items() if "," not in key)
    found = f"  best tile {best} {tiles[best]:.2f}" if tiles else ""
    return f"{label}: {named}{found}  layer x{base / times.get('layer', float('nan')):.2f} of bf16"


def main(arguments: list[str] | None = None) -> int:
    """Compare and time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--shapes", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--schemes", nargs="*", default=SCHEME_NAMES, choices=SCHEME_NAMES)
    options = parser.parse_args(arguments)
    end, wrong, found = time.monotonic() + options.seconds, [], []
    for shape in [SHAPES[at] for at in options.shapes]:
        for name in options.schemes:
            dense, stored = weights(name, shape)
            for rows in options.rows:
                if time.monotonic() > end:
                    print(f"not timed: {name} {shape} {rows} rows", flush=True)
                    continue
                with torch.no_grad():
                    times = measured(name, rows, dense, stored, wrong)
                found.append({"scheme": name, "shape": shape, "rows": rows, "times": times})
                print(told(f"{name} {shape} {rows:5} rows", times), flush=True)
    print("\n".join([*wrong, f"{len(wrong)} wrong"]), flush=True)
    if "OUT" in os.environ:
        about = {"device": torch.cuda.get_device_name(), "wrong": wrong, "rows": found}
        Path(os.environ["OUT"], "linear_w8a8.json").write_text(json.dumps(about, indent=1))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
