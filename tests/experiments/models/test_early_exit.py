"""Training with layer dropout and early exits: weights of exits, layers that are left out, the same model in transformers."""

from dataclasses import replace

import pytest
import torch

from experiments.models import early_exit
from experiments.models.early_exit import PLAIN, Exits, as_transformers, exit_loss, train_with_exits
from experiments.models.pretraining import TINY, Budget, ByteLevelModel, PretrainSettings, mean_loss
from tests.experiments.harness import tiny

MODEL = replace(TINY, layers=4, width=64, heads=2, kv_heads=2, feed_forward=64, context=32)


def test_exits_and_dropout_grow_with_depth():
    weights, drops = Exits().weights(4), [Exits(dropout=0.2).drop(layer, 4) for layer in range(4)]
    assert sum(weights) == pytest.approx(1)
    assert weights == sorted(weights)
    assert (drops[0], drops[-1]) == (0, pytest.approx(0.2))
    assert drops == sorted(drops)
    assert PLAIN.weights(4) == [0, 0, 0, 1]


def test_the_plain_loss_is_the_usual_one():
    torch.manual_seed(0)
    model, tokens = ByteLevelModel(MODEL), torch.randint(256, (3, 17))
    torch.testing.assert_close(exit_loss(model, tokens, PLAIN), mean_loss(model, tokens))


def test_every_exit_is_a_loss_of_its_own():
    """The mean over exits of models that end there."""
    torch.manual_seed(0)
    model, tokens, exits = ByteLevelModel(MODEL), torch.randint(256, (3, 17)), Exits(dropout=0.0)
    found, layers, losses = exit_loss(model, tokens, exits), list(model.model.layers), []
    for count in range(1, 5):
        model.model.layers = torch.nn.ModuleList(layers[:count])
        losses.append(mean_loss(model, tokens))
    expected = sum(weight * loss for weight, loss in zip(exits.weights(4), losses, strict=True))
    torch.testing.assert_close(found, expected)


def test_a_layer_that_is_left_out_changes_nothing(monkeypatch):
    """Of the sequences that leave it out, and of no other."""
    torch.manual_seed(0)
    model, tokens = ByteLevelModel(MODEL), torch.randint(256, (2, 17))
    draws = torch.tensor([0.0, 1.0])[:, None, None]
    monkeypatch.setattr(early_exit.torch, "rand", lambda *sizes, device: draws)
    found = exit_loss(model, tokens, Exits(dropout=0.5, scale=0.0))
    whole = mean_loss(model, tokens[1:])
    model.model.layers = model.model.layers[:1]  # the first one is never left out
    torch.testing.assert_close(found, (mean_loss(model, tokens[:1]) + whole) / 2)


@torch.no_grad()
def test_transformers_computes_the_same():
    torch.manual_seed(0)
    model, ids = ByteLevelModel(MODEL).eval(), torch.randint(256, (2, 16))
    torch.testing.assert_close(as_transformers(model)(ids).logits, model(ids), rtol=1e-4, atol=1e-4)


def test_a_training_ends_with_its_budget(tmp_path):
    settings = PretrainSettings(
        model=MODEL, budget=Budget(bytes=3 * 4 * 32), batch=4, rate=1e-3, compiled=False
    )
    torch.manual_seed(0)
    before = ByteLevelModel(MODEL).lm_head.weight.clone()
    trained = train_with_exits(settings, Exits(), tiny.corpus(), "cpu")
    assert not trained.training
    assert not torch.equal(trained.lm_head.weight, before)
