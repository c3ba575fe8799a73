"""Second moments against sums one by one; the factor against the matrix that it factors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ao_lab.testing.strategies import assert_same_bits
from reference import second_moment, triangular_factor
from reference.calibration.hessian import attempts
from tests.support.refusals import refused

F = np.float32


def hessian(seed, k, tokens=None):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens or 4 * k, k)) @ (np.eye(k) + rng.standard_normal((k, k)) / np.sqrt(k))
    return x.T @ x / len(x)


def damped(h, share=0.01):
    """By the rule in words: a share of the mean of live channels, alone on dead ones."""
    live = np.diag(h) > 0
    return h + share * np.diag(h)[live].mean() * np.eye(len(h))


@pytest.mark.parametrize("dtype", [F, np.float64, np.float16, ml_dtypes.bfloat16])
def test_second_moment(dtype):
    x = np.random.default_rng(0).standard_normal((3, 5, 8)).astype(dtype)
    made = second_moment(x)
    rows = x.reshape(-1, 8).astype(np.float64)
    np.testing.assert_allclose(made.value, sum(np.outer(row, row) for row in rows) / 15, rtol=1e-13)
    np.testing.assert_array_equal(made.value, made.value.T)
    assert (made.value.dtype, made.count) == (np.float64, 15)


def test_padding_changes_no_bit():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 16)).astype(F)
    padded = np.full((4, 5, 16), np.nan, F)
    mask = np.zeros((4, 5), bool)
    mask.reshape(-1)[rng.permutation(20)[:7]] = True
    padded[mask] = x
    made = second_moment(padded, mask)
    assert_same_bits(made.value, second_moment(x).value)
    assert made.count == 7
    nothing = second_moment(x, np.zeros(7, bool))
    assert nothing.count == 0
    assert not nothing.value.any()


@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.01, 0.3, 3.0]), st.booleans())
def test_the_factor_is_that_of_the_damped_hessian(seed, damping, permuted):
    h = hessian(seed, 12)
    order = np.random.default_rng(seed).permutation(12) if permuted else None
    made = triangular_factor(h, damping=damping, order=order)
    np.testing.assert_array_equal(np.tril(made.factor, -1), 0)
    assert (np.diag(made.factor) > 0).all()
    wanted = damped(h, damping)
    wanted = wanted if order is None else wanted[order][:, order]
    np.testing.assert_allclose(made.factor @ made.factor.T, wanted, rtol=1e-11, atol=1e-13)
    assert (made.damping, made.floor, made.dead.any()) == (damping, 0.0, False)


def test_only_the_lower_triangle_is_read_and_nothing_changed():
    h = hessian(2, 10)
    order = np.random.default_rng(2).permutation(10)
    copy = h.copy()
    made = triangular_factor(h, order=order)
    assert_same_bits(h, copy)
    assert_same_bits(triangular_factor(np.tril(h), order=order).factor, made.factor)
    assert_same_bits(triangular_factor(np.tril(h) + np.triu(9 * h, 1)).factor, triangular_factor(h).factor)


def test_dead_channels_have_the_damping_alone_and_do_not_count():
    h = hessian(3, 8)
    h[[2, 5]], h[:, [2, 5]] = 0, 0
    made = triangular_factor(h, damping=0.05)
    assert np.flatnonzero(made.dead).tolist() == [2, 5]
    np.testing.assert_allclose(made.factor @ made.factor.T, damped(h, 0.05), rtol=1e-11, atol=1e-13)
    off = made.factor - np.diag(np.diag(made.factor))
    assert not off[[2, 5]].any()
    assert not off[:, [2, 5]].any()
    # The order of `dead` is that of the Hessian; nothing added, they still have a factor.
    made = triangular_factor(h, damping=0.0, order=np.arange(8)[::-1])
    assert (np.flatnonzero(made.dead).tolist(), made.damping) == ([2, 5], 0.0)
    live = np.setdiff1d(np.arange(8), [2, 5])
    product = (made.factor @ made.factor.T)[::-1, ::-1]
    np.testing.assert_allclose(product[np.ix_(live, live)], h[np.ix_(live, live)], rtol=1e-10, atol=1e-13)


def test_damping_rises_then_the_floor_and_both_are_reported():
    bent = np.eye(8)
    bent[1, 2] = bent[2, 1] = 1.035
    made = triangular_factor(bent)
    assert (made.damping, made.floor) == (0.04, 0.0)
    np.testing.assert_allclose(made.factor @ made.factor.T, damped(bent, 0.04), rtol=1e-11, atol=1e-13)
    h = np.eye(8)
    h[0, 0] = 100
    h[1, 2] = h[2, 1] = 1 + 107 / 8 + 0.05
    made = triangular_factor(h)
    assert (made.damping, made.floor) == (1.0, 1e-3)
    h[1, 2] = h[2, 1] = 40
    refused(ValueError, r"not positive definite with damping 1 and 0\.1", triangular_factor, h)


def test_tries_of_a_damping_above_one_keep_it():
    assert attempts(3.0)[:2] == [(3.0, 0.0), (3.0, 1e-6)]
    assert attempts(1.0)[:2] == [(1.0, 0.0), (1.0, 1e-6)]
    assert attempts(0.98)[:4] == [(0.98, 0.0), (0.99, 0.0), (1.0, 0.0), (1.0, 1e-6)]


def test_refusals_name_the_way_out():
    h = hessian(4, 4)
    x = np.ones((2, 3), F)
    refused(TypeError, "takes NumPy arrays, got list", second_moment, [[1.0]])
    refused(TypeError, "int", second_moment, np.ones((2, 2), np.int64))
    refused(ValueError, "K >= 1", second_moment, np.ones((2, 0), F))
    refused(ValueError, "got 2 of NaN or infinity", second_moment, np.where(np.arange(3) < 1, np.nan, x))
    refused(ValueError, r"bool of shape \(2,\), .*got float32", second_moment, x, np.ones(2, F))
    refused(ValueError, r"got bool of shape \(3,\)", second_moment, x, np.ones(3, bool))
    cases = [
        ({"hessian": h.tolist()}, TypeError, "NumPy array of float32 or float64, got list"),
        ({"hessian": h.astype(np.float16)}, TypeError, "got float16"),
        ({"hessian": h[:2]}, ValueError, r"\(4, 4\), inputs by inputs, got shape \(2, 4\)"),
        ({"hessian": h[:0, :0]}, ValueError, "no inputs"),
        ({"hessian": h * np.nan}, ValueError, "finite and within float32"),
        ({"hessian": -h}, ValueError, "got negative elements"),
        ({"hessian": 0 * h}, ValueError, "no input was seen"),
        ({"damping": -0.1}, ValueError, "0 or more, got -0.1"),
        ({"damping": float("inf")}, ValueError, "finite share"),
        ({"damping": True}, ValueError, "finite share"),
        ({"order": [0, 1, 2, 2]}, ValueError, "permutation of 0 to 3"),
        ({"order": [0, 1, 2]}, ValueError, "permutation of 0 to 3"),
    ]
    for changed, error, said in cases:
        refused(error, said, triangular_factor, **{"hessian": h, **changed})
