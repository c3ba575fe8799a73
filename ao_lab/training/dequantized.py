"""The linear layer of recipes whose products run on dequantized operands: blocks that no tensor core of the device scales.

What such a product reads is values. So operands that are consumed at once are written as values, and no codes; and since a
product in 16 bits takes its operands in either layout, those that run along columns are quantized where they lie: nothing is
transposed. The inputs' copy for the weight gradient is kept as codes, a byte an element. Operands, values and random words are
those of `TrainingLinear` under the kernel "dequantize", bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ao_lab.training.casts import STREAMS
from ao_lab.training.products import has_fp8
from fast.device import PLAIN, has_kernels
from fast.kernels.hadamard import CHOSEN
from fast.kernels.launch.cache import settings
from fast.layers.mixed import mixed_codes, mixed_values
from fast.quantize.fake_quantize_ops import FAKE_QUANTIZE
from fast.quantize.ops import DEQUANTIZE, QUANTIZE
from fast.quantize.quantize import dequantize
from reference import Quantized, Scheme
from reference.training.recipe import Operand, Recipe

Grad = torch.Tensor | None
NewSeed = Callable[[Recipe], int | None]
#: Recipes that take this way as "auto": those whose step tests/gpu/training/validate_mixed.py has seen run sooner by it.
MEASURED: frozenset[str] = frozenset()
HALVES = (torch.bfloat16, torch.float16)


class DequantizedLinear(torch.autograd.Function):
    """y = x @ w.T + bias for x (M, K), all in one 16-bit dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        recipe: Recipe,
        new_seed: NewSeed,
    ) -> torch.Tensor:
        """The output; x's copy for the weight gradient is made where that is wanted. One seed serves forward and backward."""
        a, b = recipe.output.a, recipe.output.b
        x, w = x.contiguous(), w.contiguous()
        drawn = any(ctx.needs_input_grad[:2]) or a.is_stochastic or b.is_stochastic
        seed = new_seed(recipe) if drawn else None
        tensors, ctx.stored = _kept(x, recipe, seed) if ctx.needs_input_grad[1] else ([], None)
        ctx.save_for_backward(w, *tensors)
        ctx.recipe, ctx.seed = recipe, seed
        return linear(_values(x, a, 1, seed, "x"), _values(w, b, 1, seed, "w"), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, Grad, Grad, None, None]:
        """Gradients of x, w and bias, which have none of their own."""
        w, *tensors = ctx.saved_tensors
        recipe, seed = ctx.recipe, ctx.seed
        g = g.contiguous()
        dx = dw = None
        if ctx.needs_input_grad[0]:
            b = recipe.input_grad.b
            w = _values(w, recipe.output.b, 1, seed, "w") if b.source == "output" else w
            dx = _values(g, recipe.input_grad.a, 1, seed, "g") @ _values(w, b, 0, seed, "w.T")
        if ctx.needs_input_grad[1]:
            left = _values(g, recipe.weight_grad.a, 0, seed, "g.T")
            dw = left.t() @ _kept_values(tensors, ctx.stored, recipe, g.dtype, seed)
        return dx, dw, g.sum(0) if ctx.needs_input_grad[2] else None, None, None


def dequantized_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, new_seed: NewSeed
) -> torch.Tensor:
    """x (M, K) times w.T (K, N) plus bias (N) in autograd, where `serves` says so. new_seed: of one step of a recipe."""
    y: torch.Tensor = DequantizedLinear.apply(x, w, bias, recipe, new_seed)  # type: ignore[no-untyped-call]
    return y


def serves(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, kernel: str) -> bool:
    """Whether `DequantizedLinear` computes what `TrainingLinear` does under a kernel: "dequantize", or "auto" if `MEASURED`."""
    if kernel != "dequantize" and not (kernel == "auto" and recipe.name in MEASURED):
        return False
    dtypes = {t.dtype for t in (x, w, bias) if t is not None}
    if type(w) not in PLAIN or len(dtypes) > 1 or x.dtype not in HALVES or not _takes(recipe):
        return False
    if torch.compiler.is_compiling():
        return x.is_cuda and not recipe.is_stochastic and not any(one.hadamard for one in recipe.operands)
    return has_kernels(x) and (kernel == "dequantize" or has_fp8(x.device))


def _takes(recipe: Recipe) -> bool:
    """Whether all operands are quantized, by kernels that are chosen."""
    mixed = any(one.hadamard or one.is_stochastic for one in recipe.operands)
    return all(one.scheme is not None for one in recipe.operands) and (CHOSEN or not mixed)


def _kept(x: torch.Tensor, recipe: Recipe, seed: int | None) -> tuple[list[Any], Any]:
    """The tensors of x's codes for the weight gradient, and all else that they say."""
    forward, later = recipe.output.a, recipe.weight_grad.b
    first = later.source == "output"
    q = _codes(x, forward, 1, seed, "x") if first else _codes(x, later, 0, seed, "x.T")
    return [q.codes, q.scale, q.outer], (*settings(q), q.scheme)


def _values(x: torch.Tensor, operand: Operand, axis: int, seed: int | None, stream: str) -> torch.Tensor:
    """What an operand that runs along an axis of a matrix stands for, in the matrix's layout."""
    scheme = scheme_of(operand)
    if torch.compiler.is_compiling():
        made: torch.Tensor = FAKE_QUANTIZE.operator(scheme, (axis,), (x,))
        return made
    return mixed_values(
        x, scheme, axis, hadamard_length=operand.hadamard, seed=seed or 0, stream=STREAMS[stream]
    )


def _codes(x: torch.Tensor, operand: Operand, axis: int, seed: int | None, stream: str) -> Quantized:
    """The same as codes and scales."""
    scheme = scheme_of(operand)
    if torch.compiler.is_compiling():
        q: Quantized = QUANTIZE.operator(scheme, (axis, False, False), (x,))
        return q
    return mixed_codes(
        x, scheme, axis, hadamard_length=operand.hadamard, seed=seed or 0, stream=STREAMS[stream]
    )


def _kept_values(
    tensors: list[Any], stored: Any, recipe: Recipe, dtype: torch.dtype, seed: int | None
) -> torch.Tensor:
    """What the inputs' copy stands for in the weight gradient, (M, K)."""
    shape, axis, packed, tiled, scheme = stored
    codes, scale, outer = tensors
    later = recipe.weight_grad.b
    if torch.compiler.is_compiling():
        x = DEQUANTIZE.operator(scheme, (dtype, shape, axis, packed, tiled), (codes, scale, outer, None))
    else:
        x = dequantize(Quantized(codes, scale, outer, None, shape, axis, scheme, packed, tiled), dtype)
    made: torch.Tensor = _values(x, later, 0, seed, "x.T") if later.source == "output" else x
    return made


def scheme_of(operand: Operand) -> Scheme:
    """The scheme of an operand that is quantized."""
    if operand.scheme is None:
        raise ValueError("a dense operand has no codes; use TrainingLinear")
    return operand.scheme


__all__ = ["dequantized_linear", "serves"]
