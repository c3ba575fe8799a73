"""`rms_norm_vjp` and `swiglu_vjp` for torch tensors: what the layers' backward passes are; see `reference.layers`.

No names of `fast` itself: autograd calls them. Their own gradients, which second derivatives ask for, are those of the formulas
in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fast.dispatch import Function, execute, run
from fast.ops import register
from reference.layers import normalize as specified_norm
from reference.layers import swiglu as specified_swiglu

Values = tuple[Any, ...]
Operands = Sequence[Any]
Pair = tuple[torch.Tensor, torch.Tensor]


def rms_norm_vjp(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    residual_grad: torch.Tensor | None = None,
) -> Pair:
    """(dx, dweight) on x's device. Arguments, edges and errors as in `reference.layers.normalize.rms_norm_vjp`."""
    made: Pair = run(RMS_NORM_VJP, None, (float(eps),), (g, x, weight, residual_grad))
    return made


def swiglu_vjp(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> Pair:
    """(dgate, dup) on gate's device; edges and errors as in `reference.layers.swiglu.swiglu_vjp`.

    gate and up may be halves of one matrix: rows are read where they lie.
    """
    made: Pair = run(SWIGLU_VJP, None, _strides(g, gate, up), (g, gate, up))
    return made


def _strides(*tensors: Any) -> Values:
    """Where rows lie; nothing for what has no strides, which is refused elsewhere."""
    try:
        return tuple(t.stride() for t in tensors)
    except (AttributeError, RuntimeError):
        return ()


# rms_norm_vjp: operands g, x, weight, residual_grad; values eps


def rms_norm_vjp_op(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual_grad: torch.Tensor | None, eps: float
) -> list[torch.Tensor]:
    """dx and dweight."""
    return list(execute(RMS_NORM_VJP, None, (eps,), (g, x, weight, residual_grad)))


def _rms_norm_vjp_fake(
    g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, residual_grad: Any, eps: float
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape), weight.new_empty(weight.shape)]


def _rms_norm_vjp_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import rms_norm

    g, x, weight, more = operands
    return rms_norm.rms_norm_vjp(g, x, weight, values[0], more, key)


def _norm_formula(g: Any, x: Any, weight: Any, more: Any, eps: float) -> Pair:
    """With n = x r: dx = r (g w - n mean(g w n)), and what comes from the new residual; dw = the sum of g n over rows."""
    wide, grad = x.float(), g.float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normal, scaled = wide * r, grad * weight.float()
    dx = r * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    if more is not None:
        dx = dx + more.float()
    dw = (grad * normal).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dw.to(weight.dtype)


def _save_norm_vjp(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _norm_second(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Gradients of g, x, weight and the residual's gradient, by the formula."""
    *tensors, more = ctx.saved_tensors
    given = tensors if more is None else [*tensors, more]

    def formula(*some: Any) -> Pair:
        return _norm_formula(*some[:3], some[3] if len(some) > 3 else None, ctx.eps)

    made = torch.func.vjp(formula, *given)[1](tuple(grads))
    return *made, *(() if more is not None else (None,)), None


RMS_NORM_VJP = Function(
    "rms_norm_vjp", ("g", "x", "weight", "residual_grad"),
    lambda r, v, o: specified_norm.rms_norm_vjp(o[0], o[1], o[2], eps=v[0], residual_grad=o[3]),
    lambda r, v, o: tuple(RMS_NORM_VJP_OP(*o, v[0])), _rms_norm_vjp_kernel, differentiable=True,
)  # fmt: skip
RMS_NORM_VJP_OP = register("rms_norm_vjp", rms_norm_vjp_op, _rms_norm_vjp_fake, _norm_second, _save_norm_vjp)

# swiglu_vjp: operands g, gate and up; values their strides


def swiglu_vjp_op(g: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """dgate and dup."""
    return list(execute(SWIGLU_VJP, None, _strides(g, gate, up), (g, gate, up)))


def _swiglu_vjp_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import swiglu

    return swiglu.swiglu_vjp(*operands, key)


def _swiglu_formula(g: Any, gate: Any, up: Any) -> Pair:
    """With s the sigmoid of gate: dgate = g up s (1 + gate (1 - s)), dup = g gate s."""
    wide, v = g.float(), gate.float()
    s = torch.sigmoid(v)
    return (wide * up.float() * s * (1 + v * (1 - s))).to(gate.dtype), (wide * v * s).to(up.dtype)


def _save_swiglu_vjp(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_second(ctx: Any, grads: Any) -> Any:
    """Gradients of g, gate and up, by the formula."""
    return torch.func.vjp(_swiglu_formula, *ctx.saved_tensors)[1](tuple(grads))


SWIGLU_VJP = Function(
    "swiglu_vjp", ("g", "gate", "up"), lambda r, v, o: specified_swiglu.swiglu_vjp(*o),
    lambda r, v, o: tuple(SWIGLU_VJP_OP(*o)), _swiglu_vjp_kernel, differentiable=True,
)  # fmt: skip
SWIGLU_VJP_OP = register(
    "swiglu_vjp", swiglu_vjp_op, lambda g, gate, up: [gate.new_empty(gate.shape), gate.new_empty(gate.shape)],
    _swiglu_second, _save_swiglu_vjp,
)  # fmt: skip


__all__ = ["rms_norm_vjp", "swiglu_vjp"]
