"""Intervals: as often right as they say, and exact where a closed form is known."""

import numpy as np
import pytest

from reference.probe import estimates
from reference.probe.estimates import Estimate


def coverage(draw, truth, times=200):
    """How often an interval holds the truth."""
    found = [draw(np.random.default_rng(seed)) for seed in range(times)]
    return np.mean([one.low <= truth <= one.high for one in found])


def test_a_mean_has_its_standard_error():
    x = np.arange(10.0)
    found = estimates.mean(x)
    assert found == estimates.normal(4.5, x.std(ddof=1) / 10**0.5, 10)
    assert estimates.mean([1.0]).error == np.inf


def test_intervals_hold_what_they_say():
    """Binomial bounds of 200 draws at 95 %: 95 % less four standard deviations is 88.8 %."""
    assert coverage(lambda r: estimates.mean(r.exponential(size=400)), 1.0) > 0.888
    assert coverage(lambda r: estimates.quantile(r.exponential(size=400)), np.log(2)) > 0.888

    def ratio(r):
        a = r.chisquare(4, 300)
        return estimates.ratio_of_sums(a, 2 * a + r.chisquare(8, 300))

    assert coverage(ratio, (4 / 16) ** 0.5) > 0.888


def test_a_ratio_by_the_delta_method():
    """Against the definition, term by term."""
    a, c = np.array([1.0, 2.0, 6.0]), np.array([2.0, 3.0, 4.0])
    rho = (a.sum() / c.sum()) ** 0.5
    error = (a - rho**2 * c).std(ddof=1) / (c.mean() * 3**0.5) / (2 * rho)
    found = estimates.ratio_of_sums(a, c)
    assert (found.value, found.samples) == (rho, 3)
    assert found.error == pytest.approx(error, rel=1e-14)
    assert estimates.ratio_of_sums(0 * a, c) == Estimate(0.0, 0.0, 0.0, 0.0, 3)
    assert estimates.ratio_of_sums(a, 0 * c).value == np.inf


def test_a_quantile_of_values_that_are_infinite():
    found = estimates.quantile([1.0, 2.0, np.inf])
    assert (found.value, found.low, found.high) == (2.0, 1.0, np.inf)


def test_a_bootstrap_takes_as_many_samples():
    counts = estimates.resampled(50, seed=1)
    assert counts.shape == (estimates.RESAMPLES, 50)
    assert (counts.sum(1) == 50).all()
    found = estimates.bootstrapped(1.0, np.arange(101.0), 7)
    assert (found.low, found.high, found.samples) == (2.5, 97.5, 7)


@pytest.mark.parametrize("x", [[], [[1.0]], [1.0, np.nan]], ids=["none", "a matrix", "nan"])
def test_wrong_samples(x):
    with pytest.raises(ValueError, match="samples"):
        estimates.mean(x)


def test_it_says_its_interval():
    assert str(Estimate(0.123456, 0.01, 0, 1, 3)) == "0.1235 ± 0.02"
    assert str(Estimate(0.123456)) == "0.1235"
