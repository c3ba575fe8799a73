"""`correct_bias` for torch tensors: `reference.calibration.bias` in float64 on w's device."""

from __future__ import annotations

import torch

from fast.calibration.inputs import check_finite, float_tensor
from fast.quantize.quantize import dequantize
from reference import Quantized


def correct_bias(w: torch.Tensor, quantized: Quantized, mean: torch.Tensor) -> torch.Tensor:
    """(W - Q) mean, float64 (N,) on w's device: see `reference.correct_bias`. mean: on any device."""
    w, mean = float_tensor(w, "correct_bias", "w"), float_tensor(mean, "correct_bias", "the mean")
    if w.dim() != 2:
        raise ValueError(
            f"correct_bias takes w as a matrix (outputs, inputs), got shape {tuple(w.shape)}; reshape it"
        )
    check_finite(w, "correct_bias", "w")
    if mean.shape != w.shape[1:] or not bool(mean.isfinite().all()):
        raise ValueError(
            f"correct_bias takes the finite mean of inputs, shape {tuple(w.shape[1:])}, got shape {tuple(mean.shape)}; use the "
            f"statistics of this layer"
        )
    if quantized.shape != tuple(w.shape):
        raise ValueError(f"quantized is that of w, of shape {tuple(w.shape)}, got shape {quantized.shape}")
    change = w.double() - dequantize(quantized).double()
    return change @ mean.to(w.device, torch.float64)


__all__ = ["correct_bias"]
