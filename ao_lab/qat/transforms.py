"""QAT under the transforms of torch.func: the same values and straight-through gradients, in operations that these know.

Eager calls run functions that keep no rounded operand (`ao_lab.qat.autograd`); torch.func takes none of that kind. Under a
transform operands are rounded by `StraightThrough`, which has rules for reverse and forward mode and for vmap, and torch
multiplies them. Derivatives are those of the eager layer: dense where an element did not saturate, 0 elsewhere; learned scales
and zero points have reverse mode alone.
"""

from __future__ import annotations

from typing import Any

import torch

import fast
from ao_lab.qat.forward import Given, Rule, with_nan
from fast.device import functional_transform
from reference import Scales, Scheme
from reference.schemes.record_text import record_of


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
        made = torch.zeros_like(x) if t is None else _masked(t, x, scale, zero, ctx.settings)
        return made.to(ctx.settings[2])


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
    made: torch.Tensor = torch.nn.functional.linear(x, dense, bias)
    return made


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
        made: torch.Tensor = tangents[0] * ctx.factor
        return made


__all__ = ["ScaledGradient", "StraightThrough", "linear", "rounded"]
