"""Two products by preshuffled weights in one launch, and silu of one times the other, on a GPU: bits, a program, times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import fast
import reference
from ao_lab import SchemeConfig, compile_options, quantize_
from fast.kernels.linear_small import host, pair
from fast.kernels.linear_small.tilings import Tiling
from fast.matmul.preshuffled import linear
from fast.matmul.preshuffled.pair import linear_small_pair, linear_small_swiglu
from reference import Quantized
from tests.gpu.harness.graph_times import captured, in_turn
from tests.gpu.linear.small import times, weights
from tests.gpu.linear.small.pair_times import alone
from tests.support.linear_cases import outside

DEVICE, BF16 = weights.DEVICE, torch.bfloat16
NAMES = ("int4_g128", "int4_g128_asymmetric", "int4_g32", "int8_rowwise", "int8_g128", "fp8_rowwise")
#: One part of K, sixteen, and a feed-forward layer's.
SHAPES, WHOLE = ((12288, 1024), (512, 4096)), (14336, 4096)
ROWS, TIMED = (1, 2, 5, 16), (1, 4, 16)
#: Tiles beside those of the rule that are timed.
OTHERS = {
    "int4": (Tiling(16, 128, 128, 1, 4, 4), Tiling(16, 128, 128, 2, 6, 4), Tiling(16, 128, 128, 1, 6, 8)),
    "int8": (Tiling(16, 128, 128, 1, 4, 4), Tiling(16, 128, 128, 1, 6, 8), Tiling(16, 128, 64, 1, 6, 8)),
}  # fmt: skip


def checks() -> Iterator[tuple[str, Iterator[str]]]:
    """What is looked at, with what is wrong of it."""
    for name in NAMES:
        yield f"pair {name}", wrong_of(name)
    for name in ("int4_g128", "int8_rowwise"):
        yield f"pair of whole layers {name}", wrong_of_layers(name)
        yield f"pair in a program {name}", wrong_programs(name)


def wrong_of(name: str) -> Iterator[str]:
    """Integers are exact, swiglu is that of the exact sums, random inputs are within the bound, bits are the same each time."""
    for shape in SHAPES:
        drawn = [weights.drawn(name, shape, seed) for seed in (0, 1)]
        made = [linear.preshuffled(w) for w, _ in drawn]
        for count in ROWS:
            for dtype in host.INPUTS:
                x = torch.randint(-1, 2, (count, shape[1]), device=DEVICE).to(dtype) / 64
                sums = [(x.double() @ values.t()).float().to(dtype) for _, values in drawn]
                for found in exact(x, made, sums):
                    yield f"{name} {shape} {count} rows {dtype}: {found}"
            x = torch.randn((count, shape[1]), device=DEVICE, dtype=BF16) / 64
            for found in bound(x, made, [w for w, _ in drawn]):
                yield f"{name} {shape} {count} rows: {found}"


def exact(x: torch.Tensor, made: list[Quantized], sums: list[torch.Tensor]) -> Iterator[str]:
    """Of integers."""
    for got, wanted in zip(linear_small_pair(x, *made), sums, strict=True):
        if not torch.equal(got, wanted):
            yield f"{int((got != wanted).sum())} sums differ"
    got, wanted = linear_small_swiglu(x, *made).cpu(), reference.swiglu(*(s.cpu() for s in sums))
    if not torch.equal(got.view(torch.int16), wanted.view(torch.int16)):
        yield f"{int((got != wanted).sum())} of silu times another differ"


def bound(x: torch.Tensor, made: list[Quantized], stored: list[Quantized]) -> Iterator[str]:
    """Of random inputs."""
    both, gated = linear_small_pair(x, *made), linear_small_swiglu(x, *made)
    for got, w in zip(both, stored, strict=True):
        if bad := outside(got, x, w, None):
            yield f"{bad} outside the bound"
    if not torch.equal(gated, fast.swiglu(*both)):
        yield "silu times another is not that of the sums"
    for _ in range(20):
        again = (*linear_small_pair(x, *made), linear_small_swiglu(x, *made))
        if not all(map(torch.equal, again, (*both, gated))):
            yield "other bits the next time"
            return


def wrong_of_layers(name: str) -> Iterator[str]:
    """Random words: with the same tiles, the bits of each weight by itself."""
    gate, up = (weights.filled_weight(name, WHOLE) for _ in range(2))
    for count in TIMED:
        x = torch.randn((count, WHOLE[1]), device=DEVICE, dtype=BF16)
        for tiling in (pair.pair_tiling(*WHOLE, *weights.KINDS[name], count), *OTHERS[gate.element]):
            apart = [host.linear_small(x, w, tiling=tiling) for w in (gate, up)]
            both = pair.linear_small_pair(x, gate, up, tiling=tiling)
            gated = pair.linear_small_swiglu(x, gate, up, tiling=tiling)
            if both is None or gated is None or not all(map(torch.equal, both, apart)):  # type: ignore[arg-type]
                yield f"{count} rows, {tiling}: other bits than each weight by itself"
            elif not torch.equal(gated, fast.swiglu(*both)):
                yield f"{count} rows, {tiling}: silu times another is not that of the sums"


class Gated(nn.Module):
    """A gate, what it gates, and two more projections of the same input."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"gate": 2048, "up": 2048, "k": 256, "v": 256}
        self.layers = nn.ModuleDict(
            {key: nn.Linear(1024, n, bias=False, dtype=BF16, device=DEVICE) for key, n in sizes.items()}
        )

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
    compiled = torch.compile(
        made, options={**options, "triton.cudagraphs": True}, fullgraph=True, dynamic=False
    )
    stored = [layer.weight.detach().stored for layer in made.layers.values()]
    for count in (1, 16):
        x = torch.randn((1, count, 1024), device=DEVICE, dtype=BF16)
        with torch.no_grad():
            for _ in range(3):
                got = [y.clone() for y in compiled(x)]
        wanted = (linear_small_swiglu(x, *stored[:2]), *linear_small_pair(x, *stored[2:]))
        if not all(map(torch.equal, got, wanted)):
            yield f"{count} rows: other bits than those of the operators"
    joined = ["ao_lab.linear_small_pair.default", "ao_lab.linear_small_swiglu.default"]
    if seen != [joined, joined]:
        yield f"a program has {seen} in place of {joined}"


def lines() -> Iterator[str]:
    """Times of two weights of a feed-forward layer at once, beside each by itself, a line for each number of rows."""
    for name in ("int4_g128", "int8_rowwise"):
        size = 2 * weights.filled_weight(name, WHOLE).nbytes
        both = times.several(lambda name=name: [weights.filled_weight(name, WHOLE) for _ in "ab"], size)
        gate, up = (weights.drawn(name, WHOLE, seed)[0] for seed in (0, 1))
        plain = times.several(lambda gate=gate, up=up: [times.copied(w) for w in (gate, up)], size)
        for count in TIMED:
            took = timed(name, count, both, plain)
            floor = size / times.rate()
            told = ", ".join(f"{label} {us:.2f}" for label, us in took.items())
            yield f"{name} two of {WHOLE}, {count:2} rows: {told} us; every byte once {floor:.2f}"


def timed(name: str, count: int, both: list[Any], plain: list[Any]) -> dict[str, float]:
    """Microseconds by what is called."""
    x = torch.randn(count, WHOLE[1], device=DEVICE, dtype=BF16)

    def separate(pair: list[Any]) -> Any:
        return fast.swiglu(*(alone(x, w) for w in pair))  # type: ignore[arg-type]

    calls: dict[str, list[Any]] = {
        "two": [lambda w=w: [alone(x, one) for one in w] for w in both],
        "pair": [lambda w=w: pair.linear_small_pair(x, *w) for w in both],
        "two and swiglu": [lambda w=w: separate(w) for w in both],
        "swiglu": [lambda w=w: pair.linear_small_swiglu(x, *w) for w in both],
        "plain layout": [lambda w=w: fast.linear_swiglu(x, *w) for w in plain],
    }
    for tiling in OTHERS[weights.KINDS[name][0]]:
        calls[f"swiglu {times.named_tiling(tiling)}"] = [
            lambda w=w, t=tiling: pair.linear_small_swiglu(x, *w, tiling=t) for w in both
        ]
    return in_turn({label: captured(each) for label, each in calls.items()}, times.ROUNDS)
