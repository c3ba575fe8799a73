"""`fake_quantize` for torch tensors, with autograd; see `reference.fake_quantize` for values and gradients."""

from __future__ import annotations

from typing import Any

import torch

import reference
from fast import ops
from fast.device import has_kernels, is_traced
from fast.kernels.launch import cache as ready
from fast.tensors import require_tensor
from reference import Scales, Scheme


class _FakeQuantize(torch.autograd.Function):
    """Straight-through where nothing saturated; scales that require a gradient get the one of learned step sizes."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: Any,
        outer: Any,
        zero: Any,
        scheme: str | Scheme,
        axis: int,
        words: Any,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, scale, outer, zero, words)
        ctx.scheme, ctx.axis = scheme, axis
        return forward(x, scheme, axis, _scales(scale, outer, zero), words)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, scale, outer, zero, words = ctx.saved_tensors
        dx, dscale, dzero = fake_quantize_vjp(
            grads[0].contiguous(), x.detach(), ctx.scheme, axis=ctx.axis, scales=_scales(scale, outer, zero),
            random_bits=words,
        )  # fmt: skip
        wanted = ctx.needs_input_grad
        return dx, dscale if wanted[1] else None, None, dzero if wanted[3] else None, None, None, None


def forward(x: torch.Tensor, scheme: str | Scheme, axis: int, scales: Any, words: Any) -> torch.Tensor:
    """Values without autograd."""
    key, known = ready.call("fake_quantize", scheme, (axis,), *ready.inputs(x, scales, words))
    if known is not None:
        return known  # type: ignore[no-any-return]
    x = x.detach()
    if has_kernels(x):
        from fast.kernels.quantize import host as quantizer

        fast = quantizer.fake_quantize(x, scheme, axis, scales, words, key)
        if fast is not None:
            return fast
    made: Any = reference.fake_quantize(x, scheme, axis=axis, scales=scales, random_bits=words)
    return require_tensor(made, "fake_quantize")


def _scales(scale: Any, outer: Any, zero: Any) -> Scales | None:
    """None when no scale is given, so that they are computed from x."""
    parts = [None if part is None else part.detach() for part in (scale, outer, zero)]
    return None if all(part is None for part in parts) else Scales(*parts)


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
    require a gradient.
    """
    require_tensor(x, "fake_quantize")
    if is_traced(x):
        return ops.fake_quantize(x, scheme, axis, scales, random_bits)
    if scales is None:
        if not (x.requires_grad and torch.is_grad_enabled()):
            return forward(x, scheme, axis, None, random_bits)
        made: Any = _FakeQuantize.apply(x, None, None, None, scheme, axis, random_bits)  # type: ignore[no-untyped-call]
        return require_tensor(made, "fake_quantize")
    given = Scales(scales) if isinstance(scales, torch.Tensor) else scales
    parts = tuple(getattr(given, part, None) for part in ready.PARTS)
    wanted = torch.is_grad_enabled() and any(
        getattr(tensor, "requires_grad", False) for tensor in (x, *parts)
    )
    if not wanted or not isinstance(given, Scales) or all(part is None for part in parts):
        return forward(x, scheme, axis, given, random_bits)
    made = _FakeQuantize.apply(x, *parts, scheme, axis, random_bits)  # type: ignore[no-untyped-call]
    return require_tensor(made, "fake_quantize")


def fake_quantize_vjp(
    g: torch.Tensor,
    x: torch.Tensor,
    scheme: str | Scheme,
    *,
    axis: int = -1,
    scales: Scales | torch.Tensor | None = None,
    random_bits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dscale, dzero) as in `reference.fake_quantize_vjp`."""
    g, x = require_tensor(g, "fake_quantize_vjp"), require_tensor(x, "fake_quantize_vjp")
    key, known = ready.call("fake_quantize_vjp", scheme, (axis,), g, *ready.inputs(x, scales, random_bits))
    if known is not None:
        return known  # type: ignore[no-any-return]
    g, x = g.detach(), x.detach()
    if has_kernels(x):
        from fast.kernels.quantize import host as quantizer

        fast = quantizer.gradient(g, x, scheme, axis, random_bits, scales, key)
        if fast is not None:
            return fast
    made: Any = reference.fake_quantize_vjp(g, x, scheme, axis=axis, scales=scales, random_bits=random_bits)
    return made  # type: ignore[no-any-return]
