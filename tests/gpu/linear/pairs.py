"""Two products of rows by preshuffled weights in one launch, and silu of one times the other: bits, a program, times.

The times are what `reports/data/linear_small_pair_times.json` has, to which tests hold `fast.gemm.choose`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fast
import reference
from ao_lab import SchemeConfig, compile_options, quantize_
from fast.gemm.choose import choose
from fast.gemm.families import of_preshuffled
from fast.kernels.triton_small_m import host, pair
from fast.kernels.triton_small_m.host import Tiling
from fast.kernels.triton_small_m.layout import arrange
from fast.matmul.preshuffled import linear
from fast.matmul.preshuffled.pair import linear_small_pair, linear_small_swiglu
from fast.scale_factors import ArrangedWeight
from reference import Quantized
from tests.gpu.harness.subject import Asked, Check, Row, Subject, differs, same_bits
from tests.gpu.harness.timing import Call, measured
from tests.gpu.linear import weights
from tests.gpu.linear.family import repeated
from tests.support.linear_cases import outside

DEVICE, BF16 = weights.DEVICE, torch.bfloat16
NAMES = ("int4_g128", "int4_g128_asymmetric", "int4_g32", "int8_rowwise", "int8_g128", "fp8_rowwise")
#: One part of K, sixteen, and a feed-forward layer's.
SHAPES, WHOLE = ((12288, 1024), (512, 4096)), (14336, 4096)
ROWS = (1, 2, 5, 16)
#: Tiles beside those of the rule.
OTHERS = {
    "int4": (Tiling(16, 128, 128, 1, 4, 4), Tiling(16, 128, 128, 2, 6, 4), Tiling(16, 128, 128, 1, 6, 8)),
    "int8": (Tiling(16, 128, 128, 1, 4, 4), Tiling(16, 128, 128, 1, 6, 8), Tiling(16, 128, 64, 1, 6, 8)),
}  # fmt: skip
TIMED = ("int4_g128", "int4_g64", "int4_g32", "int4_g128_asymmetric", "int8_rowwise", "fp8_rowwise")
TIMED_SHAPES = (
    (512, 2048),
    (1024, 4096),
    (4096, 4096),
    (8192, 2048),
    (8192, 3072),
    (14336, 4096),
    (28672, 8192),
)
TIMED_ROWS = (1, 2, 4, 8, 16)
#: Bytes of the weights of a graph, three times the cache, and the most pairs of them.
BYTES, MOST_PAIRS = 160_000_000, 24


def checks(asked: Asked) -> Iterator[Check]:
    """By scheme."""
    for name in asked.schemes or NAMES:
        yield name, partial(wrong_of, name)
    for name in ("int4_g128", "int8_rowwise"):
        yield f"whole layers {name}", partial(wrong_of_layers, name)
        yield f"in a program {name}", partial(wrong_programs, name)


def wrong_of(name: str) -> Iterator[str]:
    """Integers are exact, swiglu is that of the exact sums, random inputs are within the bound, bits are the same each time."""
    for shape in SHAPES:
        drawn = [weights.drawn(name, shape, seed) for seed in (0, 1)]
        made = [linear.preshuffled(w) for w, _ in drawn]
        for count in ROWS:
            label = f"{shape} {count} rows"
            for dtype in host.INPUTS:
                x = torch.randint(-1, 2, (count, shape[1]), device=DEVICE).to(dtype) / 64
                sums = [(x.double() @ values.t()).float().to(dtype) for _, values in drawn]
                for got, wanted in zip(linear_small_pair(x, *made), sums, strict=True):
                    yield from differs(f"{label} {dtype} sums", got, wanted)
                if not same_bits(
                    linear_small_swiglu(x, *made), reference.swiglu(*(one.cpu() for one in sums))
                ):
                    yield f"{label} {dtype}: silu times another differs"
            x = torch.randn((count, shape[1]), device=DEVICE, dtype=BF16) / 64
            yield from (f"{label}: {found}" for found in random(x, made, [w for w, _ in drawn]))


def random(x: torch.Tensor, made: list[Quantized], stored: list[Quantized]) -> Iterator[str]:
    """Of random inputs."""
    both, gated = linear_small_pair(x, *made), linear_small_swiglu(x, *made)
    for got, w in zip(both, stored, strict=True):
        if bad := outside(got, x, w, None):
            yield f"{bad} outside the bound"
    yield from differs("silu times another", gated, fast.swiglu(*both))
    yield from repeated("pair", torch.stack(both), lambda: torch.stack(linear_small_pair(x, *made)), 20)
    yield from repeated("swiglu", gated, partial(linear_small_swiglu, x, *made), 20)


def wrong_of_layers(name: str) -> Iterator[str]:
    """Random words: with the same tiles, the bits of each weight by itself."""
    gate, up = (weights.filled_weight(name, WHOLE) for _ in range(2))
    for count in (1, 4, 16):
        x = torch.randn((count, WHOLE[1]), device=DEVICE, dtype=BF16)
        for tiling in (pair.pair_tiling(*WHOLE, *weights.KINDS[name], count), *OTHERS[gate.element]):
            label = f"{count} rows, {tiling}"
            both = pair.linear_small_pair(x, gate, up, tiling=tiling)
            if both is None:
                yield f"{label}: not taken"
                continue
            for got, w in zip(both, (gate, up), strict=True):
                yield from differs(f"{label} each weight", got, host.linear_small(x, w, tiling=tiling))  # type: ignore[arg-type]
            gated = pair.linear_small_swiglu(x, gate, up, tiling=tiling)
            yield from differs(f"{label} silu times another", gated, fast.swiglu(*both))


class Gated(nn.Module):
    """A gate, what it gates, and two more projections of the same input."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"gate": 2048, "up": 2048, "k": 256, "v": 256}
        layers = {key: nn.Linear(1024, n, bias=False, dtype=BF16, device=DEVICE) for key, n in sizes.items()}
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, up, k, v = (layer(x) for layer in self.layers.values())
        return functional.silu(gate) * up, k, v


def wrong_programs(name: str) -> Iterator[str]:
    """A program compiled with our options has both operators, and their bits."""
    torch.manual_seed(0)
    made, seen, options = Gated(), [], compile_options()
    quantize_(made, SchemeConfig(scheme=name))
    base = type(options["post_grad_custom_pre_pass"])

    class Watched(base):  # type: ignore[misc, valid-type]
        def __call__(self, graph: Any) -> None:
            super().__call__(graph)
            seen.append(sorted(str(node.target) for node in graph.nodes if "ao_lab" in str(node.target)))

        def uuid(self) -> None:
            """A program from the compiler's cache would not be seen by the pass."""

    options["post_grad_custom_pre_pass"] = Watched()
    torch.compiler.reset()
    options["triton.cudagraphs"] = True
    compiled = torch.compile(made, options=options, fullgraph=True, dynamic=False)
    stored = [layer.weight.detach().stored for layer in made.layers.values()]
    for count in (1, 16):
        x = torch.randn((1, count, 1024), device=DEVICE, dtype=BF16)
        with torch.no_grad():
            for _ in range(3):
                got = [y.clone() for y in compiled(x)]
        wanted = (linear_small_swiglu(x, *stored[:2]), *linear_small_pair(x, *stored[2:]))
        for one, other in zip(got, wanted, strict=True):
            yield from differs(f"{count} rows", one, other)
    joined = ["ao_lab.linear_small_pair.default", "ao_lab.linear_small_swiglu.default"]
    if seen != [joined, joined]:
        yield f"a program has {seen} in place of {joined}"


def alone(x: torch.Tensor, w: ArrangedWeight) -> torch.Tensor:
    """A product by the family that is chosen for it."""
    multiply: Any = next(choose(of_preshuffled(w, len(x), x.dtype))).function("linear")
    made: torch.Tensor = multiply(x, w)
    return made


def random_pairs(scheme: str, n: int, k: int) -> list[tuple[ArrangedWeight, ArrangedWeight]]:
    """Of random weights."""
    bits = 4 if scheme.startswith("int4") else 8

    def one() -> Any:
        w = torch.randn(n, k, device="cuda", dtype=BF16)
        return arrange(fast.quantize(w, scheme, axis=-1, packed=bits < 8))

    return [(one(), one()) for _ in range(max(2, min(MOST_PAIRS, -(-BYTES // (n * k * bits // 4)))))]


def times(asked: Asked) -> Iterator[Row]:
    """In one launch and in two, gated and not."""
    for scheme, (n, k) in product(asked.schemes or TIMED, asked.shapes or TIMED_SHAPES):
        pairs = random_pairs(scheme, n, k)
        for rows in asked.rows or TIMED_ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=BF16)
            tiling = pair.pair_tiling(n, k, pairs[0][0].element, pairs[0][0].group, rows)

            def apart(a: Any, b: Any, x: Any = x) -> Any:
                return alone(x, a), alone(x, b)

            ways: dict[str, Call] = {
                "pair": partial(pair.linear_small_pair, x, tiling=tiling),
                "apart": apart,
                "swiglu": partial(pair.linear_small_swiglu, x, tiling=tiling),
                "swiglu apart": lambda a, b, apart=apart: fast.swiglu(*apart(a, b)),
            }
            calls = {name: [partial(way, a, b) for a, b in pairs] for name, way in ways.items()}
            yield {"scheme": scheme, "shape": (n, k), "rows": rows, **measured(calls, 15)}


SUBJECTS = (
    Subject("pairs", "two products of one input by preshuffled weights in one launch", checks, times),
)
