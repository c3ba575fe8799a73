"""The linear layers of several experts in autograd, their three products on quantized operands; see `training.autograd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ao_lab.training.autograd import is_drawn, new_seed, tuned_recipe
from ao_lab.training.casts import joined, parts
from ao_lab.training.grouped.casts import (
    Columns,
    Layout,
    columns_operand,
    layout_of,
    rows_operand,
    token_columns,
    weight_columns,
    weight_operand,
)
from ao_lab.training.grouped.products import columns_product, rows_product
from fast.second_derivatives import once_differentiable
from reference.training.grouped import group_step
from reference.training.recipe import Recipe

Grad = torch.Tensor | None
#: Streams of random bits: the place of an operand among the six.
X, W, G, W_T, G_T, X_T = range(6)


class GroupedLinear(torch.autograd.Function):
    """y[t] = x[t] @ w[expert of t].T for x (T, K) sorted by expert and w (E, N, K)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        offsets: torch.Tensor,
        recipe: Recipe,
        kernel: str,
        kept: bool = True,
        evaluated: bool = False,
    ) -> torch.Tensor:
        """The output; x's copy for the weight gradient is made where that is wanted. One seed serves forward and backward.

        kept, evaluated: as of `TrainingLinear.forward`.
        """
        wants = ctx.needs_input_grad
        layout = layout_of(offsets, x.shape[0], group_step(recipe))
        seed = new_seed(recipe) if is_drawn(recipe, wants, kept, evaluated) else None
        rows = rows_operand(x, recipe.output.a, layout, seed, X)
        columns = Columns(x[:0])
        if kept and wants[1]:
            columns = token_columns(x, rows, recipe.weight_grad.b, recipe.output.a, layout, seed, X_T)
        tensors, ctx.settings = parts(columns.matrix)
        ctx.save_for_backward(
            w, layout.offsets, layout.ends, layout.source, layout.owners, columns.table, *tensors
        )
        ctx.recipe, ctx.dtype, ctx.kernel, ctx.rows, ctx.seed = recipe, x.dtype, kernel, x.shape[0], seed
        b = weight_operand(w, recipe.output.b, seed, W)
        return rows_product(rows, b, offsets, recipe.output, x.dtype, kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, ...]:
        """Gradients of x and w, which have none of their own."""
        w, offsets, ends, source, owners, table, *tensors = ctx.saved_tensors
        recipe, seed = ctx.recipe, ctx.seed
        layout = Layout(offsets, ends, ctx.rows, group_step(recipe), source, owners)
        g = g.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            a = rows_operand(g, recipe.input_grad.a, layout, seed, G)
            b = weight_columns(w, recipe.input_grad.b, recipe.output.b, seed, W_T)
            dx = rows_product(a, b, offsets, recipe.input_grad, ctx.dtype, ctx.kernel, "input_grad")
        if ctx.needs_input_grad[1]:
            left = columns_operand(g, recipe.weight_grad.a, layout, seed, G_T)
            right = Columns(joined(list(tensors), ctx.settings), table)
            dw = columns_product(left, right, ends, recipe.weight_grad, w.dtype, ctx.kernel, ctx.rows)
        return dx, dw, None, None, None, None, None


#: Told of x, w, offsets, recipe, kernel and the output of each call, while `ao_lab.tune` records.
LISTENERS: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Recipe, str, torch.Tensor], None]] = []


def grouped_linear(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, recipe: Recipe, kernel: str = "auto", *, tuned: bool = True,
    evaluated: bool = False,
) -> torch.Tensor:  # fmt: skip
    """x (T, K), sorted by expert, times the transposed weight of each row's expert, w (E, N, K): (T, N) in autograd.

    Operands and their bits as in `reference.training.grouped_linear`. offsets: (E,) int32 or int64 on x's device, the row after
    each expert's, which do not fall and end within T; on a GPU the host reads none of them, so wrong ones raise nothing. Rows
    from the last offset on are of no expert: zeros, with gradients of zeros, whatever they hold. kernel: of the
    products, as for linear layers: "auto", "scaled_mm", "dequantize" or "emulate". tuned, evaluated: as for linear layers.
    Raises ValueError for shapes that do not fit, TypeError for dtypes that do not.
    """
    _check(x, w, offsets)
    low = tuned_recipe(recipe, x, w) if tuned and kernel == "auto" else recipe
    kept = torch.is_grad_enabled()
    made: torch.Tensor = GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x.contiguous(), w, offsets.to(torch.int32), low, kernel, kept, evaluated
    )
    for listener in LISTENERS:
        listener(x, w, offsets, recipe, kernel, made)
    return made


def _check(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> None:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[2] or offsets.shape != w.shape[:1]:
        raise ValueError(
            f"grouped_linear takes x (T, K), w (E, N, K) and offsets (E,), got shapes {tuple(x.shape)}, {tuple(w.shape)} and "
            f"{tuple(offsets.shape)}"
        )
    if x.dtype != w.dtype or offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"grouped_linear takes x and w of one dtype and int32 offsets, got {x.dtype}, {w.dtype} and {offsets.dtype}; cast "
            f"one, or use torch.autocast"
        )
