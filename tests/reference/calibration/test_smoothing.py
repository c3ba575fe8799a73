"""Smoothing factors against their formulas, channel by channel, and AWQ's errors against the outputs of a layer."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from reference import SCHEMES, fake_quantize, search_scales
from reference.calibration.smoothing import awq_factors, smoothing_factors
from tests.support.refusals import refused

F = np.float32


def layer(seed, rows=16, k=64, tokens=200):
    """Weights, and inputs whose channels differ in size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, k)) * np.exp(1.5 * rng.standard_normal(k))
    return rng.standard_normal((rows, k)).astype(F), x


def statistics(x):
    return x.T @ x / len(x), np.abs(x).mean(axis=0)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_smoothquant_channel_by_channel(alpha):
    w, x = layer(0)
    largest_x, largest_w = np.abs(x).max(axis=0), np.abs(w).max(axis=0)
    found = smoothing_factors(largest_x, largest_w, alpha)
    assert found.dtype == np.float64
    for j in range(64):
        exact = float(largest_x[j]) ** alpha / float(largest_w[j]) ** (1 - alpha)
        assert found[j] == float(F(exact))
    # After smoothing by 1/2 inputs and weights have the same range in every channel.
    if alpha == 0.5:
        np.testing.assert_allclose(largest_x / found, largest_w * found, rtol=1e-6)


def test_channels_of_zeros_keep_one_and_factors_are_bounded():
    x = np.asarray([0.0, 2.0, 0.0, 3e38, 1e-30])
    w = np.asarray([1.0, 0.0, 0.0, 1e-30, 3e38])
    assert smoothing_factors(x, w).tolist() == [1, 1, 1, 2.0**16, 2.0**-16]


def test_awq_errors_are_those_of_the_outputs():
    """llm-awq's search of one linear layer, over its inputs themselves."""
    w, x = layer(1)
    h, mean = statistics(x)
    found = awq_factors([w], h, mean, "int3_g32", ratios=20)
    losses = []
    for step in range(20):
        s = mean ** (step / 20)
        s = (s / np.sqrt(s.max() * s.min())).astype(F).astype(np.float64)
        stored = fake_quantize((w * s).astype(F), "int3_g32")
        losses.append(((x @ (stored / s - w).T) ** 2).sum(axis=1).mean())
    np.testing.assert_allclose(found.errors, losses, rtol=1e-10)
    assert found.ratio == np.argmin(losses) / 20
    assert found.errors.min() < 0.8 * found.errors[0]


def test_several_weights_share_one_factor():
    w, x = layer(2)
    h, mean = statistics(x)
    parts = [w[:6], w[6:]]
    together = awq_factors(parts, h, mean, "int4_g32", ratios=5)
    apart = [awq_factors(part, h, mean, "int4_g32", ratios=5).errors for part in parts]
    np.testing.assert_allclose(together.errors, apart[0] + apart[1], rtol=1e-12)


def test_a_ratio_of_zero_is_rounding_alone_and_the_first_of_equals():
    w, x = layer(3)
    h, mean = statistics(x)
    found = awq_factors(w, h, mean, "mxfp4", ratios=1)
    d = fake_quantize(w, "mxfp4").astype(np.float64) - w
    assert found.ratio == 0
    assert (found.factors == 1).all()
    np.testing.assert_allclose(found.errors, [((d @ h) * d).sum()], rtol=1e-12)
    # Weights that every ratio stores exactly.
    exact = awq_factors(np.zeros((2, 32), F), np.eye(32), np.ones(32), "mxfp4", ratios=4)
    assert (exact.ratio, exact.errors.tolist()) == (0, [0] * 4)


def test_scales_are_searched_for_by_the_smoothed_inputs():
    w, x = layer(9)
    h, mean = statistics(x)
    found = awq_factors(w, h, mean, "int3_g32", ratios=3, search=True)
    s = mean ** (2 / 3)
    s = (s / np.sqrt(s.max() * s.min())).astype(F).astype(np.float64)
    product = (w * s).astype(F)
    scales = search_scales(product, "int3_g32", weights=np.diag(h) / s**2)
    d = fake_quantize(product, "int3_g32", scales=scales).astype(np.float64) / s - w
    np.testing.assert_allclose(found.errors[2], ((d @ h) * d).sum(), rtol=1e-12)
    assert found.errors.min() < 0.9 * awq_factors(w, h, mean, "int3_g32", ratios=3).errors.min()


def test_products_are_rounded_to_the_dtype_of_the_weights():
    w, x = layer(4)
    h, mean = statistics(x)
    narrow = w.astype(ml_dtypes.bfloat16)
    found = awq_factors(narrow, h, mean, "torchao.intx4_g32", ratios=3)
    s = mean ** (1 / 3)
    s = (s / np.sqrt(s.max() * s.min())).astype(F).astype(np.float64)
    product = (narrow.astype(np.float64) * s).astype(F).astype(ml_dtypes.bfloat16)
    d = fake_quantize(product, "torchao.intx4_g32").astype(np.float64) / s - narrow.astype(np.float64)
    np.testing.assert_allclose(found.errors[1], ((d @ h) * d).sum(), rtol=1e-12)


def test_dead_channels_keep_one():
    w, x = layer(5)
    x[:, 3] = 0
    w[:, 7] = 0
    h, mean = statistics(x)
    found = awq_factors(w, h, mean, "int3_g32")
    assert found.ratio > 0
    assert found.factors[[3, 7]].tolist() == [1, 1]
    # A channel that one of the weights reads is alive.
    other = np.ones((2, 64), F)
    assert awq_factors([w, other], h, mean, "int3_g32").factors[7] != 1
    nothing = awq_factors(w, np.zeros((64, 64)), np.zeros(64), "int3_g32")
    assert (nothing.ratio, nothing.factors.tolist()) == (0, [1] * 64)


def test_a_scheme_that_stores_nan_is_never_chosen():
    """torchao's float8 of a row of zeros is NaN: infinite errors, factors of 1, no NaN."""
    w, x = layer(6)
    w[0] = 0
    found = awq_factors(w, *statistics(x), "torchao.fp8_rowwise_inference", ratios=3)
    assert found.errors.tolist() == [np.inf] * 3
    assert (found.ratio, found.factors.tolist()) == (0, [1] * 64)


@pytest.mark.parametrize("name", [
    "fp8_128x128", "mxfp8_e5m2", "nvfp4", "int8_rowwise_asymmetric", "int2_g64_asymmetric", "ternary_g32",
    "stretched2_rowwise", "nf4", "torchao.int4_g32_tinygemm", "torchao.nf4", "te.nvfp4_16x16",
    "compressed_tensors.int8_channel",
])  # fmt: skip
def test_schemes(name):
    check_scheme(name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme(name):
    check_scheme(name)


def check_scheme(name):
    """No scheme is worse than without factors, and errors are numbers."""
    w, x = layer(7, rows=128, k=256, tokens=300)
    found = awq_factors(w, *statistics(x), name, ratios=4)
    assert np.isfinite(found.errors).all()
    assert np.isfinite(found.factors).all()
    assert found.errors.min() <= found.errors[0]


def test_extreme_weights_stay_finite():
    w = np.full((2, 32), 3e38, F)
    w[:, ::2] = 1e-45
    found = awq_factors(w, np.eye(32), np.linspace(1e-30, 1e30, 32), "int4_g32")
    assert np.isfinite(found.errors).all()
    assert np.isfinite(found.factors).all()


def test_refusals():
    w, x = layer(8)
    h, mean = statistics(x)
    ones = np.ones(4)
    refused(ValueError, "alpha is 0 to 1", smoothing_factors, ones, ones, 1.5)
    refused(ValueError, "alpha", smoothing_factors, ones, ones, float("nan"))
    refused(ValueError, r"w_absmax of shape \(4,\)", smoothing_factors, ones, np.ones(5))
    refused(ValueError, "negative", smoothing_factors, -ones, ones)
    refused(ValueError, "NaN or infinity in x_absmax", smoothing_factors, ones * np.inf, ones)
    refused(TypeError, "NumPy array", smoothing_factors, [1.0], [1.0])
    refused(ValueError, r"x_absmax of shape \(0,\)", smoothing_factors, np.float64(1), np.float64(1))
    refused(ValueError, "got none", awq_factors, [], h, mean, "int4_g32")
    refused(ValueError, "same inputs", awq_factors, [w, w[:, :32]], h, mean, "int4_g32")
    refused(ValueError, r"hessian of shape \(64, 64\)", awq_factors, w, h[:3], mean, "int4_g32")
    refused(ValueError, "sum of squares", awq_factors, w, -h, mean, "int4_g32")
    refused(ValueError, r"x_mean of shape \(64,\)", awq_factors, w, h, mean[:3], "int4_g32")
    refused(ValueError, "ratios", awq_factors, w, h, mean, "int4_g32", ratios=0)
    refused(ValueError, "NaN or infinity in ws", awq_factors, w * F(np.nan), h, mean, "int4_g32")
    refused(ValueError, "matrix", awq_factors, w[0], h, mean, "int4_g32")
    refused(TypeError, "int32", awq_factors, w.astype(np.int32), h, mean, "int4_g32")
    refused(ValueError, "divisible", awq_factors, w[:, :60], h[:60, :60], mean[:60], "int4_g32")
    drawn = replace(SCHEMES["int4_g32"], name="drawn", rounding="stochastic")
    refused(ValueError, "random_bits", awq_factors, w, h, mean, drawn)
