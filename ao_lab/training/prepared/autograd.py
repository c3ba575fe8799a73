"""The linear layer of a prepared step in autograd: operands, products and what is kept are those of `TrainingLinear`."""

from __future__ import annotations

from typing import Any

import torch

from ao_lab.training import shared
from ao_lab.training.prepared.step import Step
from ao_lab.training.products import is_captured
from fast.layers.column_sums import column_sums
from fast.second_derivatives import once_differentiable

Grad = torch.Tensor | None


class PreparedLinear(torch.autograd.Function):
    """y = x @ w.T + bias for x (..., K)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, step: Step
    ) -> torch.Tensor:
        """The output; x's copy for the weight gradient is kept."""
        if is_captured(x):
            rows, scale, *kept = step.inputs(x)
        else:
            (rows, scale), kept, _ = shared.copies(x, step.shared, lambda: _copies(step, x))
        codes, weight_scale = step.weight_rows(w)
        ctx.save_for_backward(w, *kept)
        ctx.step, ctx.shape = step, x.shape
        y = step.output(rows, scale, codes, weight_scale, bias)
        # As nn.Linear's output this is no view: FSDP2 hangs a hook on it, which a write to a view would lose.
        return y if x.dim() == 2 else torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, None]:
        """Gradients of x, w and bias."""
        if torch.compiler.is_compiling():  # compiled autograd: launches past Triton are not for tracers
            made: tuple[Grad, Grad, Grad, None] = _untraced(ctx, g)
            return made
        return _gradients(ctx, g)


def _gradients(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, None]:
    shared.forget()
    step, shape = ctx.step, ctx.shape
    w, x_codes, x_scale = ctx.saved_tensors
    wants_x, wants_w, wants_bias, _ = ctx.needs_input_grad
    made = step.gradients(g)
    if made is None:
        raise NotImplementedError(
            "a training step takes output gradients that lie in memory, and not in batches (is_grads_batched)"
        )
    rows, scale, columns, column_scale = made
    dx = dw = None
    if wants_x:
        codes, weight_scale = step.weight_columns(w)
        dx = step.input_grad(rows, scale, codes, weight_scale, None)
        dx = dx if len(shape) == 2 else dx.view(shape)
    if wants_w:
        dw = step.weight_grad(columns, column_scale, x_codes, x_scale, None)
    return dx, dw, column_sums(g) if wants_bias else None, None


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="ao_lab: a step that repeats launches its kernels past the compiler; compile backward without fullgraph=True"
)
def _untraced(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, None]:
    return _gradients(ctx, g)


def _copies(step: Step, x: torch.Tensor) -> shared.Copies:
    rows, scale, columns, column_scale = step.inputs(x)
    return (rows, scale), (columns, column_scale), step


__all__ = ["PreparedLinear"]
