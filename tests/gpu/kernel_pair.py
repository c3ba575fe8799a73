"""`fast.linear_pair`: both products of one row in one launch, exact sums bit for bit, the same each time."""

from __future__ import annotations

from dataclasses import replace

import torch

from ao_lab.recipes import named
from reference import Quantized
from tests import linear_cases as cases
from tests.gpu.kernel_pool import Job
from tests.gpu.kernel_run import Failure, Run, Settings

NAME = "linear_pair"
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
    return [Job("pair", name, NAME, scheme_case, (name,), 4.0) for name in SCHEMES[::step]]


def scheme_case(run: Run, name: str) -> None:
    """All shapes, both 16-bit dtypes: the two weights hold other numbers."""
    for number, (rows, length) in enumerate(SHAPES):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        pair = [cases.exact_weight(named(name), rows, length, seed) for seed in (0, 1)]
        x = cases.exact_inputs(1, length, dtype)
        wanted = tuple(cases.exact_result(x, w, None) for w in pair)
        compare(run, f"{name} {rows}x{length}", x, pair, wanted)


def compare(
    run: Run, label: str, x: torch.Tensor, pair: list[Quantized], wanted: tuple[torch.Tensor, ...]
) -> None:
    """Called twice, the second time a remembered call; then behind a kernel that makes its inputs, on another stream."""
    placed, weights = run.put(x), [run.put(w) for w in pair]
    first, again = (
        run.guarded(lambda: run.fast.linear_pair(placed, *weights)) for _ in ("new", "remembered")
    )
    run.compare(NAME, label, first, wanted)
    run.compare(NAME, f"{label} again", again, wanted)
    # Codes at an odd address are copied.
    moved = torch.zeros(weights[0].codes.numel() + 1, dtype=torch.uint8, device=run.device)[1:]
    odd = replace(weights[0], codes=moved.view(weights[0].codes.shape).copy_(weights[0].codes))
    run.compare(
        NAME, f"{label} odd", run.guarded(lambda: run.fast.linear_pair(placed, odd, weights[1])), wanted
    )
    if run.device.type == "cuda" and not isinstance(first, Failure):
        run.compare(NAME, f"{label} stream", aside(run, placed, weights), wanted)


def aside(run: Run, x: torch.Tensor, weights: list[Quantized]) -> tuple[torch.Tensor, torch.Tensor]:
    """The products of inputs that a kernel in front writes at the last moment."""
    side, held = torch.cuda.Stream(), torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(5_000_000)
        held.copy_(x)
        made = run.fast.linear_pair(held, *weights)
    side.synchronize()
    return made
