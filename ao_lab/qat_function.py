"""The product of a layer in quantization-aware training, with its gradients.

Forward: y = fq(x) fq(W)' + b, where fq is `fast.fake_quantize` in the layer's recipe. Backward, straight through:
dx = (g fq(W)) where x did not saturate, dW = (g' fq(x)) where W did not, 0 elsewhere; learned scales get the gradient of
`fake_quantize_vjp`. Kept for backward are x and W as they came (W is the parameter itself), never a fake-quantized operand:
both are made again, the same bits.

W is rounded in its own dtype and comes out in that of x: under autocast too this is what the converted layer multiplies.
With kernel "auto" torch multiplies the two dense operands; any other computes the forward as the converted layer will
(`ao_lab.products`), so that its outputs are equal bit for bit, and the gradients stay those above.

Eager calls run `QATLinearFunction`. What traces a program sees one operator, and another one for its gradients: a compiler
that saw inside would merge the roundings of backward with those of forward, and keep their results between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

import fast
from ao_lab.chunked import PIECE, quantized_by_rows
from ao_lab.products import product
from ao_lab.recipes import Recipe
from ao_lab.tensor import QuantizedTensor, from_quantized
from fast.device import is_traced
from fast.ops import record_name
from reference import Scales, Scheme
from reference.record_text import record_of


@dataclass(frozen=True)
class Rule:
    """A recipe as plain values, which tracers read as constants."""

    weight: str
    #: "" where inputs are not rounded.
    activation: str
    kernel: str
    accumulation: str
    axis: int

    @staticmethod
    def of(recipe: Recipe, axis: int) -> Rule:
        """The rule of a layer; inputs are rounded where the sum runs along the weight's blocks, as in `ao_lab.products`."""
        inputs = recipe.activation is not None and axis % 2 == 1
        activation = record_name(recipe.activation) if inputs and recipe.activation is not None else ""
        return Rule(record_name(recipe.weight), activation, recipe.kernel, recipe.accumulation, axis)

    @property
    def text(self) -> str:
        """All fields in one text, for operators' arguments."""
        return "\n".join((self.weight, self.activation, self.kernel, self.accumulation, str(self.axis)))

    @property
    def recipe(self) -> Recipe:
        """The recipe again."""
        return _recipe_of(self)


@lru_cache(maxsize=256)
def _recipe_of(rule: Rule) -> Recipe:
    activation = record_of(rule.activation) if rule.activation else None
    return Recipe(
        weight=record_of(rule.weight),
        activation=activation,
        kernel=rule.kernel,
        accumulation=rule.accumulation,
    )


@lru_cache(maxsize=256)
def rule_of(text: str) -> Rule:
    """The rule of its text."""
    weight, activation, kernel, accumulation, axis = text.split("\n")
    return Rule(weight, activation, kernel, accumulation, int(axis))


@dataclass(frozen=True)
class Given:
    """Tensors beside a layer's weight: its learned scales and zero points, those of its inputs, and whether it has started."""

    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None
    input_zero: torch.Tensor | None = None
    #: A boolean on the device; None: from the first step on.
    started: torch.Tensor | None = None

    @property
    def of_weight(self) -> Scales | None:
        """Scales of the weight; None where they are found anew."""
        return None if self.scale is None else Scales(self.scale.detach(), None, self.zero)

    @property
    def of_input(self) -> Scales | None:
        """Static scales of the input."""
        return None if self.input_scale is None else Scales(self.input_scale.detach(), None, self.input_zero)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All of them, in the order of the fields."""
        return (self.scale, self.zero, self.input_scale, self.input_zero, self.started)


def weight_as_stored(weight: torch.Tensor, recipe: Recipe, axis: int, given: Given) -> QuantizedTensor:
    """The quantized weight of a dense one: what `step="convert"` puts into the model."""
    scales = given.of_weight
    if scales is None:
        return quantized_by_rows(weight.detach(), recipe, axis=axis, input_scales=given.of_input)
    packed = recipe.weight.format.bits < 8
    q = fast.quantize(weight.detach(), recipe.weight, axis=axis, scales=scales, packed=packed)
    return from_quantized(q, recipe, weight.dtype, given.of_input)


def rounded(
    x: torch.Tensor, scheme: Scheme, axis: int, scales: Scales | None, dtype: torch.dtype, started: Any
) -> torch.Tensor:
    """x as its scheme represents it, in a dtype; x itself before the start."""
    x = x.detach()
    if x.device.type == "cpu" and x.numel() > PIECE and scales is None and axis == -1:
        made = quantized_by_rows(x, Recipe(weight=scheme)).dequantize(dtype)
    elif x.dtype == dtype:
        made = fast.fake_quantize(x, scheme, axis=axis, scales=scales)
    else:
        made = fast.dequantize(fast.quantize(x, scheme, axis=axis, scales=scales), dtype)
    return made if started is None else torch.where(started, made, x.to(dtype))


def values(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, given: Given, rule: Rule
) -> torch.Tensor:
    """y of rows x (M, K)."""
    recipe = rule.recipe
    if rule.kernel != "auto":
        stored = weight_as_stored(weight, recipe, rule.axis, given).turned()
        made = product(x.detach(), stored, None if bias is None else bias.detach())
        if given.started is None:
            return made
        return torch.where(given.started, made, torch.nn.functional.linear(x, weight.to(x.dtype), bias))
    dense = rounded(weight, recipe.weight, rule.axis, given.of_weight, x.dtype, given.started)
    return torch.nn.functional.linear(rounded_input(x, recipe, given), dense, bias)


def rounded_input(x: torch.Tensor, recipe: Recipe, given: Given) -> torch.Tensor:
    """Rows as the recipe rounds them."""
    if recipe.activation is None:
        return x.detach()
    return rounded(x, recipe.activation, -1, given.of_input, x.dtype, given.started)


def gradients(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    given: Given,
    rule: Rule,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight, bias, the weight's scale, its zero point and the input's scale, those that are wanted."""
    recipe, g = rule.recipe, g.contiguous()
    dx = dw = dscale = dzero = dinput = None
    if wanted[0] or wanted[5]:
        dense = rounded(weight, recipe.weight, rule.axis, given.of_weight, x.dtype, given.started)
        dx = torch.mm(g, dense)
        if recipe.activation is not None:
            dx, dinput, _ = straight(dx, x, recipe.activation, -1, given.of_input, given.started)
    if wanted[1] or wanted[3] or wanted[4]:
        dw = torch.mm(g.t(), rounded_input(x, recipe, given)).to(weight.dtype)
        dw, dscale, dzero = straight(dw, weight, recipe.weight, rule.axis, given.of_weight, given.started)
    db = g.sum(0) if wanted[2] else None
    made = (dx, dw, db, dscale, dzero, dinput)
    return tuple(part if want else None for part, want in zip(made, wanted, strict=True))


def straight(
    g: torch.Tensor, x: torch.Tensor, scheme: Scheme, axis: int, scales: Scales | None, started: Any
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`fake_quantize_vjp`; g itself, and nothing for scales, before the start."""
    if scales is None and cannot_saturate(scheme):
        return g, None, None
    dx, dscale, dzero = fast.fake_quantize_vjp(g, x, scheme, axis=axis, scales=scales)
    if started is None:
        return dx, dscale, dzero
    late = [None if part is None else torch.where(started, part, 0.0) for part in (dscale, dzero)]
    return torch.where(started, dx, g), late[0], late[1]


def cannot_saturate(scheme: Scheme) -> bool:
    """Whether no finite element can pass the largest code under scales made from the data itself.

    So it is where the largest magnitude is mapped onto the largest code or below it by correctly rounded float32 operations:
    the error of the quotient is under one part in 2**22, which rounding to the element takes away again.
    """
    scale, fmt = scheme.scale, scheme.format
    made_so = (scale.statistic, scale.rule, scale.stored, scale.storage) == (
        "absmax",
        "ratio",
        "decode",
        "float32",
    )
    house = "." not in scheme.name and not scheme.deviations and scheme.zero is None and scheme.outer is None
    return house and made_so and fmt.kind in ("int", "float") and scale.target <= fmt.max


class QATLinearFunction(torch.autograd.Function):
    """y of rows x; keeps x and the parameter alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rule: Rule,
        *tensors: torch.Tensor | None,
    ) -> torch.Tensor:
        """`values`."""
        ctx.save_for_backward(x, weight, *tensors)
        ctx.rule = rule
        return values(x, weight, bias, Given(*tensors), rule)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """`gradients`, at the places of forward's arguments."""
        x, weight, *tensors = ctx.saved_tensors
        need = ctx.needs_input_grad
        wanted = (need[0], need[1], need[2], need[4], need[5], need[6])
        dx, dw, db, dscale, dzero, dinput = gradients(grads[0], x, weight, Given(*tensors), ctx.rule, wanted)
        return dx, dw, db, None, dscale, dzero, dinput, None, None


@torch.library.custom_op("ao_lab::qat_linear", mutates_args=())
def qat_linear_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    input_zero: torch.Tensor | None,
    started: torch.Tensor | None,
    rule: str,
) -> torch.Tensor:
    """`values` as an operator."""
    return values(x, weight, bias, Given(scale, zero, input_scale, input_zero, started), rule_of(rule))


@qat_linear_op.register_fake
def _fake(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("ao_lab::qat_linear_backward", mutates_args=())
def qat_linear_backward_op(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    input_scale: torch.Tensor | None,
    input_zero: torch.Tensor | None,
    started: torch.Tensor | None,
    rule: str,
    wanted: list[bool],
) -> list[torch.Tensor]:
    """`gradients` as an operator: those that are wanted."""
    given = Given(scale, zero, input_scale, input_zero, started)
    made = gradients(g, x, weight, given, rule_of(rule), tuple(wanted))
    # An operator's results are tensors of their own.
    return [part.clone() if part is g else part for part in made if part is not None]


@qat_linear_backward_op.register_fake
def _fake_backward(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: Any,
    zero: Any,
    input_scale: Any,
    input_zero: Any,
    started: Any,
    rule: str,
    wanted: list[bool],
) -> list[torch.Tensor]:
    shapes = (x, weight, g.new_empty(g.shape[1:]), scale, zero, input_scale)
    chosen = [like for like, want in zip(shapes, wanted, strict=True) if want]
    return [torch.empty_like(like, memory_format=torch.contiguous_format) for like in chosen]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, *tensors, rule = inputs
    ctx.save_for_backward(x, weight, *tensors)
    ctx.rule = rule


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    x, weight, *tensors = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:6])
    made = iter(torch.ops.ao_lab.qat_linear_backward(g, x, weight, *tensors, ctx.rule, wanted))
    found = [next(made) if want else None for want in wanted]
    return (*found, None, None, None)


qat_linear_op.register_autograd(_backward, setup_context=_keep)


def qat_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, given: Given, rule: Rule
) -> torch.Tensor:
    """The layer's output for inputs (..., K); differentiable. Under autocast inputs and bias are cast, as in F.linear."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
    bias = None if bias is None else bias.to(x.dtype)
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    if is_traced(x) or is_traced(weight):
        y: torch.Tensor = torch.ops.ao_lab.qat_linear(rows, weight, bias, *given.tensors, rule.text)
    else:
        with torch.autocast(kind, enabled=False):
            y = QATLinearFunction.apply(rows, weight, bias, rule, *given.tensors)  # type: ignore[no-untyped-call]
    return y.reshape((*x.shape[:-1], weight.shape[0]))


__all__ = ["Given", "QATLinearFunction", "Rule", "qat_linear", "weight_as_stored"]
