"""The products of experts on tokens sorted by expert: operands, functions that can compute them, exact results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ao_lab.gemm.choices import Problem, problem_of
from ao_lab.training.casts import Matrix
from ao_lab.training.grouped.autograd import (
    G_T,
    W_T,
    X_T,
    G,
    Layout,
    W,
    X,
    columns_operand,
    layout_of,
    rows_operand,
    token_columns,
    weight_columns,
    weight_operand,
)
from ao_lab.training.grouped.products import (
    KERNELS,
    PRODUCTS,
    columns_product,
    operand_key,
    rows_product,
    select_columns,
    select_rows,
)
from ao_lab.tuning.measure import ERROR_ROWS
from ao_lab.tuning.samples import ExpertsSample
from reference.training.grouped import group_step
from reference.training.recipe import Product

#: Why a function of `PRODUCTS` that stands before or behind the default is no candidate.
REFUSED = {
    "scaled_grouped_mm": "it supports e4m3 with a scale for each row, lengths multiples of 16, on Hopper and Blackwell",
    "grouped_mm": "it needs a GPU of compute capability 8.0",
    "emulate": "float32 of the same operands is for devices where no other kernel supports them",
}


@dataclass(frozen=True)
class GroupedProduct:
    """A product of experts.

    default: the function that serves where nothing is tuned. run: by a kernel's name of linear layers. part: of a result what
    `exact` gives, the exact product of dense operands.
    """

    problem: Problem
    default: str
    run: Callable[[str], torch.Tensor]
    part: Callable[[torch.Tensor], torch.Tensor]
    exact: Callable[[], torch.Tensor]

    @property
    def calls(self) -> dict[str, Callable[[], torch.Tensor]]:
        """The candidates, the default first."""
        kernels = {name: kernel for kernel, name in KERNELS.items() if name is not None}
        able = [self.default, *(name for name in ("grouped_mm",) if self.default == "scaled_grouped_mm")]
        return {name: lambda name=name: self.run(kernels[name]) for name in able}  # type: ignore[misc]

    @property
    def refused(self) -> dict[str, str]:
        """The other functions, with the reason."""
        return {name: REFUSED[name] for name in PRODUCTS if name not in self.calls}


def products_of(sample: ExpertsSample) -> Iterator[GroupedProduct]:
    """The products that a step of experts makes."""
    recipe, x, w, g = sample.recipe, sample.x.contiguous(), sample.w, sample.g
    offsets = sample.offsets.to(torch.int32)
    layout = layout_of(offsets, x.shape[0], group_step(recipe))
    rows = rows_operand(x, recipe.output.a, layout, 0, X)
    b = weight_operand(w, recipe.output.b, 0, W)
    yield _of_rows("output", rows, b, layout, recipe.output, x, w)
    if g is None:
        return
    g = g.contiguous()
    left = rows_operand(g, recipe.input_grad.a, layout, 0, G)
    transposed = weight_columns(w, recipe.input_grad.b, recipe.output.b, 0, W_T)
    yield _of_rows("input_grad", left, transposed, layout, recipe.input_grad, g, w.transpose(1, 2))
    yield _of_columns(rows, layout, sample, x, g)


def _of_rows(
    direction: str, a: Matrix, b: Matrix, layout: Layout, record: Product, rows: torch.Tensor, w: torch.Tensor
) -> GroupedProduct:
    """rows (T, C) by w (E, R, C), as a and b."""
    offsets, dtype = layout.offsets, rows.dtype
    return GroupedProduct(
        _problem(direction, record, (rows.shape[0], w.shape[1], w.shape[2]), dtype, layout),
        select_rows(a, b, offsets),
        lambda kernel: rows_product(a, b, offsets, record, dtype, kernel),
        lambda y: y[:ERROR_ROWS],
        lambda: exact_rows(rows[:ERROR_ROWS], w, offsets),
    )


def _of_columns(
    rows: Matrix, layout: Layout, sample: ExpertsSample, x: torch.Tensor, g: torch.Tensor
) -> GroupedProduct:
    recipe, ends, record = sample.recipe, layout.ends, sample.recipe.weight_grad
    a = columns_operand(g, record.a, layout, 0, G_T)
    b = token_columns(x, rows, record.b, recipe.output.a, layout, 0, X_T)
    few = max(ERROR_ROWS // layout.experts, 1)
    return GroupedProduct(
        _problem("weight_grad", record, (g.shape[1], x.shape[1], x.shape[0]), x.dtype, layout),
        select_columns(a, b, ends),
        lambda kernel: columns_product(a, b, ends, record, x.dtype, kernel),
        lambda y: y[:, :few],
        lambda: exact_columns(g[:, :few], x, layout.offsets),
    )


def _problem(
    direction: str, record: Product, shape: tuple[int, int, int], dtype: torch.dtype, layout: Layout
) -> Problem:
    keys = operand_key(record.a), operand_key(record.b)
    return problem_of(direction, *keys, shape, dtype, record.accumulation, layout.experts)


def exact_rows(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Each row of x (T, C) times the transposed w (E, R, C) of its expert in float64: (T, R), zeros for rows of none."""
    y = x.new_zeros((x.shape[0], w.shape[1]), dtype=torch.float64)
    for expert, (start, end) in enumerate(_groups(offsets, x.shape[0])):
        if end > start:
            y[start:end] = x[start:end].double() @ w[expert].double().t()
    return y


def exact_columns(g: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Of each expert g.T @ x over its rows, g (T, N) and x (T, K), in float64: (E, N, K)."""
    groups = _groups(offsets, x.shape[0])
    return torch.stack([g[start:end].double().t() @ x[start:end].double() for start, end in groups])


def _groups(offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """The first row of each expert and the one after its last, among the first `rows`."""
    ends = [min(end, rows) for end in offsets.tolist()]
    return list(zip([0, *ends[:-1]], ends, strict=True))


__all__ = ["GroupedProduct", "exact_columns", "exact_rows", "products_of"]
