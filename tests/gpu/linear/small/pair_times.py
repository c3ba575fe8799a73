"""Times of two products by preshuffled weights in one launch and in two, gated and not: PYTHONPATH=. python FILE OUT.json

CUDA graphs of an H200, each call other weights (more than the second-level cache holds), all four in turn. What it writes is
`reports/data/linear_small_pair_times.json`, which tests hold `fast.gemm.choose.pair_is_faster` to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

import fast
from fast.gemm import choose, families
from fast.kernels.linear_small.host import linear_small
from fast.kernels.linear_small.layout import ArrangedWeight, arrange
from fast.kernels.linear_small.pair import linear_small_pair, linear_small_swiglu, pair_tiling
from fast.kernels.sm90_w4a16_gemv.host import sm90_w4a16_gemv
from tests.gpu.harness.graph_times import captured, in_turn

SHAPES = ((512, 2048), (1024, 4096), (4096, 4096), (8192, 2048), (8192, 3072), (14336, 4096), (28672, 8192))
SCHEMES = ("int4_g128", "int4_g64", "int4_g32", "int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise")
ROWS, ROUNDS = (1, 2, 4, 8, 16), 15
#: Bytes of the weights of a graph, three times the cache, and the most pairs of them.
BYTES, MOST_PAIRS = 160_000_000, 24

Pair = tuple[ArrangedWeight, ArrangedWeight]


def weights(scheme: str, n: int, k: int) -> list[Pair]:
    """Pairs of random weights."""
    bits = 4 if scheme.startswith("int4") else 8
    pairs = max(2, min(MOST_PAIRS, -(-BYTES // (n * k * bits // 4))))

    def one() -> Any:
        w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        return arrange(fast.quantize(w, scheme, axis=-1, packed=bits < 8))

    return [(one(), one()) for _ in range(pairs)]


def alone(x: torch.Tensor, w: ArrangedWeight) -> torch.Tensor:
    """A product by the family that is chosen for it."""
    family = next(choose.preshuffled(w, len(x), x.dtype))
    y: torch.Tensor = {families.SM90_W4A16_GEMV: sm90_w4a16_gemv, families.TRITON_SMALL_M: linear_small}[
        family
    ](x, w)
    return y


def calls(x: torch.Tensor, pairs: list[Pair]) -> dict[str, list[Callable[[], Any]]]:
    """What is timed, by name."""
    first = pairs[0][0]
    tiling = pair_tiling(*first.shape, first.element, first.group, len(x))

    def apart(a: ArrangedWeight, b: ArrangedWeight) -> Any:
        return alone(x, a), alone(x, b)

    def gated(a: ArrangedWeight, b: ArrangedWeight) -> Any:
        return fast.swiglu(*apart(a, b))

    together = partial(linear_small_pair, x, tiling=tiling)
    swiglu = partial(linear_small_swiglu, x, tiling=tiling)
    ways = {"pair": together, "apart": apart, "swiglu": swiglu, "swiglu apart": gated}
    return {name: [partial(way, a, b) for a, b in pairs] for name, way in ways.items()}


def main() -> None:
    """Time all and write them."""
    torch.manual_seed(0)
    lines = []
    for scheme, (n, k) in product(SCHEMES, SHAPES):
        pairs = weights(scheme, n, k)
        for rows in ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            times = in_turn({name: captured(each) for name, each in calls(x, pairs).items()}, ROUNDS)
            row = {"scheme": scheme, "shape": [n, k], "rows": rows}
            lines.append(json.dumps(row | {name: round(time, 2) for name, time in times.items()}))
            print(lines[-1], flush=True)
    text = f'{{"device": "{torch.cuda.get_device_name()}", "times": [\n' + ",\n".join(lines) + "\n]}\n"
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
