"""SwiGLU and the linear layer behind it as one step: the layer's input is quantized as it is made, and not kept.

y = P(silu(gate) * up, w) + bias, with P the products of a recipe. Forward one kernel makes the codes along rows. Kept are gate,
up and the weight, which SwiGLU and the layer keep anyway; in place of the layer's input (a byte an element as codes, two where
the weight gradient's operands are dense) backward makes silu(gate) * up again, once, for the weight gradient. Products of
values are `swiglu_values`. Operands, outputs and gradients are those of `fast.swiglu` followed by
`ao_lab.training.autograd.training_linear`, bit for bit.

SwiGLU and the linear layer behind it as one step where products run on values: the layer's input is not kept.

For recipes that `ao_lab.training.dequantized` serves (MX blocks on GPUs that scale none). Kept are gate, up and the weight;
backward makes silu(gate) * up again, once, for the weight gradient. Operands, outputs and gradients are those of `fast.swiglu`
followed by `DequantizedLinear`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear
from torch.nn.modules.module import _has_any_global_hook as global_hooks

import fast
from ao_lab.training import dequantized, shared
from ao_lab.training.autograd import as_matrix, gradient_operands, weight_columns_of
from ao_lab.training.casts import of_record, quantize_one, weight_rows
from ao_lab.training.dequantized import gradient_values, operand_values, weight_columns_values
from ao_lab.training.layers import LowPrecisionLinear, autocast_dtype, mark_run
from ao_lab.training.products import product
from ao_lab.training.restricted import tuned_recipe
from ao_lab.training.transforms import is_transformed
from fast.device import PLAIN
from fast.layers.column_sums import column_sums
from fast.layers.gradients import swiglu_vjp
from fast.second_derivatives import once_differentiable
from reference.training.recipe import Recipe


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


Grad = torch.Tensor | None
#: Calls that a module makes beside its forward.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class SwiGLULinear(torch.autograd.Function):
    """See the module text; gate and up (..., K)."""

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
        output = recipe.output
        ctx.save_for_backward(gate, up, w)
        ctx.recipe = recipe
        scheme = dequantized.scheme_of(output.a)
        rows = of_record(fast.swiglu_quantize(as_matrix(gate), as_matrix(up), scheme), scheme)
        y = product("output", rows, weight_rows(w, output.b), output, gate.dtype, bias)
        # No view, and under a tracer a tensor of its own: see `TrainingLinear`.
        made: torch.Tensor = torch.ops.aten._unsafe_view(y, (*gate.shape[:-1], w.shape[0]))
        return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, Grad, None]:
        """Gradients of gate, up, w and bias. The weight's comes first: its operands are gone when gate's and up's are made."""
        shared.forget()
        gate, up, w = ctx.saved_tensors
        recipe, dtype = ctx.recipe, gate.dtype
        wants_w, wants_bias = ctx.needs_input_grad[2:4]
        g = as_matrix(g)
        rows, columns = gradient_operands(g, recipe, True, wants_w, None)
        dw = None if columns is None else _weight_grad(columns, gate, up, recipe, w.dtype)
        del columns
        weight = weight_columns_of(w, recipe)
        dx = product("input_grad", rows, weight, recipe.input_grad, dtype)  # type: ignore[arg-type]
        del rows, weight
        d_gate, d_up = swiglu_vjp(dx.view(gate.shape), gate, up)
        return d_gate, d_up, dw, column_sums(g) if wants_bias else None, None


def _weight_grad(
    columns: Any, gate: torch.Tensor, up: torch.Tensor, recipe: Recipe, dtype: torch.dtype
) -> torch.Tensor:
    x = as_matrix(fast.swiglu(gate, up))
    return product(
        "weight_grad", columns, quantize_one(x.t(), recipe.weight_grad.b), recipe.weight_grad, dtype
    )


def swiglu_linear(gate: torch.Tensor, up: torch.Tensor, down: Any) -> torch.Tensor:
    """down(silu(gate) * up), down being a module; as one step where that serves, else by its two parts."""
    if gate.dtype not in dequantized.HALVES or hasattr(gate, "device_mesh"):
        y: torch.Tensor = down(torch.nn.functional.silu(gate) * up)
        return y
    recipe = served_recipe(gate, up, down)
    if recipe is None:
        made: torch.Tensor = down(fast.swiglu(gate, up))
        return made
    mark_run(down)
    by_values = dequantized.serves(gate, down.weight, down.bias, recipe, "auto")
    step = SwiGLUValuesLinear if by_values else SwiGLULinear
    joined: torch.Tensor = step.apply(gate, up, down.weight, down.bias, recipe)  # type: ignore[no-untyped-call]
    return joined


def served_recipe(gate: torch.Tensor, up: torch.Tensor, down: torch.nn.Module) -> Recipe | None:
    """The recipe of a layer that one step serves: in training, called as its class is, without hooks and without a forward of
    its own (as accelerate gives modules), quantized as `is_served` says; None for others."""
    if type(down) is not LowPrecisionLinear or is_called_otherwise(down):
        return None
    if not torch.compiler.is_compiling() and is_transformed():
        return None
    settings, w = down.low_precision, down.weight
    trained = torch.is_grad_enabled() and gate.requires_grad and up.requires_grad
    plain = type(w) in PLAIN and up.shape == gate.shape and {t.dtype for t in (up, w)} == {gate.dtype}
    if settings.kernel != "auto" or not trained or not plain or autocast_dtype(gate) is not None:
        return None
    of_m, of_n, of_k = settings.steps
    n, k = w.shape
    if gate.shape[-1] != k or (gate.numel() // max(k, 1)) % of_m or n % of_n or k % of_k:
        return None
    recipe = tuned_recipe(settings.recipe, gate, w)
    return recipe if is_served(recipe) else None


def is_called_otherwise(module: torch.nn.Module) -> bool:
    """Whether a call of a module is more than its class's forward: a forward of its own, or hooks, of all modules too."""
    hooked = any(getattr(module, name) for name in HOOKS) or bool(global_hooks())  # type: ignore[no-untyped-call]
    return "forward" in vars(module) or hooked


def is_served(recipe: Recipe) -> bool:
    """Whether every operand is taken from the tensor itself as it is: quantized, in the weight gradient alone dense, too."""
    plain = all(not (one.hadamard or one.is_stochastic) and one.source == "tensor" for one in recipe.operands)
    codes = [one.scheme is not None for one in recipe.operands]
    return plain and (all(codes) or (all(codes[:4]) and not any(codes[4:])))


__all__ = [
    "SwiGLULinear",
    "SwiGLUValuesLinear",
    "is_called_otherwise",
    "is_served",
    "served_recipe",
    "swiglu_linear",
]
