"""What a layer in training computes, as a function of plain tensors; `ao_lab.qat.forward` has its gradients.

y = fq(x) fq(W)' + b, where fq is `fast.fake_quantize` in the layer's recipe.

W is rounded in its own dtype and comes out in that of x: under autocast too this is what the converted layer multiplies.
With kernel "auto" torch multiplies the two dense operands; any other computes the forward as the converted layer will
(`ao_lab.gemm.select`), so that its outputs are equal bit for bit, and the gradients stay those above.

Gradients of what a layer in training computes (`ao_lab.qat.forward`), as functions of plain tensors.

Straight through: dx = g fq(W) where x did not saturate, dW = g' fq(x) where W did not, 0 elsewhere; learned scales get the
gradient of `fake_quantize_vjp`. Both roundings are made again, the same bits, the larger operand first: its rounded copy is
gone before the other and its product are there, so that backward holds one rounded operand beyond what plain training holds.

Where a kernel marks which blocks saturate while it rounds them again (`fast.quantize.fake_quantize`), gradients are masked in
place, in those blocks alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

import fast
from ao_lab.config.recipe import Recipe
from ao_lab.gemm.select import product
from ao_lab.tensor.chunked import PIECE, quantized_by_rows
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from fast.device import has_kernels
from fast.ops import record_name
from fast.quantize import fake_quantize
from reference import Scales, Scheme
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import record_of


def gradients(
    g: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    given: Given,
    rule: Rule,
    wanted: tuple[bool, ...],
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight, bias, the weight's scale, its zero point and the input's scale, those that are wanted.

    g has the dtype of x, which may be left out where `needs_input` says so. All of them are new tensors.
    """
    recipe, g = rule.recipe, g.contiguous()
    dx = dw = dscale = dzero = dinput = x_mask = w_mask = None
    # Inputs that are not rounded have no copy.
    larger = recipe.activation is not None and x is not None and x.numel() > weight.numel()
    for side in ("x", "weight") if larger else ("weight", "x"):
        if side == "x" and x is not None and (wanted[1] or wanted[3] or wanted[4]):
            operand, x_mask = again(x, recipe.activation, -1, given.of_input, g.dtype, given.started)
            dw = torch.mm(g.t(), operand).to(weight.dtype)
            del operand
        if side == "weight" and (wanted[0] or wanted[5]):
            operand, w_mask = again(weight, recipe.weight, rule.axis, given.of_weight, g.dtype, given.started)
            dx = torch.mm(g, operand)
            del operand
    if dx is not None and x is not None and recipe.activation is not None:
        dx, dinput, _ = straight_through(dx, x, recipe.activation, -1, given.of_input, given.started, x_mask)
    if dw is not None:
        dw, dscale, dzero = straight_through(
            dw, weight, recipe.weight, rule.axis, given.of_weight, given.started, w_mask
        )
    db = g.sum(0) if wanted[2] else None
    result = (dx, dw, db, dscale, dzero, dinput)
    return tuple(part if want else None for part, want in zip(result, wanted, strict=True))


def again(
    x: torch.Tensor, scheme: Scheme | None, axis: int, scales: Scales | None, dtype: torch.dtype, started: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """An operand as forward rounded it, and the mask of its blocks that saturate, where a kernel makes one."""
    if scheme is None:
        return x.detach(), None
    if not has_kernels(x) or scales is not None or x.dtype != dtype or cannot_saturate(scheme):
        return rounded(x, scheme, axis, scales, dtype, started), None
    result, mask = fake_quantize.fake_quantize_with_mask(own(x), scheme, axis)
    if started is not None:
        result, mask = torch.where(started, result, x), None if mask is None else mask * started
    return result, mask


def straight_through(
    g: torch.Tensor,
    x: torch.Tensor,
    scheme: Scheme,
    axis: int,
    scales: Scales | None,
    started: Any,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`fake_quantize_vjp`, in g's memory where there is a mask; g itself, and nothing for scales, before the start."""
    if scales is None and cannot_saturate(scheme):
        return g, None, None
    if mask is not None:
        return fake_quantize.mask_gradient(g, own(x), mask, scheme, axis), None, None
    dx, dscale, dzero = fast.fake_quantize_vjp(g, own(x), scheme, axis=axis, scales=scales)
    if started is None:
        return dx, dscale, dzero
    late = [None if part is None else torch.where(started, part, 0.0) for part in (dscale, dzero)]
    return torch.where(started, dx, g), late[0], late[1]


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
        """The rule of a layer; inputs are rounded where the sum runs along the weight's blocks, as in `ao_lab.gemm.select`."""
        inputs = recipe.activation is not None and axis % 2 == 1
        activation = record_name(recipe.activation) if inputs and recipe.activation is not None else ""
        return Rule(record_name(recipe.weight), activation, recipe.kernel, recipe.accumulation, axis)

    @property
    def text(self) -> str:
        """All fields in one line, for operators' arguments: compilers write these into comments of their programs."""
        return "\t".join((self.weight, self.activation, self.kernel, self.accumulation, str(self.axis)))

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
    weight, activation, kernel, accumulation, axis = text.split("\t")
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
    scales = scales_with_nan(weight.detach(), recipe.weight, axis, scales)
    q = fast.quantize(weight.detach(), recipe.weight, axis=axis, scales=scales, packed=packed)
    return from_quantized(q, recipe, weight.dtype, given.of_input)


def own(x: torch.Tensor) -> torch.Tensor:
    """x without its history; on the host a copy, for NumPy borrows the memory, and FSDP could not free a gathered weight."""
    return x.detach().clone() if x.device.type == "cpu" else x.detach()


def rounded(
    x: torch.Tensor, scheme: Scheme, axis: int, scales: Scales | None, dtype: torch.dtype, started: Any
) -> torch.Tensor:
    """x as its scheme represents it, in a dtype; x itself before the start."""
    x = own(x)
    if x.device.type == "cpu" and x.numel() > PIECE and scales is None and axis == -1:
        result = quantized_by_rows(x, Recipe(weight=scheme)).dequantize(dtype)
    elif x.dtype == dtype:
        result = fast.fake_quantize(x, scheme, axis=axis, scales=scales)
    else:
        result = fast.dequantize(fast.quantize(x, scheme, axis=axis, scales=scales), dtype)
    result = result if scales is None else with_nan(result, x, scheme)
    return result if started is None else torch.where(started, result, x.to(dtype))


def with_nan(y: torch.Tensor, x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """y, what given scales make of x, with NaN where x has it: an element that has no code for NaN stores a number there.

    Scales of the scheme's own rule are NaN for a block that holds one.
    """
    return y if scheme.format.nan_code is not None else torch.where(x.isnan(), x.to(y.dtype), y)


def scales_with_nan(x: torch.Tensor, scheme: Scheme, axis: int, scales: Scales) -> Scales:
    """Given scales of x, NaN for blocks of x that hold NaN, where the element has no code for it."""
    if scheme.format.nan_code is not None or not bool(x.isnan().any()):
        return scales
    blocks, ns = Blocks.of(tuple(x.shape), scheme.scale, axis), namespace_of(x)
    counts = blocks.expose(blocks.split(ns, x.isnan().to(torch.float32), zeros=True).sum(-1)[..., None], ns)
    return Scales(torch.where(counts > 0, torch.nan, scales.scale), None, scales.zero)


def values(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, given: Given, rule: Rule
) -> torch.Tensor:
    """y of rows x (M, K)."""
    recipe = rule.recipe
    if rule.kernel != "auto":
        stored = weight_as_stored(own(weight), recipe, rule.axis, given).transposed()
        result = product(x.detach(), stored, None if bias is None else bias.detach())
        if given.started is None:
            return result
        return torch.where(given.started, result, torch.nn.functional.linear(x, weight.to(x.dtype), bias))
    dense = rounded(weight, recipe.weight, rule.axis, given.of_weight, x.dtype, given.started)
    return torch.nn.functional.linear(rounded_input(x, recipe, given), dense, bias)


def rounded_input(x: torch.Tensor, recipe: Recipe, given: Given) -> torch.Tensor:
    """Rows as the recipe rounds them."""
    if recipe.activation is None:
        return x.detach()
    return rounded(x, recipe.activation, -1, given.of_input, x.dtype, given.started)


def cannot_saturate(scheme: Scheme) -> bool:
    """Whether no finite element can pass the largest code under scales made from the data itself.

    So it is where the largest magnitude is mapped onto the largest code or below it by correctly rounded float32 operations:
    the error of the quotient is under one part in 2**22, which rounding to the element takes away again.
    """
    scale, fmt = scheme.scale, scheme.format
    rule = (scale.statistic, scale.rule, scale.stored, scale.storage, scale.compute, scheme.arithmetic)
    float32 = rule == ("absmax", "ratio", "decode", "float32", "float32", "float32")
    one_level = scheme.zero is None and scheme.outer is None and not scheme.deviations
    return float32 and one_level and fmt.kind in ("int", "float") and scale.target <= fmt.max


def needs_input(rule: Rule, given: Given, wanted: tuple[bool, ...]) -> bool:
    """Whether the gradients that are wanted depend on x: those of the weight, and a mask of what saturated in x."""
    if any((wanted[1], wanted[3], wanted[4], wanted[5])):
        return True
    scheme = rule.recipe.activation
    return wanted[0] and scheme is not None and (given.input_scale is not None or not cannot_saturate(scheme))
