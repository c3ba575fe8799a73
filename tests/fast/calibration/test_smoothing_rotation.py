"""Smoothing for torch tensors has the bits of the reference, where sums have an order.

Rotations for torch tensors: the bits of the reference, on a CPU and by the device's steps.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from fast.calibration import rotation, smoothing
from fast.calibration.rotation import fold_gain, rotate
from fast.calibration.smoothing import awq_factors, smoothing_factors
from fast.layers.hadamard import hadamard
from reference.arrays.bridges import to_numpy, to_torch
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
    want = by_reference([w, w[:8]], h, mean, scheme, ratios=6)
    monkeypatch.setattr(smoothing, "CHUNK", 5 * 128)
    found = awq_factors([w, w[:8]], h, mean, scheme, ratios=6)
    assert found.ratio == want.ratio
    assert torch.equal(found.factors, to_torch(want.factors))
    assert found.factors[3] == 1
    torch.testing.assert_close(found.errors, to_torch(want.errors), rtol=1e-11, atol=0)


def by_reference(ws, h, mean, scheme, **options):
    return reference.awq_factors([to_numpy(w) for w in ws], h.numpy(), mean.numpy(), scheme, **options)


@pytest.mark.parametrize("scheme", ["int4_g32", "nvfp4"])
def test_weights_on_a_cpu_are_rounded_by_its_compiled_loop(scheme, monkeypatch):
    """The reference's quantizer would take most of the time; large enough for the loop, they do not meet it."""
    w, h, mean = layer(6, torch.bfloat16)
    want = by_reference([w], h, mean, scheme, ratios=3)
    monkeypatch.setattr(reference, "quantize", None)
    monkeypatch.setattr(reference, "fake_quantize", None)
    found = awq_factors([w], h, mean, scheme, ratios=3)
    torch.testing.assert_close(found.errors, to_torch(want.errors), rtol=1e-11, atol=0)


@pytest.mark.parametrize("scheme", ["int3_g32", "mxfp4"])
def test_awq_with_searched_scales(scheme):
    w, h, mean = layer(5, rows=8, k=64)
    # Scales are searched by the diagonal.
    h = torch.diag(h.diagonal())
    want = by_reference([w], h, mean, scheme, ratios=2, search=True)
    found = awq_factors([w], h, mean, scheme, ratios=2, search=True)
    torch.testing.assert_close(found.errors, to_torch(want.errors), rtol=1e-11, atol=0)
    alone = awq_factors([w], h, mean, scheme, ratios=2).errors
    assert (found.errors <= alone).all()
    assert found.errors.sum() < 0.95 * alone.sum()


def test_edges_are_those_of_the_reference():
    w, h, mean = layer(2)
    nothing = awq_factors([w], h * 0, mean * 0, "int4_g32", ratios=3)
    assert (nothing.ratio, nothing.factors.tolist()) == (0, [1] * 128)
    w[0] = 0
    nan = awq_factors([w], h, mean, "torchao.fp8_rowwise_inference", ratios=2)
    assert (nan.ratio, nan.errors.tolist()) == (0, [torch.inf] * 2)
    huge = awq_factors([w * 5e37], h, mean, "int4_g32", ratios=2)
    assert huge.errors.isfinite().all()


def test_refusals():
    call = awq_factors
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


def weights(seed, shape=(6, 144), dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("block", "axis"), [(16, -1), (36, -1), (144, 1), (2, 0), (1, 0)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotated_bits(dtype, block, axis, inverse, monkeypatch):
    w = weights(block, dtype=dtype)
    monkeypatch.setattr(rotation, "CHUNK", 300)
    on_cpu = rotate(w, block, axis=axis, inverse=inverse)
    assert on_cpu.dtype == dtype
    found = rotation.rotate_on_device(w, block, axis=axis, inverse=inverse)
    assert torch.equal(found, on_cpu)
    array = reference.rotate(to_numpy(w), block, axis=axis, inverse=inverse)
    assert torch.equal(on_cpu, to_torch(array))


def test_a_matrix_of_any_device():
    w, matrix = weights(1, (4, 32)), torch.linalg.qr(weights(2, (16, 16)).double())[0]
    on_cpu = rotate(w, matrix, dtype=torch.float64)
    found = rotation.rotate_on_device(w, matrix, dtype=torch.float64)
    torch.testing.assert_close(found, on_cpu, rtol=0, atol=1e-13)
    back = rotation.rotate_on_device(found, matrix, inverse=True)
    torch.testing.assert_close(back, w.double(), rtol=0, atol=1e-13)


def test_it_is_the_transform_that_kernels_run():
    x = torch.randint(-99, 99, (5, 64)).float()
    assert torch.equal(rotate(x, 16), hadamard(x, 16))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_folded_gains(dtype):
    gain, w = weights(3, (144,), torch.bfloat16), weights(4, dtype=torch.bfloat16)
    w[0, 0], gain[0] = 3e38, 3e38
    found = fold_gain(gain, w, dtype=dtype)
    expected = to_torch(reference.fold_gain(to_numpy(gain), to_numpy(w), dtype=dtype))
    assert torch.equal(found, expected)
    assert found.isfinite().all()


def test_rotations_of_nothing_and_of_what_is_not_finite():
    assert rotation.rotate_on_device(torch.zeros(0, 8), 4).shape == (0, 8)
    w = torch.zeros(1, 8)
    w[0, 0], w[0, 5] = torch.inf, torch.nan
    for call in (rotate, rotation.rotate_on_device):
        assert call(w, 2).isfinite().tolist() == [[False, False, True, True, False, False, True, True]]


@pytest.mark.parametrize("call", [rotate, rotation.rotate_on_device])
def test_rotations_refused(call):
    w = weights(5)
    refused(ValueError, "divide the axis, got 5", call, w, 5)
    refused(ValueError, "no Hadamard matrix", call, w, 6)
    refused(ValueError, "orthogonal", call, w, torch.ones(2, 2))
    refused(ValueError, "axis 2", call, w, 2, axis=2)
    refused(ValueError, "single number", call, torch.tensor(1.0), 1)


def test_rotations_of_arrays():
    refused(TypeError, "torch tensors", rotate, np.ones((2, 2)), 2)
    refused(TypeError, "int64", rotate, torch.ones(2, 2).long(), 2)
    refused(ValueError, r"gain \(K,\)", fold_gain, torch.ones(3), torch.ones(2, 4))
