"""Products of rows by the preshuffled weights of experts: `triton_small_m` and `sm90_w4a16_gemm`, grouped, and times.

A problem's rows are those of each expert; rows behind the last one's are somebody else's and stay. Timed are eight experts, two
of each token at random: bfloat16 is `torch._grouped_mm`, "dense" makes all weights dense for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from fast.kernels.sm90_w4a16_gemm import experts as gemm
from fast.kernels.sm90_w4a16_gemm import host as decoding
from fast.kernels.triton_small_m import grouped
from fast.kernels.triton_small_m.dense import arranged_dense
from fast.scale_factors import ArrangedWeight
from tests.gpu.harness.products import w4a16_gemm_of_experts
from tests.gpu.harness.subject import in_threads
from tests.gpu.harness.timing import Call
from tests.gpu.linear import weights
from tests.gpu.linear.family import Family, Problem, allowance

BF16, FP16 = torch.bfloat16, torch.float16
Shape = tuple[int, int]
EXPERTS = 8
SHAPES = ((14336, 4096), (4096, 14336))
#: Tiles of the weight (rows, columns, stages, warps) by rows of X at once; the rule's are among them.
TILES = {
    16: ((128, 128, 6, 4), (64, 128, 6, 4), (64, 256, 4, 4), (128, 128, 4, 8), (128, 128, 4, 4)),
    32: ((128, 128, 4, 4), (128, 128, 4, 8), (128, 128, 3, 8)),
    64: ((128, 128, 4, 8), (128, 128, 3, 8), (128, 64, 4, 8)),
}
#: Rows of each expert, and shapes of their weights: experts without rows, one with most, as many each, hundreds of experts.
SPREADS: tuple[tuple[tuple[int, ...], Shape], ...] = (
    ((100, 0, 257, 3, 64, 129, 0, 500), (384, 512)), ((1, 2000, 0, 31), (1024, 1024)), ((700,) * 6, (2048, 896)),
    ((3, 0, 17, 90, 0, 0, 1, 64) * 32, (256, 512)),
)  # fmt: skip
GEMM_SCHEMES = (
    "int4_g128", "fp8_rowwise", "int8_rowwise", "int4_g128_asymmetric", "int4_g32", "mxfp4", "nvfp4", "mxfp8_e4m3",
)  # fmt: skip
SMALL_SCHEMES = ("int4_g128", "fp8_rowwise", "int8_rowwise", "int4_g32_asymmetric")


def counts_of(tokens: int) -> tuple[int, ...]:
    """Rows of each expert, two experts of each token."""
    draw = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens))
    return tuple(torch.bincount(draw.topk(2, 1).indices.flatten(), minlength=EXPERTS).tolist())


def ends_of(counts: Iterable[int]) -> torch.Tensor:
    """The row after each expert's last one."""
    return torch.tensor([*counts], device="cuda").cumsum(0).to(torch.int32)


def by_expert(x: torch.Tensor, ends: torch.Tensor, dense: list[torch.Tensor]) -> torch.Tensor:
    """In float64."""
    bounds = [0, *ends.tolist()]
    return torch.cat(
        [x[a:b].double() @ w.double().t() for a, b, w in zip(bounds, bounds[1:], dense, strict=False)]
    )


def arranged(problem: Problem) -> tuple[list[ArrangedWeight], list[torch.Tensor]]:
    """Weights of all experts, and their values."""
    drawn = [weights.drawn(problem.scheme, problem.shape, seed) for seed in range(len(problem.rows))]
    return [weights.arranged_on_device(w) for w, _ in drawn], [dense for _, dense in drawn]


def exact(problem: Problem) -> tuple[Any, ...]:
    """Integers, and a few rows behind the last expert's."""
    each, dense = arranged(problem)
    ends = ends_of(problem.rows)
    x = torch.randint(-1, 2, (sum(problem.rows) + 5, problem.shape[1]), device="cuda").to(problem.dtype)
    wanted = by_expert(x, ends, dense).float().to(problem.dtype)
    return (x, ends), grouped.stacked(each), None, wanted


def random(problem: Problem) -> tuple[Any, ...]:
    """Random scales and inputs."""
    each = [weights.randomly_scaled(w) for w in arranged(problem)[0]]
    dense = [arranged_dense(one, problem.dtype).double() for one in each]  # type: ignore[union-attr]
    ends, x = (
        ends_of(problem.rows),
        torch.randn(sum(problem.rows) + 5, problem.shape[1], device="cuda").to(problem.dtype),
    )
    truth, size = by_expert(x, ends, dense), by_expert(x.abs(), ends, [one.abs() for one in dense])
    return (x, ends), grouped.stacked(each), truth, allowance(truth, size, problem.shape[1], problem.dtype)


def inputs(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Of so many tokens."""
    counts = counts_of(problem.rows)
    return torch.randn(sum(counts), problem.shape[1], device="cuda", dtype=BF16), ends_of(counts)


def by_tiles(given: Any, w: ArrangedWeight, bias: Any = None, tile: Any = None, allocate: Any = None) -> Any:
    """By `triton_small_m`; where what allocates is given, the experts' rows of the result."""
    x, ends = given
    made = grouped.grouped_linear_small(x, w, ends, tile=tile)
    return None if made is None else made if allocate is None else made[: int(ends[-1])]


def tiles_of(problem: Problem, every: bool) -> list[Any]:
    """The rule's (None), and others."""
    counts = counts_of(problem.rows) if isinstance(problem.rows, int) else problem.rows
    return [None, *TILES[grouped.rows_at_once(sum(counts), len(counts))]]


def by_gemm(
    given: Any, w: ArrangedWeight, bias: Any = None, variant: Any = None, allocate: Any = None
) -> Any:
    """By `sm90_w4a16_gemm`; where what allocates is given, rows of no expert must stay as they were, and are left out."""
    x, ends = given
    if variant is None and allocate is None:
        return gemm.sm90_w4a16_gemm_of_experts(x, w, ends)
    made = w4a16_gemm_of_experts(x, w, ends, variant, allocate)
    if made is None or allocate is None:
        return made
    behind = made[int(ends[-1]) :].contiguous().view(torch.uint8)
    assert len(torch.unique(behind)) <= 1, "rows of no expert were written"
    return made[: int(ends[-1])]


def gemm_variants(problem: Problem, every: bool) -> list[Any]:
    """The rule's (None), and all others."""
    return [None, *gemm.candidates(weights.decoded(problem.scheme))]


def compile_gemm(pairs: Iterable[tuple[Problem, Any]]) -> None:
    """Into the cache of cubins."""
    tasks = {
        (
            one,
            decoding.Problem(weights.decoded(problem.scheme), str(problem.dtype).removeprefix("torch.")),
        )
        for problem, one in pairs
        if one is not None
    }
    in_threads(lambda task: decoding.KERNEL.cubin(*task), tasks)


def filled(scheme: str, shape: Shape) -> ArrangedWeight:
    """Eight experts of random bits."""
    return grouped.stacked([weights.filled_weight(scheme, shape) for _ in range(EXPERTS)])


def peers(scheme: str, shape: Shape, held: list[ArrangedWeight]) -> Callable[[Any], dict[str, list[Call]]]:
    """bfloat16, all weights dense for the call, and both families by their rules."""
    dense = torch.randn(EXPERTS, *shape, device="cuda", dtype=BF16) / 64

    def made_dense(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        parts = ("words", "scale", "zero")
        each = [
            replace(
                held[0],
                **{
                    part: None if getattr(held[0], part) is None else getattr(held[0], part)[at]
                    for part in parts
                },
            )
            for at in range(EXPERTS)
        ]
        made = torch.stack([arranged_dense(one, BF16) for one in each])  # type: ignore[misc]
        return torch._grouped_mm(x, made.transpose(1, 2), ends)

    def of(given: Any) -> dict[str, list[Call]]:
        x, ends = given
        found: dict[str, list[Call]] = {
            "bf16": [lambda: torch._grouped_mm(x, dense.transpose(1, 2), ends)],
            "dense": [partial(made_dense, x, ends)],
            "gemm": [partial(gemm.sm90_w4a16_gemm_of_experts, x, w, ends) for w in held],
        }
        if len(x) <= 128 * EXPERTS:
            found["small_m"] = [partial(grouped.grouped_linear_small, x, w, ends) for w in held]
        return found

    return of


SMALL_M = Family(
    "triton_small_m_experts", "a few rows of each expert by preshuffled weights", by_tiles, tiles_of, lambda pairs: None,
    tuple(Problem(name, (1024, 1024 if "g32" in name else 2048), counts_of(tokens)) for name in SMALL_SCHEMES
          for tokens in (1, 8, 100)),
    exact, filled, peers, SMALL_SCHEMES[:3], SHAPES, (1, 8, 64, 256), inputs=inputs,
    named=lambda one: "rule" if one is None else ",".join(map(str, one)),
)  # fmt: skip
GEMM = Family(
    "sm90_w4a16_gemm_experts", "many rows of each expert by preshuffled weights", by_gemm, gemm_variants, compile_gemm,
    tuple(Problem(name, shape, counts, (BF16, FP16)[(at + number) % 2]) for at, name in enumerate(GEMM_SCHEMES)
          for number, (counts, shape) in enumerate(SPREADS)),
    exact, filled, peers, GEMM_SCHEMES, SHAPES, (64, 128, 256, 512, 2048, 8192), random=random, inputs=inputs,
    named=lambda one: "rule" if one is None else one.name,
)  # fmt: skip

SUBJECTS = (SMALL_M.subject, GEMM.subject)
