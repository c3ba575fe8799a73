"""The Hadamard transform: orthogonal, the stated additions in the stated order, the same bits in three libraries."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import FINITE_KINDS, assert_same_bits, float_arrays
from reference import matmul
from reference.training import hadamard
from reference.training.hadamard import SIGNS_16, signs

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def sylvester(length):
    """H of +1 and -1."""
    matrix = np.ones((1, 1))
    while len(matrix) < length:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def by_stages(x, length):
    """The butterfly in NumPy's float32: sums and differences at distances 1, 2, 4, ..."""
    blocks = x.astype(np.float32).reshape(-1, length) * np.float32(signs(length))
    distance = 1
    while distance < length:
        mixed = blocks.copy()
        for at in range(length):
            partner = at ^ distance
            left, right = blocks[:, min(at, partner)], blocks[:, max(at, partner)]
            mixed[:, at] = left + right if at < partner else left - right
        blocks, distance = mixed, 2 * distance
    return (blocks * np.float32(1 / np.sqrt(length))).astype(x.dtype).reshape(x.shape)


def integers(shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32)


@pytest.mark.parametrize("length", [1, 4, 16, 64, 256])
def test_it_is_sylvesters_matrix_on_integers(length):
    """1 / sqrt(length) is a power of two, so that nothing is rounded."""
    x = integers((3, 2 * length))
    blocks = x.astype(np.float64).reshape(-1, length) * signs(length)
    wanted = (blocks @ sylvester(length) / np.sqrt(length)).reshape(x.shape)
    mixed = hadamard(x, length)
    assert np.array_equal(mixed, wanted)
    back = mixed.reshape(-1, length) @ sylvester(length) / np.sqrt(length) * signs(length)
    assert np.array_equal(back.reshape(x.shape), x)


@pytest.mark.parametrize("length", [4, 16])
def test_it_cancels_in_a_product(length):
    a, b = integers((5, 64)), integers((7, 64), seed=1)
    assert_same_bits(matmul(hadamard(a, length), hadamard(b, length).T), matmul(a, b.T))


@pytest.mark.parametrize("length", [2, 8, 32])
def test_odd_powers_cancel_up_to_rounding(length):
    a, b = integers((5, 64)), integers((7, 64), seed=1)
    product = hadamard(a, length).astype(np.float64) @ hadamard(b, length).astype(np.float64).T
    # Every element of both passes one rounding of 1 / sqrt(length) and one of its product with that.
    bound = 4.5 * 2.0**-24 * np.abs(a).sum(1)[:, None] * np.abs(b).max()
    assert np.all(np.abs(product - a.astype(np.float64) @ b.T) <= bound * np.sqrt(length))


@settings(max_examples=40)
@given(st.data(), st.sampled_from(sorted(DTYPES)), st.sampled_from([2, 8, 16, 32]))
def test_the_order_of_additions(data, dtype, length):
    x = data.draw(float_arrays(dtype, (3, 64), kinds=FINITE_KINDS))
    with np.errstate(all="ignore"):
        wanted, mixed = by_stages(x, length), hadamard(x, length)
    known = ~np.isnan(wanted.astype(np.float32))
    assert np.array_equal(np.isnan(mixed.astype(np.float32)), ~known)
    assert_same_bits(mixed[known], wanted[known])


@settings(max_examples=25)
@given(float_arrays("bfloat16", (4, 64)))
def test_three_libraries(x):
    mixed = hadamard(x, 32)
    tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    assert_same_bits(hadamard(tensor, 32), mixed)
    assert_same_bits(hadamard.__wrapped__(tensor, 32), mixed)
    assert_same_bits(hadamard(jnp.asarray(x), 32), mixed)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_block(value):
    x = integers((2, 64))
    clean = hadamard(x, 16)
    x[1, 20] = value
    mixed = hadamard(x, 16)
    hit = np.zeros(x.shape, bool)
    hit[1, 16:32] = True
    assert not np.isfinite(mixed[hit]).any()
    assert_same_bits(mixed[~hit], clean[~hit])


def test_signs():
    """Transformer Engine's sixteen, repeated."""
    assert "".join("+-"[sign < 0] for sign in SIGNS_16) == "+++-+------+-+--"
    assert signs(4) == SIGNS_16[:4]
    assert signs(32) == SIGNS_16 * 2


@pytest.mark.parametrize(
    ("x", "length", "error", "message"),
    [
        (np.zeros((2, 24), np.float32), 16, ValueError, "divides the last axis, got 16 for shape"),
        (np.zeros((2, 24), np.float32), 12, ValueError, "power of two"),
        (np.zeros((2, 24), np.float32), 0, ValueError, "power of two"),
        (np.zeros((), np.float32), 1, ValueError, "pad it"),
        (np.zeros((2, 16), np.int32), 16, TypeError, "hadamard takes float32"),
    ],
)
def test_errors(x, length, error, message):
    with pytest.raises(error, match=message):
        hadamard(x, length)
