"""Products with a 2:4 weight alone: our kernel beside dense ones, cuSPARSELt after a search and torchao's CUTLASS kernel.

Operands are there before: casts and compression are not timed. FP8 products have their scales of rows and columns applied,
which is timed. "speed over dense" is over bfloat16; "fp8" is the dense product of the same codes. As a CUDA graph over sets of
operands that exceed the L2 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

import fast
from experiments.harness.libraries import TORCHAO
from experiments.harness.libraries import missing as library_missing
from experiments.harness.timing import Call, Plan
from experiments.sparsity.speed import cusparselt_search
from experiments.sparsity.speed.operands import BF16, FP8, Operands, Shape, operands
from experiments.sparsity.speed.sides import DENSE, Side, Table

KIND = "products"
DENSE_FP8, OWN = "fp8", "2:4"
CUSPARSELT, CUTLASS = "2:4, cuSPARSELt searched", "2:4, torchao CUTLASS"
#: Makes a call for each set of operands.
Method = Callable[[tuple[Operands, ...]], list[Call]]
#: Shapes that bars name first, in both orders of lengths where they may be meant either way.
FP8_SHAPES: tuple[Shape, ...] = (
    (128, 4096, 14336), (16, 4096, 14336), (2048, 4096, 14336), (8192, 8192, 8192), (16384, 4096, 14336),
    (64, 4096, 14336), (128, 14336, 4096), (16, 14336, 4096), (2048, 14336, 4096), (16384, 14336, 4096),
)  # fmt: skip
BF16_SHAPES: tuple[Shape, ...] = (
    (128, 4096, 14336), (16, 4096, 14336), (64, 4096, 14336), (128, 14336, 4096), (16, 14336, 4096), (8192, 8192, 8192),
)  # fmt: skip
SETTINGS = {FP8: "float8_e4m3fn, scales of rows and columns, CUDA graph", BF16: "bfloat16, CUDA graph"}
PLAN = Plan(rounds=9, warmup=1, seconds=5.0, span=1e-3, most_calls=32)


def tables(
    device: str, seed: int, fp8: tuple[Shape, ...] = FP8_SHAPES, bf16: tuple[Shape, ...] = BF16_SHAPES
) -> list[Table]:
    """A table for each shape; those of float8 and bfloat16 in turn, so that a short run has both."""
    found = [table_of(device, seed, shape, FP8) for shape in fp8]
    for place, shape in enumerate(bf16):
        found.insert(2 * place + 1, table_of(device, seed, shape, BF16))
    return found


def table_of(device: str, seed: int, shape: Shape, element: torch.dtype) -> Table:
    """All methods of a shape."""
    m, k, n = shape
    made = partial(calls, shape, device, seed)
    sides = [Side(DENSE, partial(made, BF16, dense, sparse=False))]
    if element == FP8:
        sides.append(Side(DENSE_FP8, partial(made, FP8, dense_fp8, sparse=False)))
    sides += [
        Side(OWN, partial(made, element, own)),
        Side(CUSPARSELT, partial(made, element, cusparselt_search.product), foreign=True),
    ]
    if element == FP8:
        sides.append(Side(CUTLASS, partial(made, FP8, cutlass), missing_cutlass(), foreign=True))
    return Table(
        KIND, "x".join(map(str, shape)), SETTINGS[element], tuple(sides), PLAN, operations=2.0 * m * k * n,
        graph=device == "cuda", needed=12.0,
    )  # fmt: skip


def calls(
    shape: Shape, device: str, seed: int, element: torch.dtype, method: Method, *, sparse: bool = True
) -> list[Call]:
    """A call of a method for each set of operands, the first compared with the exact product."""
    sets = operands(shape, element, device, seed, sparse=sparse)
    made = method(sets)
    sets[0].check(made[0]())
    return made


def dense(sets: tuple[Operands, ...]) -> list[Call]:
    """cuBLAS."""
    return [partial(torch.mm, one.x, one.weight.t()) for one in sets]


def dense_fp8(sets: tuple[Operands, ...]) -> list[Call]:
    """torch._scaled_mm with fast sums, as torchao calls it for inference."""

    def call(one: Operands, scale: Tensor) -> Tensor:
        return torch._scaled_mm(
            one.x, one.weight.t(), scale_a=one.x_scale, scale_b=scale, out_dtype=BF16, use_fast_accum=True
        )

    return [partial(call, one, one.scale.t()) for one in sets if one.scale is not None]


def own(sets: tuple[Operands, ...]) -> list[Call]:
    """`fast.linear_sparse` with fast sums, metadata arranged beforehand."""

    def call(one: Operands, values: Tensor, metadata: Tensor) -> Tensor:
        return fast.linear_sparse(
            one.x, values, metadata, x_scale=one.x_scale, scale=one.scale, out_dtype=BF16
        )

    return [partial(call, one, one.compressed[0], one.arranged) for one in sets]


def missing_cutlass() -> str | None:
    """Why torchao's kernel cannot be measured; None where it can."""
    if (reason := library_missing(TORCHAO)) is not None:
        return reason
    names = ("rowwise_scaled_linear_sparse_cutlass_f8f8", "to_sparse_semi_structured_cutlass_sm9x_f8")
    ops = import_module("torchao.ops")
    absent = [name for name in names if not hasattr(ops, name)]
    return f"missing: this torchao has no {absent[0]}" if absent else None


def cutlass(sets: tuple[Operands, ...]) -> list[Call]:
    """torchao's kernel, which applies both scales."""
    ops = import_module("torchao.ops")

    def call(one: Operands, values: Tensor, metadata: Tensor, x_scale: Tensor, scale: Tensor) -> Tensor:
        made: Tensor = ops.rowwise_scaled_linear_sparse_cutlass_f8f8(
            one.x, x_scale, values, metadata, scale, None, BF16
        )
        return made

    found: list[Call] = []
    for one in sets:
        if one.x_scale is not None and one.scale is not None:
            stored = ops.to_sparse_semi_structured_cutlass_sm9x_f8(one.weight)
            found.append(partial(call, one, *stored, one.x_scale.reshape(-1), one.scale.reshape(-1)))
    return found


__all__ = ["KIND", "tables"]
