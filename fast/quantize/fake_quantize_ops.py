"""Fake quantization and its gradient below their signatures: kernel, reference and operator; see `fast.dispatch`."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.dispatch import Function, execute
from fast.ops import given_of, in_own_memory, no_gradient, record_name, register
from fast.quantize.ops import GIVEN, Operands, Values, given, operands_of, parts_of
from reference.schemes.record_text import record_of
from reference.schemes.schemes import Scheme


def fake_quantize_op(
    x: torch.Tensor,
    scale: torch.Tensor | None,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    scheme: str,
    axis: int,
    random_bits: torch.Tensor | None,
) -> torch.Tensor:
    """x rounded to what its scheme represents."""
    operands = operands_of(x, given_of(scale, outer, zero), random_bits)
    made: torch.Tensor = execute(FAKE_QUANTIZE, record_of(scheme), (axis,), operands)
    return made.clone()


def _fake_quantize_fake(
    x: torch.Tensor, scale: Any, outer: Any, zero: Any, scheme: str, axis: int, random_bits: Any
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def fake_quantize_vjp_op(
    g: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    outer: torch.Tensor | None,
    zero: torch.Tensor | None,
    scheme: str,
    axis: int,
    random_bits: torch.Tensor | None,
) -> list[torch.Tensor]:
    """dx, and for given scales dscale and dzero where there is a zero point."""
    operands = (g, *operands_of(x, given_of(scale, outer, zero), random_bits))
    made = execute(FAKE_QUANTIZE_VJP, record_of(scheme), (axis,), operands)
    return [in_own_memory(part, g) for part in made if part is not None]


def _fake_quantize_vjp_fake(
    g: torch.Tensor,
    x: torch.Tensor,
    scale: Any,
    outer: Any,
    zero: Any,
    scheme: str,
    axis: int,
    random_bits: Any,
) -> list[torch.Tensor]:
    made = [torch.empty_like(x, memory_format=torch.contiguous_format)]
    if scale is not None:
        made.append(torch.empty_like(scale, dtype=torch.float32))
        if record_of(scheme).zero is not None:
            made.append(torch.empty_like(scale, dtype=torch.float32))
    return made


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, scale, outer, zero, scheme, axis, random_bits = inputs
    ctx.save_for_backward(x, scale, outer, zero, random_bits)
    ctx.scheme, ctx.axis = scheme, axis


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    x, scale, outer, zero, words = ctx.saved_tensors
    made = VJP_OP(g, x, scale, outer, zero, ctx.scheme, ctx.axis, words)
    wanted = ctx.needs_input_grad
    dscale = made[1] if scale is not None and wanted[1] else None
    dzero = made[2] if zero is not None and wanted[3] and len(made) > 2 else None
    return made[0], dscale, None, dzero, None, None, None


def _fake_quantize(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    *scales, words = parts_of(operands)
    made: torch.Tensor = FAKE_QUANTIZE_OP(operands[0], *scales, record_name(record), *values, words)
    return made


def _fake_quantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.quantize import host

    return host.fake_quantize(operands[0], record, *values, *given(operands), key)


def _fake_quantize_reference(record: Any, values: Values, operands: Operands) -> Any:
    from fast.cpu.fake_quantize import fake_quantize as by_rows

    scales, words = given(operands)
    made = None
    if scales is None and words is None and isinstance(record, Scheme):
        made = by_rows(operands[0], record, *values)
    if made is not None:
        return made
    return reference.fake_quantize(operands[0], record, axis=values[0], scales=scales, random_bits=words)


def _vjp(record: Any, values: Values, operands: Operands) -> tuple[Any, ...]:
    g, x, *_ = operands
    *scales, words = parts_of(operands[1:])
    made = VJP_OP(g, x, *scales, record_name(record), *values, words)
    return (*made, None, None)[:3]


def _vjp_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.quantize import vjp

    g, *rest = operands
    scales, words = given(rest)
    return vjp.gradient(g, rest[0], record, values[0], words, scales, key)


def _vjp_reference(record: Any, values: Values, operands: Operands) -> Any:
    g, *rest = operands
    scales, words = given(rest)
    return reference.fake_quantize_vjp(g, rest[0], record, axis=values[0], scales=scales, random_bits=words)


FAKE_QUANTIZE = Function(
    "fake_quantize",
    GIVEN,
    _fake_quantize_reference,
    _fake_quantize,
    _fake_quantize_kernel,
    differentiable=True,
)
FAKE_QUANTIZE_VJP = Function("fake_quantize_vjp", ("g", *GIVEN), _vjp_reference, _vjp, _vjp_kernel)
FAKE_QUANTIZE_OP = register("fake_quantize", fake_quantize_op, _fake_quantize_fake, _backward, _save)
VJP_OP = register(
    "fake_quantize_vjp", fake_quantize_vjp_op, _fake_quantize_vjp_fake,
    no_gradient("fake_quantize_vjp", "the straight-through rule is of first order"),
)  # fmt: skip
