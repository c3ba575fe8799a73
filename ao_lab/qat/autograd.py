"""The product of a layer in training (`ao_lab.qat.forward`) for autograd.

Kept for backward are x and W as they came (W is the parameter itself), never a rounded operand; x only where the gradients
that are wanted depend on it.

Eager calls run `QATLinearFunction`. What traces a program sees one operator, and another one for its gradients: a compiler
that saw inside would merge the roundings of backward with those of forward, and keep their results between the two. Transforms
of torch.func see operations that they know (`ao_lab.qat.autograd`).

QAT under the transforms of torch.func: the same values and straight-through gradients, in operations that these know.

Eager calls run functions that keep no rounded operand (`ao_lab.qat.autograd`); torch.func takes none of that kind. Under a
transform operands are rounded by `StraightThrough`, which has rules for reverse and forward mode and for vmap, and torch
multiplies them. Derivatives are those of the eager layer: dense where an element did not saturate, 0 elsewhere; learned scales
and zero points have reverse mode alone.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

import fast
from ao_lab.qat.forward import Given, Rule, gradients, needs_input, rule_of, values, with_nan
from fast.device import PLAIN, functional_transform, is_traced
from fast.ops import once_differentiable
from reference import Scales, Scheme
from reference.schemes.schemes import record_of


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


def rounded(
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
            f"with kernel='auto', whose operands torch multiplies"
        )
    recipe = rule.recipe
    scales = None if given.scale is None else Scales(given.scale, None, given.zero)
    dense = rounded(weight, recipe.weight, rule.axis, scales, x.dtype, given.started)
    if recipe.activation is not None:
        static = None if given.input_scale is None else Scales(given.input_scale, None, given.input_zero)
        x = rounded(x, recipe.activation, -1, static, x.dtype, given.started)
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
