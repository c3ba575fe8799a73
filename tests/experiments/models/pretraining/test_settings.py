"""Budgets of bytes and seconds, the learning rate along them, sizes, and operations counted by hand."""

import pytest
import torch

from experiments.models.pretraining.model import ByteLevelModel
from experiments.models.pretraining.settings import Budget
from experiments.models.pretraining.sizes import LARGE, SIZES, SMALL
from experiments.pretraining.run import linear_parameters, share_of_peak, training_flops
from tests.experiments.models.pretraining.small import MODEL, SETTINGS, replace


def test_a_budget_ends_by_what_is_used_up_first():
    both = Budget(bytes=1000, seconds=10)
    assert both.fraction(500, 2) == 0.5
    assert both.fraction(500, 8) == 0.8
    assert Budget(seconds=10).fraction(10**9, 5) == 0.5
    assert str(Budget(bytes=60_000_000)) == "60 MB"
    assert str(both) == "0.001 MB or 10 s"
    for wrong in ({}, {"bytes": 0}, {"seconds": -1.0, "bytes": 5}):
        with pytest.raises(ValueError, match="a budget is a positive number"):
            Budget(**wrong)


def test_the_rate_is_a_trapezoid_over_the_budget():
    one = replace(SETTINGS, rate=1.0, warmup=0.1, decay=0.4, last_rate=0.1)
    points = {0.0: 0.0, 0.05: 0.5, 0.1: 1.0, 0.6: 1.0, 0.8: 0.55, 1.0: 0.1}
    assert {done: one.rate_at(done) for done in points} == pytest.approx(points)
    assert replace(one, warmup=0.0, decay=0.0).rate_at(0.0) == 1.0


@pytest.mark.parametrize("change", [{"warmup": 0.8}, {"decay": -0.1}, {"rate": 0.0}, {"batch": 0}])
def test_settings_that_do_not_fit_are_refused(change):
    with pytest.raises(ValueError, match="got"):
        replace(SETTINGS, **change)


@pytest.mark.parametrize(("settings", "millions"), [(SMALL, 28.7), (LARGE, 122.5)])
def test_sizes_have_their_parameters(settings, millions):
    with torch.device("meta"):
        model = ByteLevelModel(settings)
    assert sum(one.numel() for one in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)
    assert {settings.width % 256, settings.feed_forward % 256, settings.head_dim % 128} == {0}
    assert [SIZES[name].model for name in ("30m", "120m")] == [SMALL, LARGE]


def test_operations_are_six_a_parameter_and_causal_attention():
    parameters = 4 * 32 * 32 + 3 * 32 * 64 + 32 * 256
    assert linear_parameters(ByteLevelModel(MODEL)) == parameters
    # Attention: 2 products of 2 * 32 operations for each of 16 / 2 bytes, three times.
    assert training_flops(parameters, MODEL) == 6 * parameters + 3 * 2 * 2 * 32 * 8
    assert share_of_peak(989e6, 4e5, "NVIDIA H200") == pytest.approx(40.0)
    assert share_of_peak(1.0, 1.0, "cpu") is None
