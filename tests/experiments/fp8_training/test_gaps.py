"""Gaps over paired seeds: values by hand, the three verdicts, what cannot be compared."""

import pytest

from experiments.fp8_training.convergence import BEYOND, UNDECIDED, WITHIN, Gap, gap


def test_a_gap_is_paired_and_in_percent():
    # Gaps of 1%, 2% and 3%: mean 2, standard deviation 1, and Student's 4.3027 / sqrt(3).
    found = gap([1.0, 2.0, 4.0], [1.01, 2.04, 4.12])
    assert (found.mean, found.half, found.seeds) == (pytest.approx(2), pytest.approx(2.4842, abs=1e-4), 3)
    # Seeds that differ far more than recipes do not widen a paired interval.
    assert gap([1.0, 5.0, 9.0], [1.001, 5.005, 9.009]).half == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("mean", "half", "verdict"),
    [
        (0.1, 0.3, WITHIN),
        (-3.0, 1.0, WITHIN),
        (0.4, 0.2, UNDECIDED),
        (0.9, 0.3, BEYOND),
        (0.5, 0.0, UNDECIDED),
    ],
)
def test_the_whole_interval_decides(mean, half, verdict):
    assert Gap(mean, half, 5).verdict(0.5) == verdict


def test_what_cannot_be_compared_is_refused():
    for base, recipe in (([1.0], [1.0]), ([0.0, 1.0], [1.0, 1.0]), ([], [])):
        with pytest.raises(ValueError, match="got"):
            gap(base, recipe)
    with pytest.raises(ValueError, match="zip"):
        gap([1.0, 2.0], [1.0])
