"""Rotations for torch tensors: the bits of the reference, on a CPU and by the device's steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import reference
from fast.calibration import rotation
from fast.calibration.rotation import fold_gain, rotate
from fast.layers.hadamard import hadamard
from reference.arrays.bridges import to_numpy, to_torch
from tests.support.refusals import refused


def weights(seed, shape=(6, 144), dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("block", "axis"), [(16, -1), (36, -1), (144, 1), (2, 0), (1, 0)])
@pytest.mark.parametrize("inverse", [False, True])
def test_bits(dtype, block, axis, inverse, monkeypatch):
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
def test_gains(dtype):
    gain, w = weights(3, (144,), torch.bfloat16), weights(4, dtype=torch.bfloat16)
    w[0, 0], gain[0] = 3e38, 3e38
    found = fold_gain(gain, w, dtype=dtype)
    expected = to_torch(reference.fold_gain(to_numpy(gain), to_numpy(w), dtype=dtype))
    assert torch.equal(found, expected)
    assert found.isfinite().all()


def test_nothing_and_what_is_not_finite():
    assert rotation.rotate_on_device(torch.zeros(0, 8), 4).shape == (0, 8)
    w = torch.zeros(1, 8)
    w[0, 0], w[0, 5] = torch.inf, torch.nan
    for call in (rotate, rotation.rotate_on_device):
        assert call(w, 2).isfinite().tolist() == [[False, False, True, True, False, False, True, True]]


@pytest.mark.parametrize("call", [rotate, rotation.rotate_on_device])
def test_refusals(call):
    w = weights(5)
    refused(ValueError, "divide the axis, got 5", call, w, 5)
    refused(ValueError, "no Hadamard matrix", call, w, 6)
    refused(ValueError, "orthogonal", call, w, torch.ones(2, 2))
    refused(ValueError, "axis 2", call, w, 2, axis=2)
    refused(ValueError, "single number", call, torch.tensor(1.0), 1)


def test_arrays():
    refused(TypeError, "torch tensors", rotate, np.ones((2, 2)), 2)
    refused(TypeError, "int64", rotate, torch.ones(2, 2).long(), 2)
    refused(ValueError, r"gain \(K,\)", fold_gain, torch.ones(3), torch.ones(2, 4))
