"""`fake_quantize` for torch tensors, with autograd; see `reference.fake_quantize` for values and gradients."""

from __future__ import annotations

from typing import Any

import torch

from fast.device import is_traced, is_transformed
from fast.dispatch import execute, require_tensor, run, wants_gradient
from fast.ops import given_of
from fast.quantize.fake_quantize_ops import FAKE_QUANTIZE, FAKE_QUANTIZE_VJP
from fast.quantize.ops import operands_of
from fast.second_derivatives import once_differentiable
from reference import Scales, Scheme


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
    if wants_gradient(operands) and not (is_traced(x) or is_transformed()):
        (_, *parts, words) = operands if len(operands) > 1 else (x, None, None, None, None)
        made: Any = _FakeQuantize.apply(x, *parts, scheme, axis, words)  # type: ignore[no-untyped-call]
    else:
        made = run(FAKE_QUANTIZE, scheme, (axis,), operands)
    return made  # type: ignore[no-any-return]


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
    made: tuple[Any, Any, Any] = run(
        FAKE_QUANTIZE_VJP, scheme, (axis,), (g, *operands_of(x, scales, random_bits))
    )
    return made
