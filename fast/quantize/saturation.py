"""Fake quantization whose gradient costs no pass over memory: what saturates is marked in forward, block by block.

Two steps of `fake_quantize_vjp` for those who round x anyway before its gradient is there, as a layer does that rounds its
operands again in backward. Marked are blocks with an element beyond the codes; a gradient is read and written only there.
"""

from __future__ import annotations

import torch

from fast.device import has_kernels
from fast.launch import cache
from fast.quantize.fake_quantize import fake_quantize_vjp, forward
from reference import Scheme


def fake_quantize_with_mask(
    x: torch.Tensor, scheme: str | Scheme, axis: int = -1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(`fake_quantize` without autograd, uint8 mask of the blocks); None in place of the mask where no kernel makes it."""
    key = cache.key_of("fake_quantize_with_mask", scheme, (axis,), (x,))
    call = cache.find(key)
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
    key = cache.key_of("mask_gradient", scheme, (axis,), (g, x, mask))
    call = cache.find(key)
    masked: torch.Tensor | None = None
    if call is not None and g.is_contiguous() and not g.is_neg():
        masked = call(g, x, mask)  # None where an address is odd
    if masked is not None:
        return masked
    from fast.kernels.quantize import host

    return host.clip(g, x.detach(), mask, scheme, axis, key)


__all__ = ["fake_quantize_with_mask", "mask_gradient"]
