"""`fast.linear_pair` and `fast.linear_swiglu`: two products of one row in one launch, bit for bit, the same each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import reference
from ao_lab.config.recipe import named
from reference import Quantized
from tests.gpu.harness.pool import Job
from tests.gpu.harness.run import Failure, Run, Settings
from tests.support import linear_cases as cases

NAME, GATED = "linear_pair", "linear_swiglu"
SCHEMES = (
    "int4_g32", "int4_g64_asymmetric", "int4_g64_asymmetric_bf16", "torchao.int4_g64_tinygemm", "int8_rowwise", "int8_g128",
    "fp8_rowwise", "fp8_tensorwise", "mxfp8_e4m3",
)  # fmt: skip
#: Parts of a program, one of many, and layers of models.
SHAPES = ((37, 512), (16, 1536), (1024, 4096), (14336, 4096), (4096, 14336))
FEW = 0.2


def jobs(settings: Settings) -> list[Job]:
    """Family "pair"."""
    step = 1 if settings.fraction > FEW else 2
    both = ((NAME, scheme_case), (GATED, gated_case))
    return [Job("pair", name, of, case, (name,), 4.0) for name in SCHEMES[::step] for of, case in both]


def shapes(run: Run) -> tuple[tuple[int, int], ...]:
    """On a CPU, where the reference takes seconds for a layer, none of a model's."""
    return SHAPES if run.device.type == "cuda" else SHAPES[:2]


def scheme_case(run: Run, name: str) -> None:
    """All shapes, both 16-bit dtypes: the two weights hold other numbers."""
    for number, (rows, length) in enumerate(shapes(run)):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        pair = [cases.exact_weight(named(name), rows, length, seed) for seed in (0, 1)]
        x = cases.exact_inputs(1, length, dtype)
        wanted = tuple(cases.exact_result(x, w, None) for w in pair)
        compare(run, NAME, f"{name} {rows}x{length}", x, pair, wanted)


def gated_case(run: Run, name: str) -> None:
    """The same, of inputs that make gates around zero."""
    for number, (rows, length) in enumerate(shapes(run)):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        pair = [cases.exact_weight(named(name), rows, length, seed) for seed in (0, 1)]
        x = cases.exact_inputs(1, length, dtype) / 512
        wanted = reference.swiglu(*(cases.exact_result(x, w, None) for w in pair))
        compare(run, GATED, f"{name} {rows}x{length}", x, pair, wanted)


def compare(run: Run, function: str, label: str, x: torch.Tensor, pair: list[Quantized], wanted: Any) -> None:
    """Called twice, the second time a remembered call; then behind a kernel that makes its inputs, on another stream."""
    placed, weights = run.put(x), [run.put(w) for w in pair]
    product = getattr(run.fast, function)
    first, again = (run.guarded(lambda: product(placed, *weights)) for _ in ("new", "remembered"))
    run.compare(function, label, first, wanted)
    run.compare(function, f"{label} again", again, wanted)
    # Codes at an odd address are copied.
    moved = torch.zeros(weights[0].codes.numel() + 1, dtype=torch.uint8, device=run.device)[1:]
    odd = replace(weights[0], codes=moved.view(weights[0].codes.shape).copy_(weights[0].codes))
    run.compare(function, f"{label} odd", run.guarded(lambda: product(placed, odd, weights[1])), wanted)
    if run.device.type == "cuda" and not isinstance(first, Failure):
        run.compare(function, f"{label} stream", aside(product, placed, weights), wanted)


def aside(product: Callable[..., Any], x: torch.Tensor, weights: list[Quantized]) -> Any:
    """The products of inputs that a kernel in front writes at the last moment."""
    side, held = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(5_000_000)
        held.copy_(x)
        made = product(held, *weights)
    side.synchronize()
    return made
