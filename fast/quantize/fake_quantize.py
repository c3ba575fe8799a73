"""`fake_quantize` for torch tensors, with autograd; see `reference.fake_quantize` for values and gradients.

`fake_quantize_with_mask` and `mask_gradient`: a gradient that costs no pass over memory, as what saturates is marked in
forward, block by block. They are two steps of `fake_quantize_vjp` for those who round x anyway before its gradient is there,
as a layer does that rounds its operands again in backward. Marked are blocks with an element beyond the codes; a gradient is
read and written only there.
"""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast import dispatch
from fast.dispatch import (
    Function,
    execute,
    has_kernels,
    is_operator,
    require_tensor,
    run,
    wants_gradient,
)
from fast.ops import given_of, in_own_memory, no_gradient, once_differentiable, record_name, register
from fast.quantize.quantize import GIVEN, Operands, Values, given, operands_of, parts_of
from reference import Scales, Scheme
from reference.schemes.schemes import record_of


def fake_quantize(
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | torch.Tensor | None = None,
    random_bits: torch.Tensor | None = None,
) -> torch.Tensor:
    """x rounded to what its scheme represents, in x's dtype, as in `reference.fake_quantize`; differentiable.

    The gradient is that of `fake_quantize_vjp`: straight through to x where nothing saturated, and to float32 `scales` that
    require a gradient. Raises NotImplementedError for an outer scale that requires one.
    """
    operands = operands_of(x, scales, random_bits, keep_history=True)
    if len(operands) > 1 and wants_gradient(operands[2:3]):
        raise NotImplementedError(
            "fast.fake_quantize has no gradient for an outer scale: detach it, and learn the block scales instead"
        )
    if wants_gradient(operands) and not is_operator(x):
        (_, *parts, words) = operands if len(operands) > 1 else (x, None, None, None, None)
        result: Any = _FakeQuantize.apply(x, *parts, scheme, axis, words)  # type: ignore[no-untyped-call]
    else:
        result = run(FAKE_QUANTIZE, scheme, (axis,), operands)
    return result  # type: ignore[no-any-return]


def fake_quantize_vjp(
    g: torch.Tensor,
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | torch.Tensor | None = None,
    random_bits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dscale, dzero) as in `reference.fake_quantize_vjp`; they have no gradient themselves."""
    require_tensor(x, "fake_quantize_vjp")
    result: tuple[Any, Any, Any] = run(
        FAKE_QUANTIZE_VJP, scheme, (axis,), (g, *operands_of(x, scales, random_bits))
    )
    return result


def fake_quantize_with_mask(
    x: torch.Tensor, scheme: str | Scheme, axis: int = -1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(`fake_quantize` without autograd, uint8 mask of the blocks); None in place of the mask where no kernel makes it."""
    key = dispatch.key_of("fake_quantize_with_mask", scheme, (axis,), (x,))
    call = dispatch.find(key)
    result = None if call is None else call(x)
    if result is None and has_kernels(x):
        from fast.kernels.quantize import host

        result = host.noted(x.detach(), scheme, axis, key)
    return result if result is not None else (forward(x, scheme, axis, None, None), None)


def mask_gradient(
    g: torch.Tensor, x: torch.Tensor, mask: torch.Tensor | None, scheme: str | Scheme, axis: int = -1
) -> torch.Tensor:
    """The gradient of x for a gradient g of `fake_quantize_with_mask`'s values: in g's own memory where there is a mask.

    ValueError for a g that is not contiguous or not like x, and for a mask that is not one uint8 for each block on x's device.
    """
    if mask is None:
        return fake_quantize_vjp(g, x, scheme, axis=axis)[0]
    key = dispatch.key_of("mask_gradient", scheme, (axis,), (g, x, mask))
    call = dispatch.find(key)
    masked: torch.Tensor | None = None
    if call is not None and g.is_contiguous() and not g.is_neg():
        masked = call(g, x, mask)  # None where an address is odd
    if masked is not None:
        return masked
    from fast.kernels.quantize import host

    return host.clip(g, x.detach(), mask, scheme, axis, key)


# Fake quantization and its gradient below their signatures: kernel, reference and operator; see `fast.dispatch`.


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
    result: torch.Tensor = execute(FAKE_QUANTIZE, record_of(scheme), (axis,), operands)
    return result.clone()


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
    result = execute(FAKE_QUANTIZE_VJP, record_of(scheme), (axis,), operands)
    return [in_own_memory(part, g) for part in result if part is not None]


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
    result = [torch.empty_like(x, memory_format=torch.contiguous_format)]
    if scale is not None:
        result.append(torch.empty_like(scale, dtype=torch.float32))
        if record_of(scheme).zero is not None:
            result.append(torch.empty_like(scale, dtype=torch.float32))
    return result


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, scale, outer, zero, scheme, axis, random_bits = inputs
    ctx.save_for_backward(x, scale, outer, zero, random_bits)
    ctx.scheme, ctx.axis = scheme, axis


def _backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:
    x, scale, outer, zero, words = ctx.saved_tensors
    result = VJP_OP(g, x, scale, outer, zero, ctx.scheme, ctx.axis, words)
    wanted = ctx.needs_input_grad
    dscale = result[1] if scale is not None and wanted[1] else None
    dzero = result[2] if zero is not None and wanted[3] and len(result) > 2 else None
    return result[0], dscale, None, dzero, None, None, None


def _fake_quantize(record: Any, values: Values, operands: Operands) -> torch.Tensor:
    *scales, words = parts_of(operands)
    result: torch.Tensor = FAKE_QUANTIZE_OP(operands[0], *scales, record_name(record), *values, words)
    return result


def _fake_quantize_kernel(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    from fast.kernels.quantize import host

    return host.fake_quantize(operands[0], record, *values, *given(operands), key)


def _fake_quantize_reference(record: Any, values: Values, operands: Operands) -> Any:
    from fast.cpu.quantize import fake_quantize as by_rows

    scales, words = given(operands)
    result = None
    if scales is None and words is None and isinstance(record, Scheme):
        result = by_rows(operands[0], record, *values)
    if result is not None:
        return result
    return reference.fake_quantize(operands[0], record, axis=values[0], scales=scales, random_bits=words)


def _fake_quantize_host(record: Any, values: Values, operands: Operands, key: Any) -> Any:
    """By a compiled loop, which calls like this one find by their key."""
    from fast.cpu.quantize import NOT_GIVEN, plan_of

    *parts, words = parts_of(operands)
    if not isinstance(record, Scheme) or words is not None:
        return None
    given_parts = NOT_GIVEN if len(operands) == 1 else (parts[0], parts[1], parts[2])
    plan = plan_of(operands[0], record, values[0], given=given_parts)
    if plan is None:
        return None
    dispatch.remember(key, plan.values, record)
    return plan.values(*operands)


def _vjp(record: Any, values: Values, operands: Operands) -> tuple[Any, ...]:
    g, x, *_ = operands
    *scales, words = parts_of(operands[1:])
    result = VJP_OP(g, x, *scales, record_name(record), *values, words)
    return (*result, None, None)[:3]


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
    host=_fake_quantize_host,
)
FAKE_QUANTIZE_VJP = Function("fake_quantize_vjp", ("g", *GIVEN), _vjp_reference, _vjp, _vjp_kernel)
FAKE_QUANTIZE_OP = register("fake_quantize", fake_quantize_op, _fake_quantize_fake, _backward, _save)
VJP_OP = register(
    "fake_quantize_vjp", fake_quantize_vjp_op, _fake_quantize_vjp_fake,
    no_gradient("fake_quantize_vjp", "the straight-through rule is of first order"),
)  # fmt: skip


class _FakeQuantize(torch.autograd.Function):
    """Straight-through where nothing saturated; scales that require a gradient get the one of learned step sizes."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: Any, outer: Any, zero: Any, scheme: str | Scheme, axis: int, words: Any
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(x, scale, outer, zero, words)
        ctx.scheme, ctx.axis = scheme, axis
        return forward(x, scheme, axis, given_of(scale, outer, zero), words)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, scale, outer, zero, words = ctx.saved_tensors
        dx, dscale, dzero = fake_quantize_vjp(
            grads[0].contiguous(), x.detach(), ctx.scheme, axis=ctx.axis, scales=given_of(scale, outer, zero),
            random_bits=words,
        )  # fmt: skip
        wanted = ctx.needs_input_grad
        return dx, dscale if wanted[1] else None, None, dzero if wanted[3] else None, None, None, None


def forward(x: torch.Tensor, scheme: str | Scheme, axis: int, scales: Any, words: Any) -> torch.Tensor:
    """Values without autograd."""
    y: torch.Tensor = execute(FAKE_QUANTIZE, scheme, (axis,), operands_of(x, scales, words))
    return y
