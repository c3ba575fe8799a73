"""Fake quantization whose gradient costs no pass over memory: what saturates is noted in forward, block by block.

Two steps of `fake_quantize_vjp` for those who round x anyway before its gradient is there, as a layer does that rounds its
operands again in backward. Noted are blocks with an element beyond the codes; a gradient is read and written only there.
"""

from __future__ import annotations

import torch

from fast.device import has_kernels
from fast.kernels.launch import cache as ready
from fast.quantize.fake_quantize import fake_quantize_vjp, forward
from reference import Scheme


def noted(x: torch.Tensor, scheme: str | Scheme, axis: int = -1) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(`fake_quantize` without autograd, uint8 notes of the blocks); None in place of notes where no kernel makes them."""
    key, known = ready.call("noted", scheme, (axis,), x)
    if known is not None:
        return known  # type: ignore[no-any-return]
    if has_kernels(x):
        from fast.kernels.quantize import saturation_host as clipping

        made = clipping.noted(x.detach(), scheme, axis, key)
        if made is not None:
            return made
    return forward(x, scheme, axis, None, None), None


def clip(
    g: torch.Tensor, x: torch.Tensor, notes: torch.Tensor | None, scheme: str | Scheme, axis: int = -1
) -> torch.Tensor:
    """The gradient of x for a gradient g of `noted`'s values: in g's own memory where there are notes."""
    if notes is None:
        return fake_quantize_vjp(g, x, scheme, axis=axis)[0]
    key, known = ready.call("clip", scheme, (axis,), g, x, notes)
    if known is not None:
        return known  # type: ignore[no-any-return]
    from fast.kernels.quantize import saturation_host as clipping

    return clipping.clip(g, x.detach(), notes, scheme, axis, key)


__all__ = ["clip", "noted"]
