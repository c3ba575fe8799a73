"""SwiGLU and the linear layer behind it as one step where products run on values: the layer's input is not kept.

For recipes that `ao_lab.training.dequantized` serves (MX blocks on GPUs that scale none). Kept are gate, up and the weight;
backward makes silu(gate) * up again, once, for the weight gradient. Operands, outputs and gradients are those of `fast.swiglu`
followed by `DequantizedLinear`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

import fast
from ao_lab.training import shared
from ao_lab.training.dequantized import gradient_values, operand_values, weight_columns_values
from fast.layers.column_sums import column_sums
from fast.layers.gradients import swiglu_vjp
from fast.second_derivatives import once_differentiable
from reference.training.recipe import Recipe

Grad = torch.Tensor | None


class SwiGLUValuesLinear(torch.autograd.Function):
    """See the module text; gate and up (..., K), in one 16-bit dtype with the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: torch.Tensor,
        up: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
    ) -> torch.Tensor:
        """The output (..., N)."""
        ctx.save_for_backward(gate, up, w)
        ctx.recipe = recipe
        x = operand_values(hidden(gate, up), recipe.output.a, 1, "x")
        y = linear(x, operand_values(w.contiguous(), recipe.output.b, 1, "w"), bias)
        # No view, and under a tracer a tensor of its own: see `TrainingLinear`.
        made: torch.Tensor = torch.ops.aten._unsafe_view(y, (*gate.shape[:-1], w.shape[0]))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, Grad, None]:
        """Gradients of gate, up, w and bias. The weight's comes first: its operands are gone when gate's and up's are made."""
        shared.forget()
        gate, up, w = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        wants_w, wants_bias = ctx.needs_input_grad[2:4]
        g = g.reshape(-1, g.shape[-1]).contiguous()
        # Both halves take a gradient, so rows are made.
        rows: Any
        rows, columns = gradient_values(g, recipe, wants_w)
        dw = None
        if columns is not None:
            dw = columns.t() @ operand_values(hidden(gate, up), recipe.weight_grad.b, 0, "x.T")
        del columns
        dx = rows @ weight_columns_values(w.contiguous(), recipe)
        del rows
        d_gate, d_up = swiglu_vjp(dx.view(gate.shape), gate, up)
        return d_gate, d_up, dw, column_sums(g) if wants_bias else None, None


def hidden(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up as a matrix (M, K)."""
    x = fast.swiglu(gate, up)
    return x.reshape(-1, x.shape[-1])


__all__ = ["SwiGLUValuesLinear"]
