"""`rms_norm` and `rms_norm_quantize` for torch tensors; see `reference.layers.normalize` for the rules."""

from __future__ import annotations

import torch

from fast.dispatch import run
from fast.layers.ops import RMS_NORM, RMS_NORM_QUANTIZE
from reference import Quantized, Scheme


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, new residual or None) on x's device; differentiable in x, weight and residual.

    Arguments, edges and errors as in `reference.rms_norm`. Gradients are those of `fast.layers.gradients`.
    """
    made: tuple[torch.Tensor, torch.Tensor | None] = run(RMS_NORM, None, (eps,), (x, residual, weight))
    return made


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
    made: tuple[Quantized, torch.Tensor | None] = run(
        RMS_NORM_QUANTIZE, scheme, (eps, packed), (x, residual, weight)
    )
    return made
