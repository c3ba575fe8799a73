"""Estimators of errors: against their definitions, and where they are blind."""

import numpy as np
import pytest

from reference.probe import errors


def draw(n=2000, channels=16, seed=0, mean=0.0, ratio=0.037):
    """Outputs and errors that are a share of the root mean square output."""
    rng = np.random.default_rng(seed)
    y = rng.standard_normal((n, channels)) + mean
    return ratio * rng.standard_normal((n, channels)), y


def test_definitions():
    e, y = draw(50)
    assert errors.norm_ratio(e, y).value == pytest.approx(np.linalg.norm(e) / np.linalg.norm(y), rel=1e-14)
    assert errors.median_ratio(e, y).value == pytest.approx(np.median(abs(e / y)), rel=1e-14)
    channels = np.linalg.norm(e, axis=0) / np.linalg.norm(y, axis=0)
    worst = errors.worst_channel(e, y)
    assert worst.value == pytest.approx(channels.max(), rel=1e-14)
    assert worst.low < worst.value < worst.high
    assert errors.mere(e, y).value == pytest.approx(abs(e / y).mean(), rel=1e-14)
    assert errors.bias(e, y).value == pytest.approx((abs(e.mean(0)) / y.std(0)).max(), rel=1e-14)
    assert errors.output_variance(e, y).value == pytest.approx(((e * y).sum(1) ** 2).mean(), rel=1e-14)


def test_a_broken_channel_is_the_worst():
    e, y = draw()
    e[:, 3] *= 10
    assert errors.worst_channel(e, y).low > 5 * errors.norm_ratio(*draw()).value
    assert errors.norm_ratio(e, y).value < 0.11


def test_a_bias_is_seen_and_noise_is_not():
    """Two percent of an output's deviation beside noise of 3.7 percent."""
    e, y = draw()
    found = errors.bias(e + 0.02, y)
    assert found.low > 0.015
    assert errors.bias(e, y).high < 0.01
    assert np.isnan(errors.bias(e[:1], y[:1]).value)


def test_mere_grows_with_the_number_of_elements_and_the_norm_ratio_does_not():
    """No finite expectation where outputs pass through zero: the mean over n elements grows like log n (the docstring's proof),
    by 0.64 * 0.037 * log(1000) = 0.16 from 10^3 to 10^6 elements."""

    def mean_of(n, seeds, mean=0.0):
        return np.median([errors.mere(*draw(n, 1, seed, mean)).value for seed in range(seeds)])

    small, large = mean_of(10**3, 30), mean_of(10**6, 3)
    assert large - small > 0.1
    assert small > 4 * 0.037
    ratios = [errors.norm_ratio(*draw(n, 1, 7)).value for n in (10**3, 10**6)]
    assert ratios[1] == pytest.approx(ratios[0], rel=0.1)
    # Outputs that keep away from zero have a finite one, and it is small.
    assert mean_of(10**6, 1, mean=6.0) == pytest.approx(0.037 * 0.8 / 6, rel=0.05)


def test_mere_scatters_where_the_norm_ratio_is_sharp():
    found = [
        [one(*draw(1000, 8, seed)).value for seed in range(20)] for one in (errors.mere, errors.norm_ratio)
    ]
    spread = [np.ptp(values) / np.median(values) for values in found]
    assert spread[0] > 10 * spread[1]
    assert np.isnan(errors.mere(*draw(10)).error)


def test_zeros():
    y = np.array([[0.0, 1.0], [0.0, 2.0]])
    assert errors.mere(0.1 * y, y).samples == 2
    assert errors.worst_channel(0.1 * y, y).value == pytest.approx(0.1)
    assert errors.median_ratio(0 * y, 0 * y).value == 0
    assert errors.worst_channel(y, 0 * y).value == np.inf


def test_a_gradients_error_over_the_noise_of_its_minibatch():
    """E |g1 - g2|^2 / 4 is the trace of the covariance of the whole batch's mean."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((400, 2, 30))  # halves of batches: covariance of the whole is half of that
    change = 0.1 * rng.standard_normal((400, 30))
    found = errors.gradient_ratio(change, noise + 3.0)
    assert found.low < 0.01 * 2 < found.high
    assert found.error < 0.001
    assert errors.gradient_ratio(change, 0 * noise).value == np.inf


def test_what_a_logits_change_costs():
    """Second order in the change, against the exact difference of log losses."""
    rng = np.random.default_rng(0)
    z = rng.standard_normal(20000) - 2
    p = 1 / (1 + np.exp(-z))
    y = (rng.random(20000) < p).astype(float)

    def loss(logits):
        return np.mean(np.logaddexp(0, logits) - y * logits)

    d = 0.05 * rng.standard_normal(20000)
    found = errors.loss_change(z, y, d)
    exact = loss(z + d) - loss(z)
    assert found.shift + found.spread == pytest.approx(exact, abs=0.01 * found.spread)
    variance = (p * (1 - p)).mean()
    allowed = errors.tolerated_deviation(found.spread / loss(z), loss(z), variance)
    assert allowed == pytest.approx(0.05, rel=0.02)


def test_wrong_input():
    e, y = draw(10)
    with pytest.raises(ValueError, match="one shape"):
        errors.norm_ratio(e, y[1:])
    e[0, 0] = np.nan
    with pytest.raises(ValueError, match="leave out the batch"):
        errors.norm_ratio(e, y)
    with pytest.raises(ValueError, match="halves"):
        errors.gradient_ratio(y, y)
    with pytest.raises(ValueError, match="positive"):
        errors.tolerated_deviation(0, 1, 1)
