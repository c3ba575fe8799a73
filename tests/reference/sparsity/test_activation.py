"""The sparse squared ReLU against a loop in NumPy's float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ao_lab.testing.strategies import assert_same_bits
from reference import encode
from reference.sparsity.activation import squared_relu_24
from reference.sparsity.compress import compress, decompress

F = np.float32
LARGEST = np.finfo(F).max
SPECIAL = [
    0,
    0x80000000,
    1,
    0x80000001,
    0x7F800000,
    0xFF800000,
    0x7FC00001,
    0xFF800001,
    0x3F800000,
    0xBF800000,
    0x7F000000,
]
BITS = st.one_of(st.sampled_from(SPECIAL), st.integers(0, 2**32 - 1))


def slow(row, scale):
    """(values, mask) of one row, element by element."""
    values, mask = np.zeros(len(row), F), np.zeros(len(row), bool)
    for start in range(0, len(row), 4):

        def order(i):
            return (not np.isnan(row[i]), 0.0 if np.isnan(row[i]) else -float(row[i]), i)

        for i in sorted(range(start, start + 4), key=order)[:2]:
            mask[i] = True
            if np.isnan(row[i]):
                values[i] = np.nan
            elif row[i] > 0:
                square = F(row[i] * row[i])
                values[i] = (min(square, LARGEST) if np.isfinite(row[i]) else square) / F(scale)
    return values, mask


@settings(max_examples=150, deadline=None)
@given(hnp.arrays(np.uint32, (2, 8), elements=BITS), st.sampled_from([1.0, 3.0, 2.0**-149, 1e-30, 3e38]))
def test_equals_the_loop_on_any_bits(bits, scale):
    x = bits.view(F)
    with np.errstate(all="ignore"):
        wanted = [slow(row, s) for row, s in zip(x, (scale, 0.5), strict=True)]
        made = squared_relu_24(x, scale=np.array([[scale], [0.5]], F))
        np.testing.assert_array_equal(made.mask, [mask for _, mask in wanted])
        assert_same_bits(made.values, np.array([values for values, _ in wanted]))
        codes = squared_relu_24(x, scale=np.array([[scale], [0.5]], F), fmt="float8_e4m3fn")
    np.testing.assert_array_equal(codes.values, encode(made.values, "float8_e4m3fn"))
    np.testing.assert_array_equal(codes.mask, made.mask)
    assert not np.isnan(made.values[np.isfinite(x)]).any()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_short_floats_are_rounded_once(dtype):
    x = np.random.default_rng(0).permutation(np.arange(65536, dtype=np.uint16)).view(dtype).reshape(64, 1024)
    made = squared_relu_24(x)
    assert made.values.dtype == x.dtype
    with np.errstate(all="ignore"):
        wide = squared_relu_24(x.astype(F))
        np.testing.assert_array_equal(made.mask, wide.mask)
        assert_same_bits(made.values.astype(F), wide.values.astype(dtype).astype(F))


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        ([-5, 1, -7, 0.5], [1, 3]),
        ([-5, -1, -7, -0.5], [1, 3]),
        ([-0.0, 0, -0.0, 0], [0, 1]),
        ([-0.0, 0, -(2.0**-149), 2.0**-149], [0, 3]),
        ([3, 3, 3, 4], [0, 3]),
        ([np.inf, 9, np.nan, -np.inf], [0, 2]),
        ([-np.inf, -3e38, -np.nan, -np.inf], [1, 2]),
    ],
)
@pytest.mark.parametrize("library", ["numpy", "jax", "torch"])
def test_signed_values_decide(row, kept, library):
    convert = {"numpy": np.asarray, "torch": torch.from_numpy, "jax": jnp.asarray}[library]
    mask = squared_relu_24(convert(np.array([row], F))).mask
    assert np.flatnonzero(np.asarray(mask)[0]).tolist() == kept


def test_libraries_agree_and_the_result_compresses():
    x = np.random.default_rng(1).standard_normal((4, 16)).astype(F)
    scale = np.abs(x).max(-1, keepdims=True)
    expected = squared_relu_24(x, scale=scale, fmt="float8_e4m3fn")
    given_torch = squared_relu_24(torch.from_numpy(x), scale=torch.from_numpy(scale), fmt="float8_e4m3fn")
    assert isinstance(given_torch.mask, torch.Tensor)
    jitted = jax.jit(lambda x, s: squared_relu_24(x, scale=s, fmt="float8_e4m3fn"))
    for made in (given_torch, jitted(jnp.asarray(x), jnp.asarray(scale))):
        np.testing.assert_array_equal(np.asarray(made.values), expected.values)
        np.testing.assert_array_equal(np.asarray(made.mask), expected.mask)
    np.testing.assert_array_equal(decompress(*compress(*expected)), expected.values)
    # What stays of the dense squared ReLU: everything where a group has at most two positive elements.
    dense = np.maximum(x, 0) ** 2
    few = ((x > 0).reshape(4, 4, 4).sum(-1) <= 2).repeat(4, -1)
    assert_same_bits(squared_relu_24(x).values[few], dense[few])
    assert 0 < few.mean() < 1


def test_refusals_name_the_way_out():
    x = np.ones((2, 8), F)
    with pytest.raises(ValueError, match="multiple of 4"):
        squared_relu_24(x[:, :6])
    with pytest.raises(TypeError, match="cast it to float32"):
        squared_relu_24(x.astype(np.float64))
    with pytest.raises(TypeError, match="scale is float32, got float64"):
        squared_relu_24(x, scale=np.ones((2, 1)))
    with pytest.raises(ValueError, match=r"\(2,\) does not broadcast"):
        squared_relu_24(x, scale=np.ones(2, F))
    with pytest.raises(ValueError, match="x's library, got float"):
        squared_relu_24(x, scale=2.0)
    for wrong in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            squared_relu_24(x, scale=np.full((2, 1), wrong, F))
    with pytest.raises(ValueError, match="float8_e4m3"):
        squared_relu_24(x, fmt="float8_e4m3f")
