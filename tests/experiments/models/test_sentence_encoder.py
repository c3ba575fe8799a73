"""Vectors of sentences, and what is measured on them, against sums written out."""

import json
import math

import pytest
import torch

from experiments.data.sentences import Passages, Reviews
from experiments.models import sentence_encoder
from experiments.models.sentence_encoder import (
    PENALTY,
    Encoder,
    PassageTask,
    ReviewTask,
    check_pooling,
    distances,
    kept_neighbours,
    load,
    pooled,
    predicted,
    regression,
)

transformers = pytest.importorskip("transformers")


def test_a_vector_is_the_mean_over_tokens_that_are_no_padding():
    states = torch.tensor([[[3.0, 0.0], [0.0, 4.0], [9.0, 9.0]]])
    vector = pooled(states, torch.tensor([[1, 1, 0]]))
    assert torch.allclose(vector, torch.tensor([[0.6, 0.8]]))


def test_batches_and_their_order_change_no_vector(tmp_path, monkeypatch):
    """Sentences are sorted by length and come back in their own order; padding is seen by none."""
    from tests.support.models.hf_models import save_mpnet

    save_mpnet(tmp_path)
    encoder = Encoder(*load(tmp_path, "cpu"))
    texts = ["the of and", "it", "for was on are with as at", "be this have"]
    together = encoder.vectors(texts)
    monkeypatch.setattr(sentence_encoder, "BATCH", 1)
    assert torch.allclose(together, encoder.vectors(texts), atol=1e-6)
    assert torch.allclose(together.norm(dim=1), torch.ones(4))


def test_the_regression_is_where_the_gradient_is_zero():
    """Of the summed losses + PENALTY / 2 * squared coefficients, the constant aside; whole in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    labels = x[:, 0] + 0.5 * torch.randn(40, generator=generator) > 0.2
    weights = regression(x, labels).requires_grad_()
    scores = x.double() @ weights[:-1] + weights[-1]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, labels.double(), reduction="sum")
    (loss + PENALTY / 2 * weights[:-1].square().sum()).backward()
    assert weights.grad.abs().max() < 1e-5
    assert (predicted(x, weights.detach()) == labels).double().mean() > 0.8


def test_neighbours_and_distances_against_sums_written_out(monkeypatch):
    monkeypatch.setattr(sentence_encoder, "NEIGHBOURS", 2)
    angles = torch.tensor([0.0, 0.1, 0.3, 1.0])
    dense = torch.stack([angles.cos(), angles.sin()], 1)
    moved = torch.tensor([0.0, 0.9, 0.3, 1.0])
    ours = torch.stack([moved.cos(), moved.sin()], 1)
    # Of 0.0: (0.1, 0.3) and now (0.3, 0.9); of 0.1: (0.0, 0.3), now (1.0, 0.3); of 0.3: (0.1, 0.0), now (0.0, 0.9 of place 1).
    assert kept_neighbours(ours, dense, ours, dense) == [1.0, 0.5, 1.0, 1.0]
    assert distances(ours, dense) == pytest.approx([0.0, 1 - math.cos(0.8), 0.0, 0.0], abs=1e-6)


class Fixed:
    """An encoder whose vectors are those of a table."""

    def __init__(self, table):
        self.table = table

    def vectors(self, sentences):
        return torch.stack([torch.tensor(self.table[one]) for one in sentences])


def test_recall_is_of_the_own_half_among_all():
    data = Passages(("q0", "q1", "q2"), ("p0", "p1", "p2"), (0, 0, 1))
    axes = {"q0": [1.0, 0.0, 0.0], "q1": [0.0, 1.0, 0.0], "q2": [0.0, 0.0, 1.0]}
    right = {**axes, "p0": axes["q0"], "p1": axes["q1"], "p2": axes["q2"]}
    wrong = {**right, "p0": axes["q1"], "p1": [0.6, 0.0, 0.8]}
    task = PassageTask.of(data, Fixed(right))
    assert task.judged().answers == {"recall at 1": [1.0, 1.0, 1.0], "1 / rank": [1.0, 1.0, 1.0]}
    # q0 is nearer to p1 than to p0 (0); q1 to p0 than to p1 (0); q2 has p2 first.
    assert task.judged(Fixed(wrong)).answers == {"recall at 1": [0.0, 0.0, 1.0], "1 / rank": [0.5, 0.5, 1.0]}


def test_the_regression_of_the_dense_model_reads_every_copy():
    data = Reviews(("good", "bad"), (True, False), ("fine", "poor"), (True, False))
    dense = {"good": [1.0, 0.0], "bad": [-1.0, 0.0], "fine": [1.0, 0.0], "poor": [-1.0, 0.0]}
    task = ReviewTask.of(data, Fixed(dense))
    assert task.judged().answers == {"accuracy": [1.0, 1.0]}
    # A regression of its own would find this copy as good as the dense model.
    turned = {name: [-one for one in vector] for name, vector in dense.items()}
    assert task.judged(Fixed(turned)).answers == {"accuracy": [0.0, 0.0]}


def test_another_pooling_is_refused(tmp_path):
    check_pooling(tmp_path)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": False}))
    with pytest.raises(ValueError, match="another pooling than the mean"):
        load(tmp_path, "cpu")
