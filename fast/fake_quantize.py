"""`fake_quantize` for torch tensors, with autograd; see `reference.fake_quantize` for values and gradients."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast.tensors import require_tensor
from reference import Scales, Scheme


class _FakeQuantize(torch.autograd.Function):
    """Straight-through where nothing saturated; scales that require a gradient get the one of learned step sizes."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: Any, outer: Any, zero: Any, scheme: str | Scheme, axis: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale, outer, zero)
        ctx.scheme, ctx.axis = scheme, axis
        made: Any = reference.fake_quantize(x.detach(), scheme, axis=axis, scales=_scales(scale, outer, zero))
        return require_tensor(made, "fake_quantize")

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, scale, outer, zero = ctx.saved_tensors
        dx, dscale, dzero = reference.fake_quantize_vjp(
            grads[0].contiguous(), x.detach(), ctx.scheme, axis=ctx.axis, scales=_scales(scale, outer, zero)
        )
        wanted = ctx.needs_input_grad
        return dx, dscale if wanted[1] else None, None, dzero if wanted[3] else None, None, None


def _scales(scale: Any, outer: Any, zero: Any) -> Scales | None:
    """None when no scale is given, so that they are computed from x."""
    parts = [None if part is None else part.detach() for part in (scale, outer, zero)]
    return None if all(part is None for part in parts) else Scales(*parts)


def fake_quantize(
    x: torch.Tensor, scheme: str | Scheme, *, axis: int = -1, scales: Scales | torch.Tensor | None = None
) -> torch.Tensor:
    """x rounded to what its scheme represents, in x's dtype, as in `reference.fake_quantize`; differentiable.

    The gradient is that of `fake_quantize_vjp`: straight through to x where nothing saturated, and to float32 `scales` that
    require a gradient.
    """
    require_tensor(x, "fake_quantize")
    given = scales if isinstance(scales, Scales) else Scales(scales)
    made: Any = _FakeQuantize.apply(x, given.scale, given.outer, given.zero, scheme, axis)  # type: ignore[no-untyped-call]
    return require_tensor(made, "fake_quantize")


def fake_quantize_vjp(
    g: torch.Tensor,
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dscale, dzero) as in `reference.fake_quantize_vjp`."""
    g, x = require_tensor(g, "fake_quantize_vjp").detach(), require_tensor(x, "fake_quantize_vjp").detach()
    made: Any = reference.fake_quantize_vjp(g, x, scheme, axis=axis, scales=scales)
    return made  # type: ignore[no-any-return]
