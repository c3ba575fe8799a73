"""`rms_norm` and `rms_norm_quantize` for torch tensors; see `reference.layers.normalize` for the rules."""

from __future__ import annotations

import torch

import reference
from fast.device import has_kernels
from fast.kernels.launch import cache as ready
from fast.quantize.quantize import quantize
from fast.tensors import require_tensor
from reference import Quantized, Scheme


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, new residual or None) on x's device. Arguments, edges and errors as in `reference.rms_norm`."""
    key, known = ready.call("rms_norm", None, (eps,), require_tensor(x, "rms_norm"), residual, weight)
    if known is not None:
        return known  # type: ignore[no-any-return]
    x = x.detach()
    if has_kernels(x):
        from fast.kernels.layers import rms_norm as normalize

        made = normalize.rms_norm(x, weight, eps, residual, key)
        if made is not None:
            return made
    return reference.rms_norm(x, weight, eps=eps, residual=residual)


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

    Arguments, edges and errors as in `reference.rms_norm_quantize`.
    """
    x = require_tensor(x, "rms_norm_quantize")
    key, known = ready.call("rms_norm_quantize", scheme, (eps, packed), x, residual, weight)
    if known is not None:
        return known  # type: ignore[no-any-return]
    x = x.detach()
    if not has_kernels(x):
        return reference.rms_norm_quantize(x, weight, scheme, eps=eps, residual=residual, packed=packed)
    from fast.kernels.layers import rms_norm as normalize

    made = normalize.rms_norm_quantize(x, weight, scheme, eps, residual, packed, key)
    if made is not None:
        return made
    y, new_residual = rms_norm(x, weight, eps=eps, residual=residual)
    return quantize(y, scheme, packed=packed), new_residual
