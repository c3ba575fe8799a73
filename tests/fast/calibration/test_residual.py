"""Corrected biases and low-rank residuals of torch tensors: the reference's, and by subspace iteration nearly as good."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from fast.calibration import residual
from fast.calibration.residual import correct_bias, low_rank_on_device, low_rank_residual
from fast.quantize.quantize import dequantize, quantize
from tests.support.refusals import refused


def layer(seed, rows=48, k=96):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((300, k)) * np.exp(rng.standard_normal(k))
    w = torch.from_numpy(rng.standard_normal((rows, k)).astype(np.float32))
    return w, quantize(w, "int3_g32"), torch.from_numpy(x.T @ x / 300)


def left_over(w, q, h, factors):
    d = w.double() - dequantize(q).double() - factors.left.double() @ factors.right.double()
    return float((d @ h * d).sum())


@pytest.mark.parametrize("rank", [0, 1, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_device_agrees(rank, dtype):
    w, q, h = layer(1)
    on_cpu, found = (call(w, q, h, rank, dtype=dtype) for call in (low_rank_residual, low_rank_on_device))
    assert found.left.dtype == found.right.dtype == on_cpu.right.dtype == dtype
    close = 1e-9 if dtype == torch.float64 else 2.0**-7
    for a, b in zip(found, on_cpu, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0, atol=close * max(float(b.abs().max()) if b.numel() else 0, 1)
        )


@pytest.mark.parametrize("shape", [(48, 96), (128, 64)])
def test_subspace_iteration_leaves_nearly_as_little(shape, monkeypatch):
    w, q, h = layer(2, *shape)
    best = left_over(w, q, h, low_rank_residual(w, q, h, 6, dtype=torch.float64))
    monkeypatch.setattr(residual, "EXACT", 0)
    monkeypatch.setattr(residual, "EXTRA", 8)
    found = low_rank_on_device(w, q, h, 6, dtype=torch.float64)
    assert best * (1 - 1e-9) <= left_over(w, q, h, found) < 1.001 * best
    again = low_rank_on_device(w, q, h, 6, dtype=torch.float64)
    assert torch.equal(found.left, again.left)


@pytest.mark.parametrize("call", [low_rank_residual, low_rank_on_device])
def test_refusals(call):
    w, q, h = layer(3)
    refused(ValueError, "rank is an integer from 0 to 48", call, w, q, h, 49)
    refused(ValueError, "got shapes", call, w[:4], q, h, 1)
    refused(TypeError, "takes a Quantized", call, w, w, h, 1)
    refused(ValueError, r"\(96, 96\)", call, w, q, h[:3], 1)
    refused(ValueError, "NaN or infinity in w", call, w * torch.nan, q, h, 1)


def test_arrays():
    w, q, h = layer(4)
    refused(TypeError, "torch tensors", low_rank_residual, w.numpy(), q, h, 1)


def test_a_corrected_bias_is_the_reference():
    """Values are a power of two times small integers: all sums are exact."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randint(-9, 10, (4, 64), generator=generator) / 8
    mean = torch.randint(-5, 6, (64,), generator=generator).double()
    q = quantize(w, "mxfp4")
    wanted = reference.correct_bias(w.numpy(), reference.quantize(w.numpy(), "mxfp4"), mean.numpy())
    bias = correct_bias(w, q, mean)
    assert bias.dtype == torch.float64
    assert bias.tolist() == wanted.tolist()
    refused(ValueError, r"shape \(64,\)", correct_bias, w, q, mean[:3])
    refused(ValueError, "NaN or infinity in the mean", correct_bias, w, q, mean * torch.nan)
    refused(ValueError, "finite numbers", correct_bias, w * torch.inf, q, mean)
    refused(ValueError, "got shapes", correct_bias, w[:2], q, mean)
    refused(ValueError, "as a matrix", correct_bias, w[0], q, mean)
    refused(TypeError, "torch tensors", correct_bias, w.numpy(), q, mean)
