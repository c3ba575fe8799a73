"""Corrected biases keep mean outputs; low-rank residuals against the singular value decomposition of D R."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from reference import dequantize, quantize
from reference.calibration.residual import correct_bias, low_rank_residual
from tests.support.refusals import refused

F = np.float32


def layer(seed, rows=24, k=64):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, k)) * np.exp(rng.standard_normal(k))
    w = rng.standard_normal((rows, k)).astype(F)
    return w, quantize(w, "int3_g32"), x.T @ x / 300


def left_over(w, q, h, factors):
    d = (
        w.astype(np.float64)
        - dequantize(q)
        - factors.left.astype(np.float64) @ factors.right.astype(np.float64)
    )
    return float((d @ h * d).sum())


@pytest.mark.parametrize("rank", [0, 1, 5, 24])
@pytest.mark.parametrize("shape", [(24, 64), (96, 32)])
def test_it_is_the_truncated_decomposition_of_the_error_in_the_outputs(rank, shape):
    w, q, h = layer(rank, *shape)
    factors = low_rank_residual(w, q, h, rank, dtype="float64")
    assert factors.left.shape == (shape[0], rank)
    assert factors.right.shape == (rank, shape[1])
    d = w.astype(np.float64) - dequantize(q)
    root = np.linalg.cholesky(h)
    u, s, v = np.linalg.svd(d @ root, full_matrices=False)
    expected = (u[:, :rank] * s[:rank]) @ v[:rank] @ np.linalg.inv(root)
    np.testing.assert_allclose(factors.left @ factors.right, expected, atol=1e-9)
    np.testing.assert_allclose(left_over(w, q, h, factors), (s[rank:] ** 2).sum(), rtol=1e-9, atol=1e-12)


def test_inputs_decide():
    """Of the same rank, the decomposition of the weight's error alone leaves more in the outputs."""
    w, q, h = layer(1)
    plain = low_rank_residual(w, q, np.eye(64), 4)
    assert left_over(w, q, h, low_rank_residual(w, q, h, 4)) < 0.9 * left_over(w, q, h, plain)


def test_inputs_that_span_less_than_all_channels():
    """A singular Hessian needs no damping: its rank is enough for no error at all."""
    w, q, _ = layer(2)
    x = np.random.default_rng(2).standard_normal((6, 64))
    h = x.T @ x / 6
    assert left_over(w, q, h, low_rank_residual(w, q, h, 6, dtype="float64")) < 1e-20
    nothing = low_rank_residual(w, q, np.zeros((64, 64)), 2)
    assert np.isfinite(nothing.left).all()
    assert np.isfinite(nothing.right).all()


def test_rounded_factors_answer_each_other():
    w, q, h = layer(3)
    narrow = low_rank_residual(w.astype(ml_dtypes.bfloat16), q, h, 4)
    assert narrow.left.dtype == narrow.right.dtype == ml_dtypes.bfloat16
    exact = low_rank_residual(w.astype(ml_dtypes.bfloat16), q, h, 4, dtype="float64")
    near = w.astype(ml_dtypes.bfloat16)
    assert left_over(near, q, h, narrow) < 1.01 * left_over(near, q, h, exact)
    peaks = np.take_along_axis(exact.left, np.abs(exact.left).argmax(axis=0)[None], axis=0)
    assert (peaks > 0).all()
    # The right factor is the least squares answer to the left one as it was rounded.
    wide = narrow.left.astype(np.float64)
    d = near.astype(np.float64) - dequantize(q)
    answer = np.linalg.lstsq(wide, d, rcond=None)[0]
    assert (narrow.right == answer.astype(F).astype(ml_dtypes.bfloat16)).mean() > 0.98


def test_refusals():
    w, q, h = layer(4)
    refused(ValueError, "rank is an integer from 0 to 24", low_rank_residual, w, q, h, 25)
    refused(ValueError, "rank", low_rank_residual, w, q, h, True)
    refused(ValueError, "got shapes", low_rank_residual, w[:4], q, h, 1)
    refused(TypeError, "takes a Quantized", low_rank_residual, w, w, h, 1)
    refused(ValueError, r"\(64, 64\)", low_rank_residual, w, q, h[:3], 1)
    refused(ValueError, "NaN or infinity in w", low_rank_residual, w * F(np.nan), q, h, 1)
    bad = quantize(np.where(w == w[0, 0], np.nan, w).astype(F), "int3_g32")
    refused(ValueError, "the values of quantized", low_rank_residual, w, bad, h, 1)


def test_a_corrected_bias_keeps_mean_outputs():
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


def test_a_bias_refuses():
    w = np.ones((2, 32), F)
    q, mean = quantize(w, "mxfp4"), np.ones(32)
    refused(TypeError, "NumPy array, got list", correct_bias, w.tolist(), q, mean)
    refused(ValueError, r"shape \(32,\), got shape \(2,\)", correct_bias, w, q, mean[:2])
    refused(ValueError, "NaN or infinity in the mean", correct_bias, w, q, mean * np.nan)
    refused(ValueError, r"got shapes \(1, 32\) and \(2, 32\)", correct_bias, w[:1], q, mean)
    refused(ValueError, "finite numbers", correct_bias, w * np.inf, q, mean)
    refused(TypeError, "takes a Quantized", correct_bias, w, w, mean)
