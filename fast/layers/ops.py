"""RMSNorm and SwiGLU below their signatures: kernel, reference, operator and gradient; see `fast.dispatch` and `fast.ops`.

Gradients are those of `fast.layers.gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import reference
from fast.dispatch import Function, execute
from fast.layers.gradients import rms_norm_vjp, swiglu_vjp
from fast.ops import constant_record, no_gradient, record_name, register
from fast.quantize.quantize import QUANTIZE, fresh_codes, fresh_scales, quantized_of
from reference import Quantized
from reference.schemes.schemes import record_of

Values = tuple[Any, ...]
Operands = Sequence[Any]
PARTS = ("codes", "scale", "outer", "zero")
QUANTIZED_ADVICE = "its results are codes; use rms_norm or swiglu, and fake_quantize"

# rms_norm: operands x, residual, weight; values eps


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
    made = RMS_NORM_OP(x, residual, weight, float(values[0]))
    return made[0], made[1] if residual is not None else None


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

# rms_norm_quantize: values eps and packed


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
    made = quantized_fake(x, scheme, packed)
    return made if residual is None else [*made, x.new_empty(x.shape)]


def quantized_fake(x: torch.Tensor, scheme: str, packed: bool) -> list[torch.Tensor]:
    """Empty codes and scales of a tensor like x, along its last axis."""
    record = record_of(scheme)
    return [fresh_codes(x, tuple(x.shape), record, packed), *fresh_scales(x, record, -1, True)]


def _result(made: Sequence[Any], x: torch.Tensor, name: str, packed: bool) -> Quantized:
    return quantized_of(constant_record(name), made, tuple(x.shape), max(x.dim() - 1, 0), packed)


def _rms_norm_quantize(record: Any, values: Values, operands: Operands) -> tuple[Quantized, Any]:
    (x, residual, weight), (eps, packed), name = operands, values, record_name(record)
    made = torch.ops.ao_lab.rms_norm_quantize(x, residual, weight, name, float(eps), packed)
    return _result(made, x, name, packed), None if residual is None else made[-1]


def _rms_norm_quantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """In one kernel where blocks lie in rows; otherwise normalized, and then quantized."""
    from fast.kernels.layers import rms_norm

    (x, residual, weight), (eps, packed) = operands, values
    made = rms_norm.rms_norm_quantize(x, weight, record, eps, residual, packed, key)
    if made is not None:
        return made
    y, new_residual = execute(RMS_NORM, None, (eps,), operands)
    return execute(QUANTIZE, record, (-1, packed, False), (y,)), new_residual


RMS_NORM_QUANTIZE = Function(
    "rms_norm_quantize", NORMED,
    lambda r, v, o: reference.rms_norm_quantize(o[0], o[2], r, eps=v[0], residual=o[1], packed=v[1]),
    _rms_norm_quantize, _rms_norm_quantize_kernel,
)  # fmt: skip
register(
    "rms_norm_quantize", rms_norm_quantize_op, _rms_norm_quantize_fake,
    no_gradient("rms_norm_quantize", QUANTIZED_ADVICE),
)  # fmt: skip

# swiglu: operands gate and up; values their strides, by which kernels read rows


def swiglu_op(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    made: torch.Tensor = execute(SWIGLU, None, strides(gate, up), (gate, up))
    return made


def strides(gate: Any, up: Any) -> tuple[Any, ...]:
    """Where rows lie: they are read there. Nothing for what has no strides, which is refused elsewhere."""
    try:
        return gate.stride(), up.stride()
    except (AttributeError, RuntimeError):
        return ()


def _save_swiglu(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    return swiglu_vjp(g, *ctx.saved_tensors)


def _swiglu_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.layers import swiglu

    return swiglu.swiglu(*operands, key)


SWIGLU = Function(
    "swiglu", ("gate", "up"), lambda r, v, o: reference.swiglu(*o),
    lambda r, v, o: SWIGLU_OP(*o), _swiglu_kernel, differentiable=True,
)  # fmt: skip
SWIGLU_OP = register(
    "swiglu", swiglu_op, lambda gate, up: gate.new_empty(gate.shape), _swiglu_backward, _save_swiglu
)

# swiglu_quantize: values packed, then the strides


def swiglu_quantize_op(gate: torch.Tensor, up: torch.Tensor, scheme: str, packed: bool) -> list[torch.Tensor]:
    """Codes, scale, outer scale and zero point, those that there are."""
    q = execute(SWIGLU_QUANTIZE, record_of(scheme), (packed, *strides(gate, up)), (gate, up))
    return [part for part in (getattr(q, name) for name in PARTS) if part is not None]


def _swiglu_quantize(record: Any, values: Values, operands: Operands) -> Quantized:
    name = record_name(record)
    return _result(torch.ops.ao_lab.swiglu_quantize(*operands, name, values[0]), operands[0], name, values[0])


def _swiglu_quantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """In one kernel where blocks lie in rows; otherwise multiplied, and then quantized."""
    from fast.kernels.layers import swiglu

    made = swiglu.swiglu_quantize(*operands, record, values[0], key)
    if made is not None:
        return made
    y = execute(SWIGLU, None, values[1:], operands)
    return execute(QUANTIZE, record, (-1, values[0], False), (y,))


SWIGLU_QUANTIZE = Function(
    "swiglu_quantize", ("gate", "up"), lambda r, v, o: reference.swiglu_quantize(*o, r, packed=v[0]),
    _swiglu_quantize, _swiglu_quantize_kernel,
)  # fmt: skip
register(
    "swiglu_quantize", swiglu_quantize_op, lambda gate, up, scheme, packed: quantized_fake(gate, scheme, packed),
    no_gradient("swiglu_quantize", QUANTIZED_ADVICE),
)  # fmt: skip
