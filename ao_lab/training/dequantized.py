"""The linear layer of recipes whose products run on dequantized operands: blocks that no tensor core of the device scales.

What such a product reads is values. So operands that are consumed at once are written as values, and no codes; and since a
product in 16 bits takes its operands in either layout, those that run along columns are quantized where they lie: nothing is
transposed. The inputs' copy for the weight gradient is kept as codes, a byte an element. Where a tensor is quantized alike
along both axes, one read of it makes both. Operands, values and random words are those of `TrainingLinear` under the kernel
"dequantize", bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

from ao_lab.training.casts import STREAMS, reads_once
from ao_lab.training.products import has_fp8
from fast.dispatch import PLAIN, has_kernels, settings
from fast.layers.column_sums import column_sums
from fast.layers.hadamard import mixed_codes, mixed_values
from fast.ops import once_differentiable
from fast.quantize.fake_quantize import FAKE_QUANTIZE
from fast.quantize.quantize import DEQUANTIZE, QUANTIZE, dequantize
from fast.quantize.rowwise_colwise import both_values, values_and_codes
from reference import Quantized, Scheme
from reference.training.recipe import Operand, Recipe

#: What torch.compile(fullgraph=True) says of a recipe that rounds stochastically.
DRAWS = (
    "ao_lab: this training recipe rounds stochastically, by a seed drawn on the host at each step; call torch.compile "
    "without fullgraph=True, or train with a recipe that rounds to nearest, such as 'mxfp8'"
)

Grad = torch.Tensor | None
NewSeed = Callable[[Recipe], int | None]
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
        kept: bool = True,
        evaluated: bool = False,
    ) -> torch.Tensor:
        """The output; x's copy for the weight gradient is made where that is wanted. One seed serves forward and backward.

        kept, evaluated: as of `TrainingLinear.forward`.
        """
        a, b = recipe.output.a, recipe.output.b
        x, w = x.contiguous(), w.contiguous()
        wants = ctx.needs_input_grad
        drawn = any(wants[:2]) and (kept or not evaluated)
        seed = new_seed(recipe) if drawn or a.is_stochastic or b.is_stochastic else None
        values, tensors, ctx.stored = _inputs(x, recipe, seed, kept and wants[1])
        ctx.save_for_backward(w, *tensors)
        ctx.recipe, ctx.seed = recipe, seed
        return linear(values, operand_values(w, b, 1, "w", seed), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Grad, ...]:
        """Gradients of x, w and bias, which have none of their own."""
        w, *tensors = ctx.saved_tensors
        recipe, seed = ctx.recipe, ctx.seed
        wants_x, wants_w, wants_bias = ctx.needs_input_grad[:3]
        g = g.contiguous()
        # Each is gone when the next product is made.
        rows, columns = gradient_values(g, recipe, wants_w, wants_x, seed)
        dx = dw = None
        if rows is not None:
            dx = rows @ weight_columns_values(w, recipe, seed)
        del rows
        if columns is not None:
            dw = columns.t() @ _kept_values(tensors, ctx.stored, recipe, g.dtype, seed)
        return dx, dw, column_sums(g) if wants_bias else None, None, None, None, None


def dequantized_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: Recipe,
    new_seed: NewSeed,
    evaluated: bool = False,
) -> torch.Tensor:
    """x (M, K) times w.T (K, N) plus bias (N) in autograd, where `serves` says so. new_seed: of one step of a recipe.

    A tracer leaves a step that draws to eager: its seed is a number of the host.
    """
    kept = torch.is_grad_enabled()
    if recipe.is_stochastic and torch.compiler.is_compiling():
        return _untraced(x, w, bias, recipe, new_seed, kept, evaluated)  # type: ignore[no-any-return]
    y: torch.Tensor = DequantizedLinear.apply(x, w, bias, recipe, new_seed, kept, evaluated)  # type: ignore[no-untyped-call]
    return y


@torch.compiler.disable(reason=DRAWS)  # type: ignore[no-untyped-call, untyped-decorator]
def _untraced(*given: Any) -> torch.Tensor:
    y: torch.Tensor = DequantizedLinear.apply(*given)  # type: ignore[no-untyped-call]
    return y


def serves(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, kernel: str) -> bool:
    """Whether `DequantizedLinear` computes what `TrainingLinear` does under a kernel: "dequantize", or "auto" where that is the
    only one there is."""
    schemes = [one.scheme for one in recipe.operands if one.scheme is not None]
    if kernel not in ("auto", "dequantize") or len(schemes) < len(recipe.operands):
        return False
    if kernel == "auto" and any(_multiplies(scheme) for scheme in schemes):
        return False
    dtypes = {t.dtype for t in (x, w, bias) if t is not None}
    if type(w) not in PLAIN or len(dtypes) > 1 or x.dtype not in HALVES:
        return False
    if torch.compiler.is_compiling():
        return x.is_cuda and (kernel == "dequantize" or has_fp8(x.device))
    return has_kernels(x) and (kernel == "dequantize" or has_fp8(x.device))


def _multiplies(scheme: Scheme) -> bool:
    """Whether there are products of codes, which float32 scales multiply: then these are quicker (times:
    reports/LOG.md)."""
    return scheme.scale.storage == "float32" and scheme.outer is None


def _inputs(
    x: torch.Tensor, recipe: Recipe, seed: int | None, kept: bool
) -> tuple[torch.Tensor, list[Any], Any]:
    """Values of x for the output; where they are to be kept, the tensors of x's codes for the weight gradient, and all else
    that these say."""
    forward, later = recipe.output.a, recipe.weight_grad.b
    if kept and later.source == "tensor" and _read_once(forward, later):
        values, q = values_and_codes(x, scheme_of(forward))
        return values, *_parts(q)
    values = operand_values(x, forward, 1, "x", seed)
    if not kept:
        return values, [], None
    first = later.source == "output"
    q = _codes(x, forward, 1, seed, "x") if first else _codes(x, later, 0, seed, "x.T")
    return values, *_parts(q)


def _parts(q: Quantized) -> tuple[list[Any], Any]:
    return [q.codes, q.scale, q.outer], (*settings(q), q.scheme)


def _read_once(rows: Operand, columns: Operand) -> bool:
    """Whether one read of a matrix serves both operands: quantized alike, nothing mixed or drawn."""
    return reads_once(rows, columns) and _is_plain(rows)


def _is_plain(operand: Operand) -> bool:
    """Whether blocks are quantized as they are, to nearest."""
    return not operand.hadamard and not operand.is_stochastic


def gradient_values(
    g: torch.Tensor, recipe: Recipe, columns: bool, rows: bool = True, seed: int | None = None
) -> tuple[Grad, Grad]:
    """The output's gradient g (M, N) as the product of the inputs' gradient and that of the weight's read it, in its layout."""
    a, b = recipe.input_grad.a, recipe.weight_grad.a
    if rows and columns and _read_once(a, b):
        return both_values(g, scheme_of(a))
    own = operand_values(g, a, 1, "g", seed) if rows else None
    return own, operand_values(g, b, 0, "g.T", seed) if columns else None


def weight_columns_values(w: torch.Tensor, recipe: Recipe, seed: int | None = None) -> torch.Tensor:
    """Values of the weight (N, K) along N."""
    b = recipe.input_grad.b
    w = operand_values(w, recipe.output.b, 1, "w", seed) if b.source == "output" else w
    return operand_values(w, b, 0, "w.T", seed)


def operand_values(
    x: torch.Tensor, operand: Operand, axis: int, stream: str, seed: int | None = None
) -> torch.Tensor:
    """What an operand that runs along an axis of a matrix stands for, in the matrix's layout. stream: see `STREAMS`."""
    scheme = scheme_of(operand)
    if torch.compiler.is_compiling() and _is_plain(operand):
        values: torch.Tensor = FAKE_QUANTIZE.operator(scheme, (axis,), (x,))
        return values
    return mixed_values(
        x, scheme, axis, hadamard_length=operand.hadamard, seed=seed or 0, stream=STREAMS[stream]
    )


def _codes(x: torch.Tensor, operand: Operand, axis: int, seed: int | None, stream: str) -> Quantized:
    """The same as codes and scales."""
    scheme = scheme_of(operand)
    if torch.compiler.is_compiling() and _is_plain(operand):
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
    values: torch.Tensor = operand_values(x, later, 0, "x.T", seed) if later.source == "output" else x
    return values


def scheme_of(operand: Operand) -> Scheme:
    """The scheme of an operand that is quantized."""
    if operand.scheme is None:
        raise ValueError("a dense operand has no quantized values; use TrainingLinear")
    return operand.scheme
