"""Times of `linear_sparse_int4` beside `linear` with int4 weights and torch in bfloat16, as CUDA graphs, in turn.

A graph calls a function once with each of so many weights that together they exceed the second-level cache several times, so
every weight comes from the memory. Rounds of all functions follow each other, so that a slow spell of the clock hits all; a
time is the median of rounds, divided by the calls of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch

import fast
from fast.kernels.sparse_linear import host
from fast.kernels.sparse_linear.host import Tiling
from reference.quantize.stored import Quantized
from reference.schemes.schemes import SCHEMES
from tests.gpu.harness.graph_times import Call, captured, in_turn

#: (N, K) of the linears of an 8-billion-parameter model, the last two as they are joined, and rows of inputs.
SHAPES = ((14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096), (6144, 4096), (28672, 4096))
COUNTS = (1, 2, 4, 8, 16, 32, 64)
#: Columns of a scale; bytes that weights in turn have together at least; rounds.
GROUP, COLD, ROUNDS = 128, 1 << 28, 20
#: Indices of the six pairs of a group.
PAIRS = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110)
#: Tiles to try: row tiles, column tiles, warps along K, turns at once, one step before, inputs arranged, reads of two turns.
TILINGS = (
    (1, 1, 4, 2, 0), (1, 1, 8, 1, 0), (1, 1, 8, 2, 0), (1, 1, 4, 4, 0), (2, 1, 4, 1, 0), (2, 1, 4, 2, 0), (2, 1, 8, 1, 0),
    (2, 1, 8, 2, 0), (2, 1, 4, 1, 1), (1, 1, 4, 2, 1), (1, 1, 8, 2, 1), (1, 1, 16, 1, 0), (4, 1, 4, 1, 0),
    (2, 1, 4, 2, 0, 0, 1), (1, 1, 8, 2, 0, 0, 1), (1, 1, 4, 4, 0, 0, 1), (1, 1, 16, 2, 0, 0, 1),
)  # fmt: skip
TILINGS_16 = (
    (1, 2, 4, 1, 0), (1, 2, 8, 1, 0), (2, 2, 4, 1, 0), (2, 2, 4, 2, 0), (2, 2, 8, 1, 0), (4, 2, 4, 1, 0), (1, 1, 8, 1, 0),
    (2, 1, 4, 2, 0), (2, 2, 4, 1, 1), (2, 2, 4, 1, 0, 1), (1, 2, 4, 2, 0, 1), (1, 2, 8, 1, 0, 1), (4, 2, 4, 1, 0, 1),
)  # fmt: skip


def tiling_of_numbers(numbers: Sequence[int]) -> Tiling:
    """Those of the tables above."""
    return Tiling(*numbers[:4], *map(bool, numbers[4:]))


def bytes_of(shape: tuple[int, int]) -> torch.Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)


def sparse_weight(shape: tuple[int, int], group: int = GROUP) -> tuple[torch.Tensor, ...]:
    """Codes, metadata and scales."""
    rows, length = shape
    pairs = torch.tensor(PAIRS, device="cuda", dtype=torch.uint8)
    low, high = (pairs[torch.randint(0, 6, (rows, length // 8), device="cuda")] for _ in range(2))
    scale = torch.rand(rows, length // group, device="cuda") * 0.01
    return bytes_of((rows, length // 4)), low | high << 4, scale


def int4_weight(shape: tuple[int, int]) -> Quantized:
    """A weight of `linear`."""
    rows, length = shape
    scale = torch.rand(rows, length // GROUP, device="cuda") * 0.01
    return Quantized(
        bytes_of((rows, length // 2)), scale, None, None, shape, 1, SCHEMES[f"int4_g{GROUP}"], packed=True
    )


def dense_weight(shape: tuple[int, int]) -> torch.Tensor:
    """A weight of torch."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def several(make: Callable[[tuple[int, int]], Any], shape: tuple[int, int], size: float) -> list[Any]:
    """Weights in turn; size: bytes of an element."""
    return [make(shape) for _ in range(max(2, int(COLD / (size * shape[0] * shape[1])) + 1))]


def products(
    x: torch.Tensor, sparse: list[Any], stored: list[Any], dense: list[Any]
) -> dict[str, list[Call]]:
    """The functions that are compared."""
    return {
        "sparse int4": [lambda w=w: fast.linear_sparse_int4(x, *w) for w in sparse],
        "int4": [lambda w=w: fast.linear(x, w) for w in stored],
        "bf16": [lambda w=w: torch.nn.functional.linear(x, w) for w in dense],
    }


def tried(x: torch.Tensor, sparse: list[Any], shape: tuple[int, int]) -> dict[str, list[Call]]:
    """The product by each of the tiles."""
    chosen = TILINGS if len(x) <= 8 else TILINGS_16
    own = host.tiling_of(*shape, GROUP, len(x))
    calls = {}
    for tiling in {own, *map(tiling_of_numbers, chosen)}:
        name = ",".join(str(int(number)) for number in astuple(tiling))
        name += " (chosen)" if tiling == own else ""
        calls[name] = [
            lambda w=w, t=tiling: host.linear_sparse_int4(x, *w, None, GROUP, None, t) for w in sparse
        ]
    return calls


def measure(shapes: Sequence[tuple[int, int]], counts: Sequence[int], tune: bool) -> list[dict[str, Any]]:
    """A row for each shape, count and function."""
    rows = []
    for shape in shapes:
        sparse = several(sparse_weight, shape, 0.41)
        stored, dense = (
            ([], []) if tune else (several(int4_weight, shape, 0.53), several(dense_weight, shape, 2.0))
        )
        for count in counts:
            x = torch.randn(count, shape[1], device="cuda", dtype=torch.bfloat16)
            calls = tried(x, sparse, shape) if tune else products(x, sparse, stored, dense)
            times = in_turn({name: captured(each) for name, each in calls.items()}, ROUNDS)
            rows += [{"shape": shape, "rows": count, "name": name, "us": us} for name, us in times.items()]
            told = sorted(times.items(), key=lambda item: item[1]) if tune else times.items()
            print(
                f"{shape} {count:2} rows: " + "  ".join(f"{name} {us:.2f}" for name, us in told), flush=True
            )
    return rows
