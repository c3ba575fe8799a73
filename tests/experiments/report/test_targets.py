"""Targets: reached or not, and what a page says of them."""

import pytest

from experiments.report.targets import Target, counts, missed, percent_over


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
    assert str(Target("time", 8.04, 8.0, at_least=False, unit="%", value_format=".1f")) == "time 8.04 of 8 %"
    assert percent_over(3.0, 2.0) == 50.0


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "words"),
    [
        (1.1984, 1.2, True, "1.198 of 1.2"),
        (1.19996, 1.2, True, "1.19996 of 1.2"),
        (1.2, 1.2, True, "1.20 of 1.2"),
        (1.18, 1.2, True, "1.18 of 1.2"),
        (7.6, 7.5952, False, "7.600 of 7.595"),
        (1.2000000001, 1.2, False, "1.20 of 1.2"),
    ],
)
def test_text_tells_a_miss_from_its_limit(value, limit, at_least, words):
    assert str(Target("speed", value, limit, at_least, value_format=".2f")) == f"speed {words}"


def test_values_that_were_not_measured_are_counted():
    targets = [Target("a", 2.0, 1.0), Target("b", 0.5, 1.0), Target("c", None, 1.0)]
    assert [one.measured for one in targets] == ["2", "0.5", ""]
    assert str(targets[0]) == "a 2 of 1"
    assert counts(targets, " are met") == "1 of 2 are met, 1 not measured"
    assert counts(targets[1:2]) == "0 of 1"
