"""Sums in their stated order, and results rounded to a dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from reference.calibration.inputs import LARGEST, float_array, rounded, tree_sum
from tests.support.refusals import refused


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 7, 8, 100])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_trees_over_adjacent_pairs(length, dtype):
    x = (np.random.default_rng(length).standard_normal((4, length)) * 10.0 ** (np.arange(length) % 9)).astype(
        dtype
    )
    filled = np.zeros((4, 1 << max(length - 1, 0).bit_length()), dtype)
    filled[:, :length] = x
    while filled.shape[1] > 1:
        filled = filled[:, ::2] + filled[:, 1::2]
    assert tree_sum(x).tolist() == filled[:, 0].tolist()
    assert tree_sum(x).tolist() == tree_sum(torch.from_numpy(x)).tolist()
    assert tree_sum(x.T, 0).tolist() == filled[:, 0].tolist()
    assert tree_sum(x).dtype == dtype


def test_finite_values_stay_finite():
    x = np.asarray([1e300, -1e39, 1 + 2.0**-30, np.inf, -np.inf, np.nan, 1e-50])
    assert rounded(x, "float64") is x
    short = rounded(x, "float32")
    assert short[:5].tolist() == [LARGEST, -LARGEST, 1, np.inf, -np.inf]
    assert np.isnan(short[5])
    half = rounded(x, np.float16)
    assert half[:5].tolist() == [65504, -65504, 1, np.inf, -np.inf]
    assert rounded(x, torch.bfloat16).dtype == ml_dtypes.bfloat16
    refused(ValueError, "dtype is one of", rounded, x, "int8")


def test_what_is_no_array_of_floats():
    refused(TypeError, "f takes x as a NumPy array, got list", float_array, [1.0], "f", "x")
    refused(TypeError, "f takes x as a NumPy array, got Tensor", float_array, torch.ones(1), "f", "x")
    refused(TypeError, "f: x takes float32", float_array, np.ones(1, np.int32), "f", "x")
    refused(TypeError, "masked", float_array, np.ma.ones(1), "f", "x")
