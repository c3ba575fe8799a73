"""The product of a layer in training (`ao_lab.qat.forward`) for autograd.

Kept for backward are x and W as they came (W is the parameter itself), never a rounded operand; x only where the gradients
that are wanted depend on it.

Eager calls run `QATLinearFunction`. What traces a program sees one operator, and another one for its gradients: a compiler
that saw inside would merge the roundings of backward with those of forward, and keep their results between the two. Transforms
of torch.func see operations that they know (`ao_lab.qat.transforms`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ao_lab.qat import transforms
from ao_lab.qat.backward import gradients
from ao_lab.qat.forward import Given, Rule, needs_input, rule_of, values
from fast.device import PLAIN, functional_transform, is_traced
from fast.second_derivatives import once_differentiable


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
    found = [next(result) if want else None for want in wanted]
    return (*found, None, None, None)


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
        return transforms.linear(x, weight, bias, given, rule)
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


__all__ = ["QATLinearFunction", "qat_linear", "refuse_dtensor"]
