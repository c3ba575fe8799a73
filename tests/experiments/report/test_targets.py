"""Targets: reached or not, and what a page says of them."""

import pytest

from experiments.report.targets import Target, missed, percent_over


@pytest.mark.parametrize(
    ("value", "at_least", "reached", "verdict"),
    [
        (2.0, True, True, "yes"),
        (1.9, True, False, "no"),
        (2.0, False, True, "yes"),
        (2.1, False, False, "no"),
    ],
)
def test_a_target_is_reached_on_its_side_of_the_limit(value, at_least, reached, verdict):
    target = Target("speed", value, 2.0, at_least)
    assert (target.reached, target.verdict) == (reached, verdict)
    assert missed([target]) == ([] if reached else [target])


def test_what_was_not_measured_misses_no_target():
    target = Target("speed", None, 2.0)
    assert (target.reached, target.verdict, str(target)) == (None, "", "speed not measured of 2")
    assert missed([target]) == []


def test_text_has_value_limit_and_unit():
    assert str(Target("time", 8.04, 8.0, at_least=False, unit="%", value_format=".1f")) == "time 8.0 of 8 %"
    assert percent_over(3.0, 2.0) == 50.0
