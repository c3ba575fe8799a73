"""The linear layer of a recipe under torch.func: grad, vjp, jacrev, and vmap, where every example has scales of its own.

What is kept for backward are the layer's own inputs, as a transform keeps nothing else; operands are quantized again. They are
those of `ao_lab.training.autograd.TrainingLinear`, bit for bit. vmap runs one example after the other: amaxes and scales are
those of the example alone, whatever the batch. Each example has random bits of its own where a recipe rounds stochastically,
unless vmap is told randomness="same". Second gradients and tangents are not defined.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from ao_lab.training.autograd import as_matrix, gradient_operands, new_seed, weight_columns_of
from ao_lab.training.casts import STREAMS, quantize_one, quantize_two, weight_rows
from ao_lab.training.products import product
from ao_lab.training.restricted import tuned_recipe
from fast.layers.column_sums import column_sums
from reference.training.recipe import Recipe

# Which transforms a layer that trains by a recipe takes part in, and what it says under others.

_transforms = torch._C._functorch.peek_interpreter_stack
_traces = torch._C._get_tracing_state
FORWARD = "forward-mode gradients (torch.autograd.forward_ad)"
ONCE = (
    "first gradients by torch.func.grad, vjp and jacrev, and vmap of them, are defined; "
    "ao_lab.convert_from_training_(model) makes the layers dense again"
)


def is_functional() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp, jacrev) may have wrapped tensors."""
    return _transforms() is not None


def is_transformed() -> bool:
    """Whether torch.func, torch.jit.trace or forward-mode gradients listen; to be asked outside of compiled programs."""
    return is_functional() or _traces() is not None or forward_ad._current_level >= 0


def check_traced(w: torch.Tensor) -> None:
    """For a layer of weight w (N, K): ValueError under torch.jit.trace, and NotImplementedError, as of torch's own functions,
    under forward-mode gradients."""
    n, k = _untraced_shape(w)
    layer = f"LowPrecisionLinear(in_features={k}, out_features={n})"
    _refuse_trace(layer)
    if not is_functional():
        refuse(layer, FORWARD)


def check_experts_traced(w: torch.Tensor) -> None:
    """For experts of weights w (E, N, K): the same, and NotImplementedError under transforms of torch.func too."""
    if torch.compiler.is_compiling() or not is_transformed():
        return
    experts, n, k = _untraced_shape(w)
    layer = f"{experts} experts of ({n}, {k})"
    _refuse_trace(layer)
    refuse(layer, "transforms of torch.func" if is_functional() else FORWARD)


def _untraced_shape(w: torch.Tensor) -> tuple[int, ...]:
    """The shape in numbers: inside torch.jit.trace lengths are tensors."""
    state, set_state = _traces(), torch._C._set_tracing_state  # type: ignore[attr-defined]
    set_state(None)
    try:
        return tuple(w.shape)
    finally:
        set_state(state)


def _refuse_trace(layer: str) -> None:
    if _traces() is not None:
        raise ValueError(
            f"{layer}: torch.jit.trace keeps no quantization of values that it has not seen, so a layer that trains by a "
            f"recipe is not traced; call ao_lab.convert_from_training_(model) first, or use torch.export"
        )


def refuse(layer: str, transform: str) -> NoReturn:
    """NotImplementedError that names a layer and a transform."""
    raise NotImplementedError(
        f"{layer} trains by a recipe, whose products have no rule for {transform}; of linear layers {ONCE}"
    )


#: Added to the seed from one example of vmap to the next.
NEXT = 0x9E3779B97F4A7C15
SEEDS = 2**63 - 1


class FunctionalLinear(torch.autograd.Function):
    """y = x @ w.T + bias for x (..., K), by a recipe under a seed."""

    @staticmethod
    def forward(
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        kernel: str,
        seed: int | None,
    ) -> torch.Tensor:
        """The output."""
        output = recipe.output
        rows = quantize_one(as_matrix(x), output.a, seed, STREAMS["x"])
        y = product("output", rows, weight_rows(w, output.b, None, seed), output, x.dtype, bias, kernel)
        return y.reshape(*x.shape[:-1], w.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep what forward was given."""
        x, w, bias, ctx.recipe, ctx.kernel, ctx.seed = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
        """Gradients of x, w and bias."""
        x, w = ctx.saved_tensors
        dx, dw, db = FunctionalGradients.apply(g, x, w, ctx.recipe, ctx.kernel, ctx.seed)  # type: ignore[no-untyped-call]
        return dx, dw, db if ctx.has_bias else None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        """One example after the other."""
        made = [FunctionalLinear.apply(*one) for one in _examples(info, in_dims, inputs)]  # type: ignore[no-untyped-call]
        return torch.stack(made), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """There is none: NotImplementedError."""
        refuse("LowPrecisionLinear", "tangents (torch.func.jvp, jacfwd, hessian)")


class FunctionalGradients(torch.autograd.Function):
    """Gradients of x, w and bias for g (..., N), x (..., K) and w (N, K)."""

    @staticmethod
    def forward(
        g: torch.Tensor, x: torch.Tensor, w: torch.Tensor, recipe: Recipe, kernel: str, seed: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All three; g and x have the same leading axes."""
        matrix, g = as_matrix(x), as_matrix(g)
        rows, columns = gradient_operands(g, recipe, True, True, seed)
        weight = weight_columns_of(w, recipe, None, seed)
        dx = product("input_grad", rows, weight, recipe.input_grad, x.dtype, kernel=kernel)  # type: ignore[arg-type]
        streams = STREAMS["x"], STREAMS["x.T"]
        _, kept = quantize_two(matrix, recipe.output.a, recipe.weight_grad.b, seed, streams)
        dw = product("weight_grad", columns, kept, recipe.weight_grad, w.dtype, kernel=kernel)  # type: ignore[arg-type]
        return dx.reshape(x.shape), dw, column_sums(g)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept: there are no second gradients."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """There is none: NotImplementedError."""
        refuse("LowPrecisionLinear", "gradients of gradients")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        """One example after the other."""
        made = [FunctionalGradients.apply(*one) for one in _examples(info, in_dims, inputs)]  # type: ignore[no-untyped-call]
        return tuple(torch.stack(each) for each in zip(*made, strict=True)), (0, 0, 0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """There is none: NotImplementedError."""
        refuse("LowPrecisionLinear", "tangents of gradients (torch.func.hessian)")


def _examples(info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The inputs of each example; the last one is the seed, which each has of its own."""
    found = []
    for at in range(info.batch_size):
        one = [
            value if dim is None else value.select(dim, at)
            for value, dim in zip(inputs[:-1], in_dims[:-1], strict=True)
        ]
        seed, other = inputs[-1], 0 if info.randomness == "same" else at * NEXT
        found.append((*one, None if seed is None else (seed + other) % SEEDS))
    if not found:
        raise ValueError("vmap over no example: a layer that trains by a recipe needs one")
    return found


def functional_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, kernel: str = "auto"
) -> torch.Tensor:
    """`ao_lab.training.autograd.training_linear` inside a transform of torch.func."""
    if kernel == "auto":
        recipe = tuned_recipe(recipe, x, w)
    if recipe.is_dense and kernel == "auto":
        return torch.nn.functional.linear(x, w, bias)
    with (
        temporarily_clear_interpreter_stack()
    ):  # a seed is a number of the host, which vmap would make one for each example
        seed = new_seed(recipe)
    y: torch.Tensor = FunctionalLinear.apply(x, w, bias, recipe, kernel, seed)  # type: ignore[no-untyped-call]
    return y


__all__ = [
    "FunctionalGradients",
    "FunctionalLinear",
    "check_experts_traced",
    "check_traced",
    "functional_linear",
    "is_transformed",
]
