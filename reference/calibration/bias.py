"""`correct_bias`: what a layer's bias makes up for, the mean of its output error.

A change of the weights from W to Q moves outputs by (Q - W) x, on average by (Q - W) mean(x). Adding (W - Q) mean(x) to the
bias takes that away, and lowers the mean squared error of an output by the square of what it moved on average.

Source: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (arXiv 1906.04721), section 4.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference.calibration.hessian import Matrix
from reference.calibration.inputs import float_array, weight_matrix
from reference.quantize.quantize import dequantize
from reference.quantize.stored import Quantized


def correct_bias(w: Any, quantized: Quantized, mean: Any) -> Matrix:
    """(W - Q) mean, what is to be added to the bias: float64 (N,).

    w: finite float32, bfloat16, float16 or float64 (N, K), a NumPy array. quantized: the `Quantized` of such a matrix.
    mean: the mean of the layer's inputs, finite floats (K,) of either sign.

    Raises TypeError for other arrays or dtypes, ValueError for shapes that do not fit and values that are not finite.
    """
    w = weight_matrix(w, "correct_bias")
    mean = float_array(mean, "correct_bias", "the mean")
    if mean.shape != w.shape[1:] or not np.isfinite(mean.astype(np.float64)).all():
        raise ValueError(
            f"correct_bias takes the finite mean of inputs, shape {w.shape[1:]}, got shape {mean.shape}; use the statistics "
            f"of this layer"
        )
    if quantized.shape != w.shape:
        raise ValueError(f"quantized is that of w, of shape {w.shape}, got shape {quantized.shape}")
    change = w.astype(np.float64) - dequantize(quantized).astype(np.float64)
    bias: Matrix = change @ mean.astype(np.float64)
    return bias


__all__ = ["correct_bias"]
