"""The product of a layer in quantization-aware training: what it computes, its gradients, autograd, compilers and torch.func.

y = fq(x) fq(W)' + b, where fq is `fast.fake_quantize` in the layer's recipe. W is rounded in its own dtype and comes out in
that of x: under autocast too this is what the converted layer multiplies. With kernel "auto" torch multiplies the two dense
operands; any other computes the forward as the converted layer will (`ao_lab.gemm.select`), so that its outputs are equal bit
for bit, and the gradients stay those below.

Gradients are straight through: dx = g fq(W) where x did not saturate, dW = g' fq(x) where W did not, 0 elsewhere; learned
scales get the gradient of `fake_quantize_vjp`. Kept for backward are x and W as they came (W is the parameter itself), never a
rounded operand; x only where the gradients that are wanted depend on it. Both roundings are made again, the same bits, the
larger operand first: its rounded copy is gone before the other and its product are there, so that backward holds one rounded
operand beyond what plain training holds. Where a kernel marks which blocks saturate while it rounds them again
(`fast.quantize.fake_quantize`), gradients are masked in place, in those blocks alone.

Eager calls run `QATLinearFunction`. What traces a program sees one operator, and another one for its gradients: a compiler
that saw inside would merge the roundings of backward with those of forward, and keep their results between the two. Transforms
of torch.func take no function that keeps no rounded operand; under these operands are rounded by `StraightThrough`, which has
rules for reverse and forward mode and for vmap, and torch multiplies them. Derivatives are those of the eager layer: dense
where an element did not saturate, 0 elsewhere; learned scales and zero points have reverse mode alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

import fast
from ao_lab.config.recipe import Recipe
from ao_lab.gemm.select import product
from ao_lab.tensor.chunked import PIECE, quantized_by_rows
from ao_lab.tensor.quantized_tensor import QuantizedTensor, from_quantized
from fast.dispatch import PLAIN, functional_transform, has_kernels, is_traced
from fast.ops import once_differentiable, record_name
from fast.quantize import fake_quantize
from reference import Scales, Scheme
from reference.arrays.namespace import namespace_of
from reference.quantize.blocks import Blocks
from reference.schemes.schemes import record_of


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


class QATLinearFunction(torch.autograd.Function):
    """y of rows x; keeps the parameter, and x where that is needed."""

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
        given, need = Given(*tensors), ctx.needs_input_grad
        kept = needs_input(rule, given, _wanted(need, 4))
        ctx.save_for_backward(x if kept else None, weight, *tensors)
        ctx.rule = rule
        return values(x, weight, bias, given, rule)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        """`gradients`, at the places of forward's arguments."""
        x, weight, *tensors = ctx.saved_tensors
        result = gradients(grads[0], x, weight, Given(*tensors), ctx.rule, _wanted(ctx.needs_input_grad, 4))
        dx, dw, db, dscale, dzero, dinput = result
        return dx, dw, db, None, dscale, dzero, dinput, None, None


def _wanted(need: tuple[bool, ...], first: int) -> tuple[bool, ...]:
    """Which gradients are wanted, of arguments x, weight, bias and, from place `first` on, those of `Given`."""
    return (*need[:3], *need[first : first + 3])


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
    x: torch.Tensor | None,
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
    result = gradients(g, x, weight, given, rule_of(rule), tuple(wanted))
    return [part for part in result if part is not None]


@qat_linear_backward_op.register_fake
def _fake_backward(
    g: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    scale: Any,
    zero: Any,
    input_scale: Any,
    input_zero: Any,
    started: Any,
    rule: str,
    wanted: list[bool],
) -> list[torch.Tensor]:
    shapes = (
        g.new_empty((g.shape[0], weight.shape[1])),
        weight,
        g.new_empty(g.shape[1:]),
        scale,
        zero,
        input_scale,
    )
    chosen = [like for like, want in zip(shapes, wanted, strict=True) if want]
    return [torch.empty_like(like, memory_format=torch.contiguous_format) for like in chosen]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, *tensors, rule = inputs
    kept = needs_input(rule_of(rule), Given(*tensors), _wanted(ctx.needs_input_grad, 3))
    ctx.save_for_backward(x if kept else None, weight, *tensors)
    ctx.rule = rule


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    x, weight, *tensors = ctx.saved_tensors
    wanted = list(_wanted(ctx.needs_input_grad, 3))
    result = iter(torch.ops.ao_lab.qat_linear_backward(g, x, weight, *tensors, ctx.rule, wanted))
    gradients_of = [next(result) if want else None for want in wanted]
    return (*gradients_of, None, None, None)


qat_linear_op.register_autograd(_backward, setup_context=_keep)


def refuse_dtensor(weight: torch.Tensor) -> None:
    """TypeError for a weight that is split among ranks where a layer in QAT runs: its operators have no rules for that."""
    if hasattr(weight, "device_mesh"):
        raise TypeError(
            "QAT: the weight is a DTensor; shard layers by fully_shard after step='prepare', and call the module that was "
            "sharded. Tensor parallelism has no layers in QAT: split the converted model"
        )


def qat_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, given: Given, rule: Rule
) -> torch.Tensor:
    """The layer's output for inputs (..., K); differentiable. Under autocast inputs and bias are cast, as in F.linear.

    Outside it a bias keeps its dtype: what the converted layer would not add to these inputs is not trained with.
    Raises torch's RuntimeError for inputs of no axis, TypeError for a DTensor as the weight.
    """
    if not x.dim():
        return torch.nn.functional.linear(x, weight, bias)
    if type(weight) not in PLAIN:
        refuse_dtensor(weight)
    kind = x.device.type
    casts = kind != "meta" and torch.is_autocast_enabled(kind)
    if casts and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(kind))
        bias = None if bias is None else bias.to(x.dtype)
    if not torch.compiler.is_compiling() and functional_transform() is not None:
        return linear(x, weight, bias, given, rule)
    rows = x if x.dim() == 2 else x.reshape(prod(x.shape[:-1]), x.shape[-1])
    y: torch.Tensor
    # torch.jit.trace records one operator: inside of it lengths are tensors.
    if is_traced(x) or is_traced(weight) or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
        y = torch.ops.ao_lab.qat_linear(rows, weight, bias, *given.tensors, rule.text)
    elif casts:
        with torch.autocast(kind, enabled=False):
            y = QATLinearFunction.apply(rows, weight, bias, rule, *given.tensors)  # type: ignore[no-untyped-call]
    else:
        y = QATLinearFunction.apply(rows, weight, bias, rule, *given.tensors)  # type: ignore[no-untyped-call]
    return y if x.dim() == 2 else y.reshape((*x.shape[:-1], weight.shape[0]))


class StraightThrough(torch.autograd.Function):
    """x as a scheme represents it, in a dtype, by given scales or its own; see the module text."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        scale: torch.Tensor | None,
        zero: torch.Tensor | None,
        scheme: str,
        axis: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """The rounded x."""
        record, scales = record_of(scheme), None if scale is None else Scales(scale, None, zero)
        if x.dtype == dtype:
            return fast.fake_quantize(x, record, axis=axis, scales=scales)
        return fast.dequantize(fast.quantize(x, record, axis=axis, scales=scales), dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep x and its scales."""
        ctx.save_for_backward(*inputs[:3])
        ctx.save_for_forward(*inputs[:3])
        ctx.settings = inputs[3:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of `fast.fake_quantize_vjp`; that of x by a mask, so that it can be differentiated again."""
        (g,), (x, scale, zero) = grads, ctx.saved_tensors
        dx = _masked(g.to(x.dtype), x, scale, zero, ctx.settings) if ctx.needs_input_grad[0] else None
        dscale = dzero = None
        if any(ctx.needs_input_grad[1:3]):
            _, dscale, dzero = _vjp(g.to(x.dtype), x, scale, zero, ctx.settings)
        return dx, dscale, dzero, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        """The tangent of x where it did not saturate; NotImplementedError for those of scales."""
        t, t_scale, t_zero = tangents[:3]
        x, scale, zero = ctx.saved_tensors
        if t_scale is not None or t_zero is not None:
            raise NotImplementedError(
                f"QAT: learned scales of shape {tuple(scale.shape)} have no forward-mode derivative (torch.func.jvp, jacfwd, "
                f"hessian); use reverse mode (grad, vjp, jacrev), or leave qat_scale out of what is differentiated"
            )
        tangent = torch.zeros_like(x) if t is None else _masked(t, x, scale, zero, ctx.settings)
        return tangent.to(ctx.settings[2])


def _vjp(g: torch.Tensor, x: torch.Tensor, scale: Any, zero: Any, settings: tuple[Any, ...]) -> Any:
    scheme, axis, _ = settings
    scales = None if scale is None else Scales(scale, None, zero)
    return fast.fake_quantize_vjp(g, x, record_of(scheme), axis=axis, scales=scales)


def _masked(
    g: torch.Tensor, x: torch.Tensor, scale: Any, zero: Any, settings: tuple[Any, ...]
) -> torch.Tensor:
    """g where x did not saturate, 0 elsewhere."""
    scale, zero = (part if part is None else part.detach() for part in (scale, zero))
    passed = _vjp(torch.ones_like(x).detach(), x.detach(), scale, zero, settings)[0]
    return torch.where(passed != 0, g, torch.zeros_like(g))


def transformed_rounding(
    x: torch.Tensor, scheme: Scheme, axis: int, scales: Scales | None, dtype: torch.dtype, started: Any
) -> torch.Tensor:
    """`forward.rounded`, differentiable under transforms: x as its scheme represents it; x itself before the start."""
    given = (None, None) if scales is None else (scales.scale, scales.zero)
    y: torch.Tensor = StraightThrough.apply(x, *given, scheme.key, axis, dtype)  # type: ignore[no-untyped-call]
    y = y if scales is None else with_nan(y, x, scheme)
    if started is not None:
        y = torch.where(started, y, x.to(dtype))
    return y


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, given: Given, rule: Rule
) -> torch.Tensor:
    """The product of the rounded operands, of inputs (..., K).

    NotImplementedError for a layer whose forward is that of a named kernel, which transforms do not reach.
    """
    if rule.kernel != "auto":
        raise NotImplementedError(
            f"QAT: {functional_transform()} of a layer of shape {tuple(weight.shape)} with kernel={rule.kernel!r}; prepare it "
            f"with kernel='auto', which uses torch's matmul"
        )
    recipe = rule.recipe
    scales = None if given.scale is None else Scales(given.scale, None, given.zero)
    dense = transformed_rounding(weight, recipe.weight, rule.axis, scales, x.dtype, given.started)
    if recipe.activation is not None:
        static = None if given.input_scale is None else Scales(given.input_scale, None, given.input_zero)
        x = transformed_rounding(x, recipe.activation, -1, static, x.dtype, given.started)
    product: torch.Tensor = torch.nn.functional.linear(x, dense, bias)
    return product


class ScaledGradient(torch.autograd.Function):
    """x; its derivative is multiplied by a factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, factor: float) -> torch.Tensor:
        """A copy of x."""
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        """Keep the factor."""
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient times the factor."""
        return grads[0] * ctx.factor, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        """The tangent times the factor."""
        tangent: torch.Tensor = tangents[0] * ctx.factor
        return tangent
