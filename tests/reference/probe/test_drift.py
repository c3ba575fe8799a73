"""Drift: differences in standard errors, and hysteresis."""

from math import inf

import pytest

from reference.probe.drift import Hysteresis, difference
from reference.probe.estimates import normal


def one(value, error=0.01):
    return {"a": normal(value, error, 100)}


def test_differences():
    assert difference(one(1.0)["a"], one(1.1)["a"]) == pytest.approx(0.1 / 0.01 / 2**0.5)
    assert difference(one(1.0, 0)["a"], one(1.0, 0)["a"]) == 0
    assert difference(one(1.0, 0)["a"], one(0.5, 0)["a"]) == -inf


def test_it_is_told_once_and_again_after_calm():
    watch = Hysteresis(interval=10)
    said = [watch.update(one(value), step) for step, value in
            ((0, 1.0), (100, 1.03), (200, 1.5), (300, 2.0), (400, 1.5), (500, 2.0))]  # fmt: skip
    assert said == [(), (), ("a",), (), (), ("a",)]


def test_at_most_one_change_in_an_interval():
    watch = Hysteresis(interval=1000)
    watch.update(one(1.0) | {"b": normal(1.0, 0.01, 9)}, 0)
    assert watch.update(one(1.5) | {"b": normal(1.0, 0.01, 9)}, 10) == ("a",)
    later = one(1.5) | {"b": normal(2.0, 0.01, 9)}
    assert watch.update(later, 500) == ()
    assert watch.update(later, 1010) == ("b",)


def test_small_changes_that_are_certain_do_not_count():
    watch = Hysteresis()
    watch.update(one(1.0, 1e-6), 0)
    assert watch.update(one(1.05, 1e-6), 5000) == ()


def test_wrong_thresholds():
    with pytest.raises(ValueError, match="leave is between"):
        Hysteresis(leave=6)
