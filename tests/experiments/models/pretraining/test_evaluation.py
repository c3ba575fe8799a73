"""Bits per byte: every byte once, with the context that it is promised, equal to a count by hand."""

import math

import pytest
import torch
from torch import nn

from experiments.models.pretraining.evaluation import bits_per_byte, windows
from experiments.models.pretraining.model import ByteLevelModel
from tests.experiments.models.pretraining.small import MODEL

TEXT = bytes(range(1, 251))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 12, 13, 16, 17, 200, 250])
def test_each_byte_counts_once_behind_half_a_context(length):
    inputs, targets, counted = windows(TEXT[:length], 8)
    assert targets[counted].tolist() == list(TEXT[:length])
    assert inputs[0, 0] == 0
    for row, (seen, predicted, count) in enumerate(zip(inputs, targets, counted, strict=True)):
        assert torch.equal(seen[1:], predicted[:-1])
        assert row == 0 or not count[:4].any()


class Table(nn.Module):
    """The next byte from the last one by a table of logits."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(256, 256)

    def forward(self, tokens):
        return self.logits(tokens)


def test_bits_are_those_of_a_count_by_hand():
    torch.manual_seed(0)
    model, text = Table(), b"one byte after the other, " * 20
    likelihood = torch.log_softmax(model.logits.weight.detach().double(), dim=-1)
    pairs = zip(b"\0" + text, text, strict=False)
    expected = -sum(float(likelihood[a, b]) for a, b in pairs) / math.log(2) / len(text)
    assert bits_per_byte(model, {"a": text}, 32)["a"] == pytest.approx(expected, rel=1e-6)
    uniform = Table()
    nn.init.zeros_(uniform.logits.weight)
    assert bits_per_byte(uniform, {"a": text, "b": b"x"}, 32) == pytest.approx({"a": 8.0, "b": 8.0})


def test_it_is_the_same_again_and_texts_do_not_depend_on_each_other():
    torch.manual_seed(0)
    model = ByteLevelModel(MODEL).eval()
    texts = {"a": TEXT, "b": TEXT[::-1] * 9}
    found = bits_per_byte(model, texts, 16)
    assert found == bits_per_byte(model, dict(reversed(texts.items())), 16)
    assert found["b"] == bits_per_byte(model, {"b": texts["b"]}, 16)["b"]


def test_what_cannot_be_evaluated_is_refused():
    for text, context in ((b"", 8), (b"x", 7)):
        with pytest.raises(ValueError, match="at least one byte and an even context"):
            windows(text, context)
