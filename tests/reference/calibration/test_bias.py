"""The corrected bias: mean outputs are those of the weights as they were."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from reference import correct_bias, dequantize, quantize
from tests.support.refusals import refused

F = np.float32


def test_mean_outputs_stay():
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((6, 64)), rng.standard_normal((100, 64)) + 1
    for dtype in (F, np.float16, ml_dtypes.bfloat16):
        short = w.astype(dtype)
        for scheme in ("mxfp4", "int3_g64_asymmetric", "fp8_tensorwise"):
            q = quantize(short, scheme)
            bias = correct_bias(short, q, x.mean(axis=0))
            assert (bias.dtype, bias.shape) == (np.float64, (6,))
            before, after = x @ short.astype(float).T, x @ dequantize(q).astype(float).T
            np.testing.assert_allclose((after + bias).mean(axis=0), before.mean(axis=0), rtol=1e-10)
            # What is left of the squared error is its variance.
            np.testing.assert_allclose(
                ((after + bias - before) ** 2).mean(axis=0), (after - before).var(axis=0), rtol=1e-9
            )
    packed = quantize(w.astype(F), "int3_g64", packed=True)
    np.testing.assert_array_equal(
        correct_bias(w.astype(F), packed, x[0]),
        correct_bias(w.astype(F), quantize(w.astype(F), "int3_g64"), x[0]),
    )


def test_refusals_name_the_way_out():
    w = np.ones((2, 32), F)
    q, mean = quantize(w, "mxfp4"), np.ones(32)
    refused(TypeError, "NumPy array, got list", correct_bias, w.tolist(), q, mean)
    refused(ValueError, r"shape \(32,\), got shape \(2,\)", correct_bias, w, q, mean[:2])
    refused(ValueError, "finite mean", correct_bias, w, q, mean * np.nan)
    refused(ValueError, r"that of w, of shape \(1, 32\), got shape \(2, 32\)", correct_bias, w[:1], q, mean)
    refused(ValueError, "finite numbers", correct_bias, w * np.inf, q, mean)
