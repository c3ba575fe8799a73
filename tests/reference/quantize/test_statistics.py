"""Maxima, minima and the mean of block scales, in every library."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from ao_lab.testing.strategies import FINITE_KINDS, assert_same_bits, fill, float_arrays
from reference.arrays.namespace import namespace_of
from reference.quantize.statistics import absmax, mean, tree_sum, value_range, with_zero

NUMPY = namespace_of(np.zeros(1))


def plain_mean(values):
    """The documented order with NumPy's own operators: halved pairs in a tree over zeros up to a power of two."""
    size = 1 << max(len(values) - 1, 0).bit_length()
    tree = np.concatenate([values, np.zeros(size - len(values), np.float32)])
    with np.errstate(all="ignore"):
        while len(tree) > 1:
            tree = tree[0::2] * np.float32(0.5) + tree[1::2] * np.float32(0.5)
        return tree / np.float32(len(values) / size)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64, 100, 257])
def test_mean_in_every_library(count):
    """Of each length one program, for all kinds of numbers."""
    jitted = jax.jit(lambda x: mean(namespace_of(x), x, finite_only=False))
    for kind in ("normals", "subnormals", "wide", "largest", "zeros"):
        values = np.abs(fill(kind, (count,), seed=count))
        want, bits = plain_mean(values).view(np.int32), values.view(np.int32)
        assert_same_bits(mean(NUMPY, bits, finite_only=False), want)
        tensor = torch.from_numpy(bits.copy())
        assert_same_bits(mean(namespace_of(tensor), tensor, finite_only=False), want)
        assert_same_bits(jitted(jnp.asarray(bits)), want)


def test_mean_with_specials():
    bits = np.array([1, 2, np.inf, np.nan], np.float32).view(np.int32)
    assert mean(NUMPY, bits, finite_only=True).view(np.float32) == 0.75
    assert mean(NUMPY, bits, finite_only=False) == 0x7FC00000
    assert mean(NUMPY, bits[:3], finite_only=False) == 0x7F800000


@settings(max_examples=100)
@given(float_arrays("float32", (3, 9), kinds=FINITE_KINDS))
def test_ranges(x):
    bits = x.view(np.int32)
    span = value_range(NUMPY, bits)
    np.testing.assert_array_equal(absmax(NUMPY, bits).view(np.float32), np.abs(x).max(-1, keepdims=True))
    np.testing.assert_array_equal(span.low.view(np.float32), x.min(-1, keepdims=True))
    np.testing.assert_array_equal(span.high.view(np.float32), x.max(-1, keepdims=True))
    wide = with_zero(NUMPY, span)
    np.testing.assert_array_equal(wide.low.view(np.float32), np.minimum(x.min(-1, keepdims=True), 0))
    np.testing.assert_array_equal(wide.high.view(np.float32), np.maximum(x.max(-1, keepdims=True), 0))
    assert not (wide.low == -(2**31)).any()
    assert not (wide.high == -(2**31)).any()


def test_nan_shows_in_every_statistic():
    x = np.array([[1, -np.nan, 3]], np.float32).view(np.int32)
    assert (absmax(NUMPY, x) > 0x7F800000).all()
    span = with_zero(NUMPY, value_range(NUMPY, x))
    assert span.low == span.high == 0x7FC00000
    assert absmax(NUMPY, x, finite_only=True).view(np.float32) == 3


def plain_sum(x):
    size = 1 << max(x.shape[-1] - 1, 0).bit_length()
    tree = np.concatenate([x, np.zeros((len(x), size - x.shape[-1]), np.float32)], -1)
    with np.errstate(all="ignore"):
        while tree.shape[-1] > 1:
            tree = tree[:, 0::2] + tree[:, 1::2]
    return np.where(np.isnan(tree), np.float32(np.nan), tree)


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 64, 100])
def test_sums_of_adjacent_pairs_in_every_library(length):
    """Of each length one program; step by step each addition would be some hundred of them."""
    jitted = jax.jit(lambda x: tree_sum(namespace_of(x), x))
    for kind in ("normals", "wide", "subnormals", "largest"):
        x = fill(kind, (4, length), seed=length)
        want, bits = plain_sum(x).view(np.int32), x.view(np.int32)
        tensor = torch.from_numpy(bits.copy())
        for got in (
            tree_sum(NUMPY, bits),
            tree_sum(namespace_of(tensor), tensor),
            jitted(jnp.asarray(bits)),
        ):
            assert_same_bits(got, want)
