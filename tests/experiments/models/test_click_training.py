"""What a click model is worth, by formulas on few numbers; trainings that begin alike; trainings that learn."""

import math

import numpy as np
import pytest
import torch

from experiments.data.drawn_ratings import impressions
from experiments.models import dlrm, wukong
from experiments.models.click_training import (
    ClickTraining,
    Quality,
    auc,
    paired,
    predictions,
    quality,
    relative,
    train,
)

PLAN = ClickTraining(steps=40, batch=256)


@pytest.fixture(scope="module")
def data():
    return impressions(300, 30, 1280, 0)


def test_quality_is_the_formulas():
    logits, labels = np.array([2.0, -1.0, 0.5, 0.5]), np.array([1.0, 0.0, 0.0, 1.0])
    p = 1 / (1 + np.exp(-logits))
    loss = -np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p))
    found = quality(logits, labels)
    assert found.log_loss == pytest.approx(loss)
    assert found.entropy == pytest.approx(loss / math.log(2))
    assert found.auc == pytest.approx((1 + 1 + 1 + 0.5) / 4)
    assert found.calibration == pytest.approx(p.mean() / 0.5)
    assert quality(np.array([1e4, -1e4]), np.array([0.0, 1.0])).log_loss == pytest.approx(1e4)
    with pytest.raises(ValueError, match="all 2 labels are 1"):
        quality(np.zeros(2), np.ones(2))


def test_auc_counts_pairs():
    generator = np.random.default_rng(0)
    logits, labels = generator.integers(0, 9, 60).astype(float), generator.integers(0, 2, 60).astype(float)
    pairs = [(a > b) + (a == b) / 2 for a in logits[labels > 0] for b in logits[labels == 0]]
    assert auc(logits, labels) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(
    "model", [lambda d: dlrm.DLRM(dlrm.small(d, 8)), lambda d: wukong.Wukong(wukong.small(d, 8))]
)
def test_it_learns(data, model):
    """Better than always saying the share of ones by a twentieth of its log loss."""
    torch.manual_seed(0)
    one = model(data)
    train(one, data, PLAN, 0)
    found = quality(*predictions(one, data, PLAN))
    assert found.entropy < 0.95
    assert found.auc > 0.65


def test_pairs_begin_alike_and_see_the_same(data):
    def make():
        return dlrm.DLRM(dlrm.small(data, 8))

    seen = []
    plan = ClickTraining(steps=2, batch=64, evaluated=100)
    found = paired(make, {"base": None, "same": lambda model: seen.append(model)}, data, plan, (0, 1))
    assert found["base"] == found["same"]
    assert found["base"][0] != found["base"][1]
    assert len(seen) == 2
    assert relative(found["base"], found["same"]).mean == 0
    worse = [Quality(one.log_loss * by, 1, 1, 1) for one, by in zip(found["base"], (1.01, 1.03), strict=True)]
    one = relative(found["base"], worse)
    assert one.mean == pytest.approx(2)
    assert one.half == pytest.approx(12.7062 * math.sqrt(2) / math.sqrt(2))


def test_what_stops_being_finite_is_said(data):
    model = dlrm.DLRM(dlrm.small(data, 8))
    with torch.no_grad():
        model.top[-1].bias.fill_(math.nan)
    with pytest.raises(ValueError, match="the log loss is nan in step 0"):
        train(model, data, ClickTraining(steps=2, batch=16), 0)
