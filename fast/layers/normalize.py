"""`rms_norm` and `rms_norm_quantize` for torch tensors; see `reference.layers.normalize` for the rules.

The gradient is `rms_norm_vjp`, no name of `fast` itself: autograd calls it. Its own gradients, which second derivatives ask
for, are those of the formula in float32. Operands are x, residual, weight; of the gradient g, x, weight, residual_grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute, run
from fast.ops import no_gradient, record_name, register
from fast.quantize.quantize import QUANTIZE, fresh_rows, quantized_rows
from reference import Quantized, Scheme
from reference.layers import normalize as specified_norm
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]
Pair = tuple[torch.Tensor, torch.Tensor]
PARTS = ("codes", "scale", "outer", "zero")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, new residual or None) on x's device; differentiable in x, weight and residual.

    Arguments, edges and errors as in `reference.rms_norm`.
    """
    result: tuple[torch.Tensor, torch.Tensor | None] = run(RMS_NORM, None, (eps,), (x, residual, weight))
    return result


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    scheme: str | Scheme,
    *,
    eps: float = 1e-6,
    residual: torch.Tensor | None = None,
    packed: bool = False,
) -> tuple[Quantized, torch.Tensor | None]:
    """(quantize(y, scheme), new residual or None) with the y of `rms_norm`, in one kernel where blocks lie in rows.

    Arguments, edges and errors as in `reference.rms_norm_quantize`. No gradient flows through.
    """
    result: tuple[Quantized, torch.Tensor | None] = run(
        RMS_NORM_QUANTIZE, scheme, (eps, packed), (x, residual, weight)
    )
    return result


def rms_norm_vjp(
    g: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    residual_grad: torch.Tensor | None = None,
) -> Pair:
    """(dx, dweight) on x's device. Arguments, edges and errors as in `reference.layers.normalize.rms_norm_vjp`."""
    result: Pair = run(RMS_NORM_VJP, None, (float(eps),), (g, x, weight, residual_grad))
    return result


def rms_norm_op(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> list[torch.Tensor]:
    """y, and the new residual where there is one."""
    y, new_residual = execute(RMS_NORM, None, (eps,), (x, residual, weight))
    return [y] if new_residual is None else [y, new_residual]


def _rms_norm_fake(x: torch.Tensor, residual: Any, weight: torch.Tensor, eps: float) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for _ in range(1 if residual is None else 2)]


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, residual, weight, ctx.eps = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(output[1] if ctx.has_residual else x, weight)


def _norm_backward(ctx: Any, grads: Any) -> tuple[Any, ...]:
    """Gradients of x, the residual (the same numbers) and weight."""
    h, weight = ctx.saved_tensors
    more = grads[1] if ctx.has_residual else None
    dx, dw = rms_norm_vjp(grads[0], h, weight, eps=ctx.eps, residual_grad=more)
    return dx, dx.clone() if ctx.has_residual else None, dw, None


def _rms_norm(record: Any, values: Values, operands: Operands) -> tuple[Any, Any]:
    x, residual, weight = operands
    result = RMS_NORM_OP(x, residual, weight, float(values[0]))
    return result[0], result[1] if residual is not None else None


def _rms_norm_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import rms_norm

    x, residual, weight = operands
    return rms_norm.rms_norm(x, weight, *values, residual, key)


NORMED = ("x", "residual", "weight")
RMS_NORM = Function(
    "rms_norm", NORMED, lambda r, v, o: reference.rms_norm(o[0], o[2], eps=v[0], residual=o[1]),
    _rms_norm, _rms_norm_kernel, differentiable=True,
)  # fmt: skip
RMS_NORM_OP = register("rms_norm", rms_norm_op, _rms_norm_fake, _norm_backward, _save_norm)


def rms_norm_quantize_op(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    scheme: str,
    eps: float,
    packed: bool,
) -> list[torch.Tensor]:
    """Codes, scale, outer scale and zero point, those that there are, and the new residual where there is one."""
    q, new_residual = execute(RMS_NORM_QUANTIZE, record_of(scheme), (eps, packed), (x, residual, weight))
    parts = [getattr(q, part) for part in PARTS]
    return [part for part in (*parts, new_residual) if part is not None]


def _rms_norm_quantize_fake(
    x: torch.Tensor, residual: Any, weight: torch.Tensor, scheme: str, eps: float, packed: bool
) -> list[torch.Tensor]:
    result = fresh_rows(x, scheme, packed)
    return result if residual is None else [*result, x.new_empty(x.shape)]


def _rms_norm_quantize(record: Any, values: Values, operands: Operands) -> tuple[Quantized, Any]:
    (x, residual, weight), (eps, packed), name = operands, values, record_name(record)
    result = torch.ops.ao_lab.rms_norm_quantize(x, residual, weight, name, float(eps), packed)
    return quantized_rows(result, x, name, packed), None if residual is None else result[-1]


def _rms_norm_quantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """In one kernel where blocks lie in rows; otherwise normalized, and then quantized."""
    from fast.kernels.layers import rms_norm

    (x, residual, weight), (eps, packed) = operands, values
    result = rms_norm.rms_norm_quantize(x, weight, record, eps, residual, packed, key)
    if result is not None:
        return result
    y, new_residual = execute(RMS_NORM, None, (eps,), operands)
    return execute(QUANTIZE, record, (-1, packed, False), (y,)), new_residual


RMS_NORM_QUANTIZE = Function(
    "rms_norm_quantize", NORMED,
    lambda r, v, o: reference.rms_norm_quantize(o[0], o[2], r, eps=v[0], residual=o[1], packed=v[1]),
    _rms_norm_quantize, _rms_norm_quantize_kernel,
)  # fmt: skip
register(
    "rms_norm_quantize", rms_norm_quantize_op, _rms_norm_quantize_fake,
    no_gradient("rms_norm_quantize", "its results are codes; use rms_norm, and fake_quantize"),
)  # fmt: skip


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

    result = torch.func.vjp(formula, *given)[1](tuple(grads))
    return *result, *(() if more is not None else (None,)), None


RMS_NORM_VJP = Function(
    "rms_norm_vjp", ("g", "x", "weight", "residual_grad"),
    lambda r, v, o: specified_norm.rms_norm_vjp(o[0], o[1], o[2], eps=v[0], residual_grad=o[3]),
    lambda r, v, o: tuple(RMS_NORM_VJP_OP(*o, v[0])), _rms_norm_vjp_kernel, differentiable=True,
)  # fmt: skip
RMS_NORM_VJP_OP = register("rms_norm_vjp", rms_norm_vjp_op, _rms_norm_vjp_fake, _norm_second, _save_norm_vjp)


__all__ = ["rms_norm", "rms_norm_quantize", "rms_norm_vjp"]
