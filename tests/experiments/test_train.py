"""Training: seeded, cached by what decides its outcome."""

import importlib.metadata
import math

import pytest
import torch

from experiments import train
from experiments.model import ModelSettings
from tests.experiments import tiny


def test_a_model_is_trained_once_and_then_read(tmp_path, monkeypatch):
    first = train.trained_model(tiny.TRAIN, tiny.corpus(), "cpu", tmp_path)
    monkeypatch.setattr(train, "train", lambda *_: pytest.fail("trained again"))
    second = train.trained_model(tiny.TRAIN, tiny.corpus(), "cpu", tmp_path)
    assert first.facts == second.facts
    assert first.facts["training_bytes"] == 2 * 2 * 64
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    assert [path.name for path in (tmp_path / "models").iterdir()] == [first.key]


def test_the_same_seed_gives_the_same_weights():
    one, two = (train.train(tiny.TRAIN, tiny.corpus(), "cpu")[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_training_lowers_the_loss():
    settings = tiny.replace(tiny.TRAIN, steps=12, batch=4)
    _, loss = train.train(settings, tiny.corpus(), "cpu")
    assert loss < 7.0 < math.log2(256)


def test_the_key_covers_settings_text_and_device():
    key = train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu")
    shorter = type(tiny.corpus())("made", "1", tiny.corpus().documents[1:])
    others = [
        train.cache_key(tiny.replace(tiny.TRAIN, seed=1), tiny.corpus(), "cpu"),
        train.cache_key(tiny.TRAIN, shorter, "cpu"),
        train.cache_key(tiny.TRAIN, tiny.corpus(), "cuda"),
    ]
    assert key not in others
    assert len(set(others)) == 3
    assert train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu") == key


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_the_key_covers_the_libraries(monkeypatch, library):
    key = train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu")
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == library else real(name))
    assert train.cache_key(tiny.TRAIN, tiny.corpus(), "cpu") != key


def test_a_run_goes_on_from_another(tmp_path):
    """Steps of nothing leave the model where it was; steps move it, and the one that was begun stays."""
    begun = train.trained_model(tiny.TRAIN, tiny.corpus(), "cpu", tmp_path)
    further = tiny.replace(tiny.TRAIN, start=tiny.TRAIN, matrix_rate=None, seed=7)
    still = train.trained_model(tiny.replace(further, rate=0.0), tiny.corpus(), "cpu", tmp_path)
    moved = train.trained_model(further, tiny.corpus(), "cpu", tmp_path)
    before, after, other = (made.model.state_dict() for made in (begun, still, moved))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(torch.equal(before[name], other[name]) for name in before if "proj" in name)
    assert len({begun.key, still.key, moved.key}) == 3


def test_the_rate_warms_up_and_falls():
    settings = tiny.replace(tiny.TRAIN, steps=100, warmup=10)
    shares = [train.share_of_rate(number, settings) for number in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert max(shares) == pytest.approx(max(shares[8:12]))
    assert shares[-1] < 0.06


def test_widths_that_heads_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads must divide width"):
        ModelSettings(width=250, heads=4)
