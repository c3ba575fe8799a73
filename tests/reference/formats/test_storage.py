"""Stored scales times a power of two, against exact fractions."""

from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ao_lab.testing.strategies import assert_same_bits
from reference import FORMATS
from reference.arrays.namespace import namespace_of
from reference.formats.storage import SCALED, load, times_power_of_two

NUMPY = namespace_of(np.zeros(1))
WIDTHS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e8m0fnu": 8}


def values(stored, storage):
    return load(NUMPY, stored, storage).view(np.float32)


@pytest.mark.parametrize("storage", SCALED)
def test_products_are_exact_or_said_not_to_be(storage):
    carrier = f"uint{WIDTHS[storage]}"
    smallest = 2.0**-126 if storage == "float32" else max(FORMATS[storage].smallest_normal, 2.0**-126)
    largest = np.finfo(np.float32).max if storage == "float32" else FORMATS[storage].max

    @settings(max_examples=60)
    @given(st.integers(0, 2 ** WIDTHS[storage] - 1), st.integers(-300, 300) | st.integers(-3, 3))
    def check(code, exponent):
        stored = np.array([code], carrier)
        stored = stored.view(np.float32) if storage == "float32" else stored
        made, exact = times_power_of_two(stored, storage, exponent)
        old, new = float(values(stored, storage)[0]), float(values(made, storage)[0])
        assert made.dtype == stored.dtype
        if not np.isfinite(old) or old == 0:
            assert exact[0]
            np.testing.assert_array_equal(new, old)
            return
        wanted = Fraction(old) * Fraction(2) ** exponent
        assert exact[0] == (Fraction(smallest) <= abs(wanted) <= Fraction(float(largest)))
        assert not exact[0] or Fraction(new) == wanted

    check()


def test_by_hand():
    made, exact = times_power_of_two(np.array([0, 1, 127, 254, 255], np.uint8), "float8_e8m0fnu", 1)
    assert made[exact].tolist() == [1, 2, 128, 255]
    assert exact.tolist() == [True, True, True, False, True]
    made, exact = times_power_of_two(np.array([1, -3, 0, np.inf, 2.0**-126], np.float32), "float32", -2)
    assert made[exact].tolist() == [0.25, -0.75, 0, np.inf]
    assert exact.tolist() == [True, True, True, True, False]


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float8_e8m0fnu"])
def test_jax(storage):
    codes = np.arange(2 ** WIDTHS[storage]).astype(f"uint{WIDTHS[storage]}")
    for exponent in (-3, 3):
        ours = times_power_of_two(jnp.asarray(codes), storage, exponent)
        assert_same_bits(ours, times_power_of_two(codes, storage, exponent))


def test_storages_that_are_not_exact():
    with pytest.raises(ValueError, match="float8_e4m3fn times a power of two are not exact"):
        times_power_of_two(np.zeros(1, np.uint8), "float8_e4m3fn", 1)
