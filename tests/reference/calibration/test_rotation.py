"""Rotations against their matrices and against the transform of training; folded gains against the function of a layer."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from reference.calibration.rotation import fold_gain, rotate, rotation_matrix
from reference.layers.hadamard import hadamard, signs
from tests.support.refusals import refused

F = np.float32
BLOCKS = (1, 2, 32, 64, 12, 24, 28, 36, 40, 76, 576)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_matrix_is_orthogonal_and_every_block_is_multiplied_by_it(block):
    matrix = rotation_matrix(block)
    # Entries of one size, with the signs of the transform's rows.
    assert np.abs(np.abs(matrix) * np.sqrt(block) - 1).max() < 1e-14
    assert np.abs(matrix @ matrix.T - np.eye(block)).max() < 1e-14
    w = np.random.default_rng(block).standard_normal((3, 2 * block))
    expected = (w.reshape(3, 2, block) @ matrix).reshape(w.shape)
    np.testing.assert_allclose(rotate(w, block), expected, atol=1e-13)
    np.testing.assert_allclose(rotate(rotate(w, block), block, inverse=True), w, atol=1e-13)
    np.testing.assert_allclose(rotate(rotate(w, block, inverse=True), block), w, atol=1e-13)


@pytest.mark.parametrize("block", [4, 16, 64])
def test_it_is_the_transform_of_training(block):
    """Bit for bit where no sum rounds: inputs may be rotated online by the kernels of `hadamard`."""
    x = np.random.default_rng(0).integers(-99, 99, (5, 128)).astype(F)
    assert (rotate(x, block) == hadamard(x, block)).all()


def test_signs_are_those_of_training():
    first = rotation_matrix(64)[:, 0]
    assert np.sign(first).tolist() == list(signs(64))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_functions_of_a_layer_stay(axis):
    """Contracted over rotated channels, or rotated where they are produced."""
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((7, 36)), rng.standard_normal((24, 36))
    if axis == 0:
        np.testing.assert_allclose(x @ rotate(w, 24, axis=0).T, rotate(x @ w.T, 24), atol=1e-12)
    else:
        np.testing.assert_allclose(rotate(x, 36) @ rotate(w, 36, axis=axis).T, x @ w.T, atol=1e-12)


def test_a_matrix_that_is_given():
    rng = np.random.default_rng(2)
    matrix = np.linalg.qr(rng.standard_normal((16, 16)))[0]
    w = rng.standard_normal((4, 32))
    expected = (w.reshape(4, 2, 16) @ matrix).reshape(4, 32)
    np.testing.assert_allclose(rotate(w, matrix), expected, atol=1e-14)
    np.testing.assert_allclose(rotate(rotate(w, matrix), matrix, inverse=True), w, atol=1e-13)
    assert np.abs(rotate(w, matrix.astype(F)) - expected).max() < 1e-5


def test_an_outlier_is_spread_over_its_block():
    w = np.zeros((1, 64), F)
    w[0, 5] = 8
    assert (np.abs(rotate(w, 16)[0, :16]) == 2).all()
    assert (rotate(w, 16)[0, 16:] == 0).all()


def test_results_are_rounded_once_to_a_dtype():
    w = np.random.default_rng(3).standard_normal((4, 64)).astype(ml_dtypes.bfloat16)
    wide = rotate(w.astype(np.float64), 64)
    assert rotate(w, 64).dtype == ml_dtypes.bfloat16
    assert (rotate(w, 64) == wide.astype(F).astype(ml_dtypes.bfloat16)).all()
    assert (rotate(w, 64, dtype="float32") == wide.astype(F)).all()
    assert rotate(w, 64, dtype="float64").dtype == np.float64


def test_finite_values_stay_finite_and_others_stay_in_their_block():
    w = np.full((1, 64), 3e38, F)
    w[0, 32:] = np.asarray(signs(32), F) * F(3e38)
    assert rotate(w, 32).max() == np.finfo(F).max
    assert np.isfinite(rotate(w, 32)).all()
    w[0, 0] = np.nan
    turned = rotate(w, 32)
    assert np.isnan(turned[0, :32]).all()
    assert np.isfinite(turned[0, 32:]).all()


def test_many_blocks_are_one_block_at_a_time(monkeypatch):
    w = np.random.default_rng(4).standard_normal((9, 48)).astype(F)
    whole = rotate(w, 12)
    monkeypatch.setattr("reference.calibration.rotation.CHUNK", 30)
    assert (rotate(w, 12) == whole).all()


def test_a_gain_moves_into_the_weights():
    rng = np.random.default_rng(5)
    gain, w, x = rng.standard_normal(8), rng.standard_normal((3, 8)), rng.standard_normal((5, 8))
    np.testing.assert_allclose(x @ fold_gain(gain, w).T, (x * gain) @ w.T, atol=1e-14)


def test_gains_are_rounded_once():
    gain = np.asarray([1.0078125, 3e38], ml_dtypes.bfloat16)
    w = np.asarray([[1.0078125, 3e38]], ml_dtypes.bfloat16)
    assert fold_gain(gain, w).dtype == ml_dtypes.bfloat16
    assert float(fold_gain(gain, w)[0, 0]) == 1.015625
    assert float(fold_gain(gain, w, dtype="float32")[0, 0]) == 1.0078125**2
    assert np.isfinite(fold_gain(gain, w).astype(F)).all()


def test_refusals():
    w = np.ones((2, 48), F)
    refused(ValueError, "divide the axis, got 5", rotate, w, 5)
    refused(ValueError, "divide the axis, got 0", rotate, w, 0)
    refused(ValueError, "no Hadamard matrix of order 6.*rotate by blocks, for example of 2", rotate, w, 6)
    refused(ValueError, "square", rotate, w, np.ones((2, 3)))
    refused(ValueError, "orthogonal", rotate, w, np.ones((2, 2)))
    refused(ValueError, "orthogonal", rotate, w, np.full((2, 2), np.nan))
    # Columns of length 1 that are no basis, and a basis of other lengths.
    refused(ValueError, "orthogonal", rotate, w, np.asarray([[1.0, 1.0], [0.0, 0.0]]))
    refused(ValueError, "orthogonal", rotate, w, np.diag([1.0, 1.001]))
    refused(TypeError, "True", rotate, w, True)
    refused(TypeError, "NumPy array", rotate, w, "hadamard")
    refused(TypeError, "NumPy array", rotate, [1.0], 1)
    refused(ValueError, "axis 2", rotate, w, 2, axis=2)
    refused(ValueError, "single number", rotate, np.float32(1), 1)
    refused(ValueError, "dtype is one of", rotate, w, 2, dtype="int8")
    refused(ValueError, r"gain \(K,\)", fold_gain, np.ones(3), w)
    refused(ValueError, r"gain \(K,\)", fold_gain, np.ones((1, 48)), w)
    refused(TypeError, "int64", fold_gain, np.ones(48, np.int64), w)
