"""Smoothing for torch tensors: CPU tensors have the bits of the reference, the device's steps those that have an order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from fast.calibration import smoothing
from fast.calibration.smoothing import awq_factors, smoothing_factors
from tests.support.refusals import refused


def layer(seed, dtype=torch.float32, rows=32, k=128):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, k)) * np.exp(1.5 * rng.standard_normal(k))
    x[:, 3] = 0
    w = torch.from_numpy(rng.standard_normal((rows, k)).astype(np.float32)).to(dtype)
    return w, torch.from_numpy(x.T @ x / 300), torch.from_numpy(np.abs(x).mean(axis=0))


@pytest.mark.parametrize("on_device", [False, True])
def test_smoothing_factors(on_device):
    rng = np.random.default_rng(0)
    x, w = np.exp(9 * rng.standard_normal((2, 100)))
    x[4] = w[5] = 0
    call = smoothing.smoothing_factors_on_device if on_device else smoothing_factors
    found = call(torch.from_numpy(x), torch.from_numpy(w), 0.4)
    assert (found.numpy() == reference.smoothing_factors(x, w, 0.4)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", ["int3_g32", "mxfp4", "nvfp4", "nf4"])
def test_awq(dtype, scheme, monkeypatch):
    w, h, mean = layer(1, dtype)
    on_cpu = awq_factors([w, w[:8]], h, mean, scheme, ratios=6)
    monkeypatch.setattr(smoothing, "CHUNK", 5 * 128)
    found = smoothing.awq_factors_on_device([w, w[:8]], h, mean, scheme, ratios=6)
    assert found.ratio == on_cpu.ratio
    assert torch.equal(found.factors, on_cpu.factors)
    assert found.factors[3] == 1
    torch.testing.assert_close(found.errors, on_cpu.errors, rtol=1e-11, atol=0)
    assert on_cpu.errors.dtype == torch.float64


@pytest.mark.parametrize("scheme", ["int3_g32", "mxfp4"])
def test_awq_with_searched_scales(scheme):
    w, h, mean = layer(5, rows=8, k=64)
    # Scales are searched by the diagonal.
    h = torch.diag(h.diagonal())
    calls = (awq_factors, smoothing.awq_factors_on_device)
    on_cpu, found = (call([w], h, mean, scheme, ratios=2, search=True) for call in calls)
    torch.testing.assert_close(found.errors, on_cpu.errors, rtol=1e-11, atol=0)
    alone = awq_factors([w], h, mean, scheme, ratios=2).errors
    assert (on_cpu.errors <= alone).all()
    assert on_cpu.errors.sum() < 0.95 * alone.sum()


def test_edges_are_those_of_the_reference():
    w, h, mean = layer(2)
    nothing = smoothing.awq_factors_on_device([w], h * 0, mean * 0, "int4_g32", ratios=3)
    assert (nothing.ratio, nothing.factors.tolist()) == (0, [1] * 128)
    w[0] = 0
    nan = smoothing.awq_factors_on_device([w], h, mean, "torchao.fp8_rowwise_inference", ratios=2)
    assert (nan.ratio, nan.errors.tolist()) == (0, [torch.inf] * 2)
    huge = smoothing.awq_factors_on_device([w * 5e37], h, mean, "int4_g32", ratios=2)
    assert huge.errors.isfinite().all()


@pytest.mark.parametrize("call", [awq_factors, smoothing.awq_factors_on_device])
def test_refusals(call):
    w, h, mean = layer(3)
    refused(ValueError, r"hessian of shape \(128, 128\)", call, [w], h[:3], mean, "int4_g32")
    refused(ValueError, "sum of squares", call, [w], -h, mean, "int4_g32")
    refused(ValueError, r"x_mean of shape \(128,\)", call, [w], h, mean[:3], "int4_g32")
    refused(ValueError, "negative", call, [w], h, -mean, "int4_g32")
    refused(ValueError, "ratios", call, [w], h, mean, "int4_g32", ratios=0)
    refused(ValueError, "NaN or infinity in ws", call, [w * torch.nan], h, mean, "int4_g32")
    refused(ValueError, "same inputs", call, [w, w[:, :32]], h, mean, "int4_g32")
    refused(ValueError, "matrix", call, [w[0]], h, mean, "int4_g32")


def test_arrays_and_no_weights():
    w, h, mean = layer(4)
    refused(TypeError, "torch tensors", awq_factors, w.numpy(), h, mean, "int4_g32")
    refused(TypeError, "float32", awq_factors, w.int(), h, mean, "int4_g32")
    refused(ValueError, "got none", awq_factors, [], h, mean, "int4_g32")
    refused(TypeError, "torch tensors", smoothing_factors, np.ones(2), np.ones(2))
    refused(ValueError, "alpha", smoothing.smoothing_factors_on_device, mean, mean, 2)
