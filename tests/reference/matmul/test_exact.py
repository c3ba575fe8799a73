"""The exact tier: reference/matmul/exact.py under `matmul`, against rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from reference.matmul.exact import RESULTS, exact_matmul, grid_of, round_result
from reference.matmul.matmul import matmul
from tests.support.refusals import refused

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
INF, NAN = np.inf, np.nan


def rounded(q, name):
    """A Fraction to the nearest value of a type, ties to even, by integers."""
    mantissa, emin, emax = RESULTS[name]
    e = abs(q).numerator.bit_length() - abs(q).denominator.bit_length() - 1
    e = max(e + (abs(q) >= Fraction(2) ** (e + 1)), emin)
    value = round(q / Fraction(2) ** (e - mantissa)) * Fraction(2) ** (e - mantissa)
    return float(value) if abs(value) < Fraction(2) ** (emax + 1) else float(np.sign(q.numerator)) * INF


def truth(a, b, bias=None):
    """Rational a @ b + bias of 2-d arrays, as nested lists."""
    rows = [[Fraction(float(x)) for x in row] for row in a]
    columns = [[Fraction(float(x)) for x in column] for column in np.asarray(b).T]
    added = np.zeros((len(a), b.shape[1])) if bias is None else np.broadcast_to(bias, (len(a), b.shape[1]))
    return [
        [
            sum((x * y for x, y in zip(r, c, strict=True)), Fraction(float(t)))
            for c, t in zip(columns, line, strict=True)
        ]
        for r, line in zip(rows, added, strict=True)
    ]


def expected(a, b, name, bias=None):
    values = [[rounded(q, name) for q in row] for row in truth(a, b, bias)]
    return np.array(values, np.float64).reshape(len(a), b.shape[1]).astype(DTYPES[name])


finite = st.integers(0, 2**32 - 1).filter(lambda bits: bits & 0x7F800000 != 0x7F800000)
edges = st.sampled_from(
    [0, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x007FFFFF, 0x3F800000, 0xBF800001, 0x00800000]
)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 6),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(list(RESULTS)),
    st.data(),
)
def test_exact_is_exact_for_any_finite_float32(m, k, n, biased, name, data):
    a, b, bias = (
        data.draw(hnp.arrays(np.uint32, s, elements=st.one_of(finite, edges))).view(np.float32)
        for s in ((m, k), (k, n), n)
    )
    bias = bias if biased else None
    got = matmul(a, b, bias=bias, out_dtype=name)
    assert got.dtype == DTYPES[name]
    np.testing.assert_array_equal(got.astype(np.float64), expected(a, b, name, bias).astype(np.float64))


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 20), st.sampled_from(list(RESULTS)))
def test_exact_under_cancellation_and_at_ties(data, k, name):
    """Powers of two and their negatives: most sums cancel, many land on or next to a tie."""
    powers = hnp.arrays(np.int64, k, elements=st.integers(-30, 30))
    signs = hnp.arrays(np.int64, k, elements=st.sampled_from([-1, 1]))
    a = np.ldexp(data.draw(signs), data.draw(powers)).astype(np.float32)[None]
    b = np.ldexp(1.0, data.draw(powers)).astype(np.float32)[:, None]
    np.testing.assert_array_equal(
        matmul(a, b, out_dtype=name).astype(float), expected(a, b, name).astype(float)
    )


def test_no_double_rounding():
    """1 + 2**-8 + 2**-30 is above bfloat16's tie; rounded to float32 first it would be the tie, and go down."""
    a, b = np.array([[1, 2**-8, 2**-30]], np.float32), np.ones((3, 1), np.float32)
    assert float(matmul(a, b, out_dtype="bfloat16")[0, 0]) == 1 + 2**-7
    assert float(matmul(a[:, :2], b[:2], out_dtype="bfloat16")[0, 0]) == 1
    c = np.array([[1, 2**-11, 2**-40]], np.float32)
    assert float(matmul(c, b, out_dtype="float16")[0, 0]) == 1 + 2**-10
    assert float(matmul(np.float32([[1, 2**-24, 2**-149]]), b)[0, 0]) == 1 + 2**-23


def test_no_double_rounding_through_float64():
    """2**54 + 2**30 + 1 is above float32's tie and needs 55 bits; with a bias, 2**53 + 2**29 + 1 needs 54."""
    a = np.float32([[2**27, 2**15, 1]])
    assert float(matmul(a, a.T)[0, 0]) == 2**54 + 2**31
    c, d = np.int32([[2**26 - 1, 2**14]]), np.int32([[2**26 - 1], [2**13 + 2**15]])
    assert float(matmul(c, d, bias=np.float32([2**52]))[0, 0]) == 2**53 + 2**30
    assert float(matmul(c, d, bias=np.float32([-(2**52)]))[0, 0]) == 2**29


def test_no_double_rounding_of_subnormals():
    """2**-150 + 2**-180 is above the tie between 0 and the smallest float32."""
    a = np.float32([[2.0**-75, 2.0**-90]])
    assert matmul(a, a.T)[0, 0] == np.float32(2.0**-149)
    assert matmul(a[:, :1], a.T[:1])[0, 0] == 0
    b = np.float32([[2.0**-12, 2.0**-20]])
    assert float(matmul(b * 2, b.T / 4, out_dtype="float16")[0, 0]) == 2.0**-24


@pytest.mark.parametrize(("name", "first_infinite"), [("float16", 65520.0), ("float32", 2.0**128 - 2.0**103)])
def test_round_result_overflows_at_half_a_unit_above_the_largest(name, first_infinite):
    x = np.array([first_infinite, np.nextafter(first_infinite, 0), -first_infinite])
    largest = float(np.finfo(name).max)
    np.testing.assert_array_equal(round_result(x, name), [INF, largest, -INF])


def test_fixed_point_path_equals_the_float64_path():
    rng = np.random.default_rng(1)
    a, b = rng.integers(-448, 449, (17, 300)) * 2.0**-9, rng.integers(-448, 449, (300, 19)) * 2.0**-9
    far = np.zeros((17, 2))
    far[:, 0], far[:, 1] = 2.0**100, -(2.0**100)
    wide = exact_matmul(np.hstack([a, far]), np.vstack([b, np.full((2, 19), 2.0**20)]))
    assert np.array_equal(wide, a @ b)
    assert np.array_equal(round_result(wide, "float32"), (a @ b).astype(np.float32))


def test_grid():
    assert grid_of(np.array([0.0])) == (0, 0)
    assert grid_of(np.array([1.0])) == (0, 1)
    assert grid_of(np.array([-3.0, 0.75, 0])) == (-2, 2)
    assert grid_of(np.array([2.0**-149, 2.0**127])) == (-149, 128)


def test_float16_and_float32_range():
    one = np.ones((1, 1), np.float32)
    for x, out in [
        (65519.0, 65504.0),
        (65520.0, INF),
        (-65520.0, -INF),
        (2.0**-25, 0.0),
        (2.0**-25 * 1.01, 2.0**-24),
    ]:
        assert float(matmul(np.float32([[x]]), one, out_dtype="float16")[0, 0]) == out
    big = np.float32([[2.0**127]])
    assert matmul(big, 2 * one)[0, 0] == INF
    assert matmul(np.float32([[3e38, 3e38, -3e38]]), np.ones((3, 1), np.float32))[0, 0] == np.float32(3e38)
    tiny = matmul(np.float32([[-(2.0**-100)]]), np.float32([[2.0**-100]]))
    assert tiny[0, 0] == 0
    assert np.signbit(tiny[0, 0])


def test_nan_and_infinity_in_the_bias():
    a, b = np.float32([[INF], [1]]), np.float32([[1, 1, 1]])
    got = matmul(a, b, bias=np.float32([-INF, NAN, 2]))
    np.testing.assert_array_equal(got, [[NAN, NAN, INF], [-INF, NAN, 3]])


def test_integers():
    rng = np.random.default_rng(2)
    a, b = (
        rng.integers(-128, 128, (5, 700)).astype(np.int8),
        rng.integers(-128, 128, (700, 6)).astype(np.int8),
    )
    want = a.astype(np.int64) @ b.astype(np.int64)
    got = matmul(a, b, out_dtype="int32")
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(matmul(a, b), want.astype(np.float32))
    on_torch = matmul(torch.from_numpy(a), torch.from_numpy(b), out_dtype="int32")
    assert torch.equal(on_torch, torch.from_numpy(want.astype(np.int32)))
    wide = rng.integers(-(2**31), 2**31, (3, 40)).astype(np.int32)
    exact = [[sum(int(x) * int(y) for x, y in zip(r, c, strict=True)) for c in wide] for r in wide]
    want = [[rounded(Fraction(q), "float32") for q in row] for row in exact]
    np.testing.assert_array_equal(matmul(wide, wide.T), want)
    edge = np.int32([[-(2**31)]])
    assert matmul(edge, np.int32([[1]]), out_dtype="int32")[0, 0] == -(2**31)
    refused(ValueError, "does not fit int32", matmul, edge, np.int32([[-1]]), out_dtype="int32")
    with pytest.raises(ValueError, match="integer arrays in the exact tier"):
        matmul(a.astype(np.float32), b, out_dtype="int32")
