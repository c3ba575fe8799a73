"""Sums of Hopper's tensor cores as the model has them, against integers and fractions."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from math import floor, trunc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.formats.formats import FORMATS
from reference.matmul.exact import exact_matmul
from reference.matmul.tensor_core_model import (
    HOPPER_16BIT,
    HOPPER_FP8,
    HOPPER_FP8_PROMOTED,
    TensorCore,
    tensor_core_matmul,
)
from tests.support.refusals import refused

E4M3, E5M2, BF16 = FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"], FORMATS["bfloat16"]


def exponent(x, emin):
    """max(floor(log2 |x|), emin), by integers."""
    e = abs(x).numerator.bit_length() - abs(x).denominator.bit_length()
    return max(e if Fraction(2) ** e <= abs(x) else e - 1, emin)


def cut(x, how):
    return {"toward_zero": trunc, "down": floor, "nearest_even": round}[how](x)


def scalar_step(pairs, c, core, emin):
    """The steps of the docstring in rational arithmetic, one output."""
    exponents = [exponent(x, emin[0]) + exponent(y, emin[1]) for x, y in pairs if x * y]
    if core.product_exponent == "normalized":
        exponents = [exponent(x * y, -(10**6)) for x, y in pairs if x * y]
    largest = max([*exponents, exponent(c, -126) if c else -126])
    unit = Fraction(2) ** (largest - core.frac_bits)
    total = sum(cut(t / unit, core.align) for t in [x * y for x, y in pairs] + [c]) * unit
    if total == 0:
        return Fraction(0)
    quantum = Fraction(2) ** (exponent(total, -126) - core.mantissa_bits)
    return cut(total / quantum, core.deliver) * quantum


def scalar_matmul(a, b, core, emin):
    out = np.zeros((a.shape[0], b.shape[1]))
    for i, j in np.ndindex(out.shape):
        pairs = [(Fraction(float(x)), Fraction(float(y))) for x, y in zip(a[i], b[:, j], strict=True)]
        total = np.float32(0)
        size = core.promote or max(len(pairs), 1)
        for start in range(0, len(pairs), size):
            c, part = Fraction(0), pairs[start : start + size]
            for step in range(0, len(part), core.k_step):
                c = scalar_step(part[step : step + core.k_step], c, core, emin)
            total = total + np.float32(float(c))
        out[i, j] = total
    return out


def random_codes(rng, shape, fmt):
    """Random bit patterns without NaN and infinity."""
    finite = np.flatnonzero(np.isfinite(fmt.values))
    return fmt.values[rng.choice(finite, shape)].astype(np.float64)


def normals(rng, shape, dtype=ml_dtypes.float8_e4m3fn):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype).astype(np.float64)


CORES = [
    HOPPER_FP8,
    HOPPER_FP8_PROMOTED,
    HOPPER_16BIT,
    TensorCore(k_step=4, frac_bits=3, mantissa_bits=2, promote=10),
    TensorCore(align="down"),
    TensorCore(align="nearest_even", deliver="nearest_even"),
    TensorCore(deliver="down", product_exponent="normalized"),
]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("k", [1, 31, 32, 33, 150])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (BF16, BF16)])
def test_equals_the_definition_in_rationals(core, k, formats):
    rng = np.random.default_rng(k)
    emin = formats[0].emin, formats[1].emin
    a, b = random_codes(rng, (2, k), formats[0]), random_codes(rng, (k, 2), formats[1])
    if formats[0] is BF16:  # keep the sums below float32's overflow
        a = np.where(abs(a) < 1e15, a, 1.0)
        b = np.where(abs(b) < 1e15, b, 1.0)
    a[0, ::3] = 0
    np.testing.assert_array_equal(
        tensor_core_matmul(a, b, core=core, emin=emin), scalar_matmul(a, b, core, emin)
    )


code = st.integers(0, 255).filter(lambda c: c & 0x7F != 0x7F)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(code, code), min_size=1, max_size=80), st.sampled_from(CORES))
def test_any_codes(pairs, core):
    a, b = (E4M3.values[[p[i] for p in pairs]].astype(np.float64) for i in range(2))
    expected = scalar_matmul(a[None], b[:, None], core, (-6, -6))
    np.testing.assert_array_equal(tensor_core_matmul(a[None], b[:, None], core=core), expected)


def one(pairs, core=HOPPER_FP8, emin=(-6, -6)):
    a, b = np.array([[x for x, _ in pairs]], np.float64), np.array([[y] for _, y in pairs], np.float64)
    return float(tensor_core_matmul(a, b, core=core, emin=emin)[0, 0])


def test_cases_worked_by_hand():
    # 1 + 2**-13 holds; 2**-14 is below the last fractional bit of the alignment and vanishes, 32 times over.
    tiny = 2.0**-7
    assert one([(1, 1), (tiny, 2.0**-6)]) == 1 + 2**-13
    assert one([(1, 1)] + [(tiny, tiny)] * 31) == 1
    # Truncation is toward zero: the same happens to negative terms.
    assert one([(1, 1)] + [(-tiny, tiny)] * 31) == 1
    assert one([(-1, 1)] + [(tiny, tiny)] * 31) == -1
    # A carry beyond 13 mantissa bits cuts the result: 3 + 2**-13 has 15 significant bits.
    assert one([(1, 1), (1, 1), (1, 1), (tiny, 2.0**-6)]) == 3
    # An unnormalised product: 1.75 * 1.75 has exponent 0, so 2**-13 is kept; normalised it would have exponent 1.
    assert one([(1.75, 1.75), (tiny, 2.0**-6), (-1.5, 1.5)]) == 0.8125 + 2**-13
    assert (
        one([(1.75, 1.75), (tiny, 2.0**-6), (-1.5, 1.5)], replace(HOPPER_FP8, product_exponent="normalized"))
        == 0.8125
    )
    # A subnormal operand counts with its format's smallest exponent: 2**-9 * 448 is aligned at -6 + 8 = 2, not at -1.
    assert one([(2.0**-9, 448.0), (2.0**-6, 2.0**-6)]) == 0.875
    assert one([(2.0**-9, 448.0), (2.0**-6, 2.0**-5)]) == 0.875 + 2**-11
    # The accumulator is aligned too: in the second step 2**-13 meets an accumulator of 2.
    assert one([(2, 1)] + [(0, 0)] * 31 + [(tiny, 2.0**-6)] * 32) == 2
    assert one([(1, 1)] + [(0, 0)] * 31 + [(tiny, 2.0**-6)] * 32) == 1 + 2**-8


def test_promotion_recovers_what_the_chain_loses():
    pairs = [(2, 1)] + [(0, 0)] * 127 + [(2.0**-7, 2.0**-6)] * 128
    assert one(pairs) == 2
    assert one(pairs, HOPPER_FP8_PROMOTED) == 2 + 2**-6


@pytest.mark.parametrize("core", CORES[:3])
def test_small_integers_are_exact(core):
    """Sums of magnitude below 2**13 lose nothing: every order gives the same bits."""
    rng = np.random.default_rng(7)
    a, b = (rng.integers(-4, 5, s).astype(np.float64) for s in ((8, 480), (480, 8)))
    np.testing.assert_array_equal(tensor_core_matmul(a, b, core=core), a @ b)


def test_zeros_and_empty_shapes():
    for m, k, n in [(0, 3, 2), (3, 0, 2), (2, 3, 0), (0, 0, 0)]:
        out = tensor_core_matmul(np.ones((m, k)), np.ones((k, n)))
        assert out.shape == (m, n)
        assert not out.any()
    for pairs in ([(0, 1)], [(-0.0, 1)], [(-1, 0.0)], [(1, 1), (-1, 1)]):
        assert str(one(pairs)) == "0.0"


def test_nan_and_infinity():
    inf, nan = np.inf, np.nan
    assert one([(inf, 1), (448, 448)]) == inf
    assert one([(1, -inf), (448, 448)], HOPPER_FP8_PROMOTED) == -inf
    for pairs in ([(nan, 0)], [(inf, 0)], [(inf, 1), (-inf, 1)], [(1, 1)] * 40 + [(1, nan)]):
        assert np.isnan(one(pairs))
    a, b = np.ones((2, 2)), np.ones((2, 2))
    a[0, 0] = nan
    np.testing.assert_array_equal(np.isnan(tensor_core_matmul(a, b)), [[True, True], [False, False]])


def test_overflow_and_underflow_of_16_bit_inputs():
    emin = (-126, -126)
    assert one([(2.0**127, 1), (2.0**127, 1)], HOPPER_16BIT, emin) == np.inf
    assert one([(-(2.0**127), 2)], HOPPER_16BIT, emin) == -np.inf
    assert one([(2.0**-100, 2.0**-49)], HOPPER_16BIT, emin) == 2.0**-149
    assert one([(2.0**-100, 2.0**-50)], HOPPER_16BIT, emin) == 0


def test_batches_slabs_and_views(monkeypatch):
    rng = np.random.default_rng(8)
    a, b = normals(rng, (3, 1, 5, 70)), normals(rng, (2, 70, 4))
    got = tensor_core_matmul(a, b)
    assert got.shape == (3, 2, 5, 4)
    for i, j in np.ndindex(3, 2):
        np.testing.assert_array_equal(got[i, j], tensor_core_matmul(a[i, 0], b[j]))
    # `reference.matmul` is the function, so the module has no path of attributes.
    monkeypatch.setattr(sys.modules["reference.matmul.tensor_core_model"], "SLAB", 300)
    np.testing.assert_array_equal(tensor_core_matmul(a, b), got)
    swapped = tensor_core_matmul(a.swapaxes(-1, -2)[..., ::2].swapaxes(-1, -2), b[..., ::-1])
    np.testing.assert_array_equal(swapped, got[..., ::2, ::-1])


def test_it_is_close_to_the_exact_product():
    rng = np.random.default_rng(9)
    a, b = normals(rng, (16, 1024)), normals(rng, (1024, 16))
    exact = exact_matmul(a, b)
    chain = np.abs(tensor_core_matmul(a, b) - exact).max()
    promoted = np.abs(tensor_core_matmul(a, b, core=HOPPER_FP8_PROMOTED) - exact).max()
    assert 0 < promoted < chain < 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("k_step", 0), ("k_step", 2.0), ("frac_bits", 36), ("mantissa_bits", 24), ("promote", 0), ("align", "up"),
     ("deliver", "up"), ("product_exponent", "max")],
)  # fmt: skip
def test_refusals(field, value):
    refused(ValueError, field, TensorCore, **{field: value})
