"""Intervals of few values, against SciPy's own distribution; values rounded to the digits of their error."""

import pytest
from scipy import stats

from ao_lab.intervals import half_interval, is_noise, quantile, rounded, to_error


def test_quantiles_are_students():
    for count in (2, 3, 4, 5, 8, 32, 1001):
        assert quantile(count) == pytest.approx(stats.t.ppf(0.975, count - 1), rel=1e-12)
    assert quantile(None) == pytest.approx(1.959964, rel=1e-6)
    assert half_interval(0.5, 8) == 0.5 * quantile(8)
    assert (half_interval(None, 8), half_interval(0.5, 1), half_interval(float("nan"), 8)) == (None,) * 3
    with pytest.raises(ValueError, match="two values or more, got 1"):
        quantile(1)


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (-0.000507, 0.000269, "-0.00051 ± 0.00027"),
        (12.345, 0.0996, "+12.35 ± 0.10"),
        (1234.0, 345.0, "+1234 ± 345"),
        (0.5, None, "+0.5"),
        (0.5, 0.0, "+0.5"),
        (float("inf"), 1.0, "+inf"),
        (None, 1.0, "-"),
    ],
)
def test_values_have_the_digits_of_their_error(value, half, text):
    assert rounded(value, half, sign=True) == text


def test_values_alone():
    assert (to_error(0.00123456, 0.0002), to_error(0.00123456, 1e-6), to_error(None, 1.0)) == (
        "0.00123",
        "0.00123",
        "-",
    )
    assert to_error(0.0126, 0.031) == "0.013"
    assert [is_noise(-0.1, half) for half in (0.2, 0.05, None)] == [True, False, False]
    assert rounded(2.8, 0.8, sign=True, unit="%") == "+2.80 ± 0.80%"
