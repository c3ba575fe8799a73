"""Which tokens count and which are held out; moments of them, with padding or without, bit for bit."""

import pytest
import torch
from torch import nn

from ao_lab.calibration.tokens import HELD_OUT, PADDING, TRAIN, Moments, SplitMoments, Tokens, roles
from ao_lab.transforms.data import calibrating, mask_of
from ao_lab.transforms.walk import captured
from tests.ao_lab.transforms.test_walk import Waits


def test_every_tenth_sequence_is_held_out():
    held = torch.cat([one == HELD_OUT for one in roles([(7, 4), (8, 4), (6, 3)], [None] * 3) for one in one])
    assert held.reshape(-1).sum() == 4 + 3
    found = roles([(7, 4), (8, 4), (6, 3)], [None] * 3)
    assert [(one == HELD_OUT).any(-1).nonzero().flatten().tolist() for one in found] == [[], [2], [4]]


def test_the_last_tenth_of_few_sequences_is_held_out():
    mask = torch.ones(2, 25, dtype=torch.bool)
    mask[0, :4] = False
    (found,) = roles([(2, 25)], [mask])
    assert (found[0] == PADDING).nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert (found[0] == HELD_OUT).nonzero().flatten().tolist() == [23, 24]
    assert (found[1] == HELD_OUT).nonzero().flatten().tolist() == [23, 24]
    assert (found == TRAIN).sum() == 19 + 23


def test_rows_of_a_matrix_are_sequences():
    (found,) = roles([(25,)], [None])
    assert (found == HELD_OUT).nonzero().flatten().tolist() == [9, 19]


@pytest.mark.parametrize(
    ("value", "counted"),
    [
        (torch.tensor([[1, 1, 0]]), [[True, True, False]]),
        (torch.ones(1, 3, dtype=torch.int64), None),  # nothing is padding
        (torch.zeros(1, 1, 3, 3), None),  # added to scores
        (None, None),
    ],
)
def test_masks_of_batches(value, counted):
    found = mask_of(((), {"attention_mask": value}))
    assert (None if found is None else found.tolist()) == counted
    assert mask_of(((torch.ones(1, 3),), {})) is None


class Model(nn.Module):
    """Its block sees tokens as they are; inner layers see them flattened, or some of them."""

    def __init__(self):
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x, attention_mask=None):
        return self.block(x)


def tokens_of(*batches):
    model = Model()
    with calibrating(model):
        return Tokens.of(captured(model, batches, {"block": model.block}))


def test_inputs_are_matched_with_tokens():
    mask = torch.ones(2, 10, dtype=torch.int64)
    mask[1, 6:] = 0
    x = torch.randn(2, 10, 8)
    tokens = tokens_of({"x": x, "attention_mask": mask})
    assert tokens.counted == 16
    train, held, unmatched = tokens.split(x)
    assert not unmatched
    assert torch.equal(held, x[0, 9:])
    assert torch.equal(train, torch.cat([x[0, :9], x[1, :6]]))
    with Waits() as waits:
        assert torch.equal(tokens.split(x.reshape(20, 8))[0], train)
    # Whose places the host knows: it does not wait for a device to count them.
    assert not waits.counts["index"]
    some = tokens.split(x[0, 3:6])  # as an expert sees them
    assert [len(some.train), len(some.held_out), some.unmatched] == [3, 0, True]


def test_inputs_of_whole_sequences_are_matched_by_these():
    """As vision models have them that cut images into windows."""
    tokens = tokens_of(torch.randn(20, 4, 8))
    rows, held, unmatched = tokens.split(torch.randn(20, 6, 8))
    assert (len(rows), len(held)) == (18 * 6, 2 * 6)
    assert not unmatched


def test_a_batch_of_one_sequence_is_of_one_kind():
    batches = [torch.randn(1, 4, 8) for _ in range(10)]
    tokens = tokens_of(*batches)
    for number, x in enumerate(batches):
        tokens.capture.running = number
        rows = tokens.split(x)
        assert [len(rows.train), len(rows.held_out)] == ([0, 4] if number == 9 else [4, 0])
    assert tokens.split(torch.randn(3, 8)).unmatched  # of the held-out one, as an expert sees them


def test_padding_changes_no_bit_of_moments():
    torch.manual_seed(0)
    x = torch.randn(12, 10, 8)
    mask = torch.zeros(12, 16, dtype=torch.int64)
    mask[:, 3:13] = 1
    padded = torch.full((12, 16, 8), 7.0)
    padded[:, 3:13] = x
    found = []
    for batch, shown in (({"x": x}, x), ({"x": padded, "attention_mask": mask}, padded)):
        moments = SplitMoments(None, tokens_of(batch))
        moments.update(shown)
        found.append(moments)
    for one, other in zip(
        (found[0].train, found[0].held_out), (found[1].train, found[1].held_out), strict=True
    ):
        assert one.count == other.count > 0
        for name in ("hessian", "mean", "mean_magnitude", "largest"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


def test_moments():
    x = torch.randn(3, 7, 5)
    moments = Moments()
    with pytest.raises(ValueError, match="no token was seen"):
        _ = moments.hessian
    for one in x:
        moments.update(one)
    rows = x.reshape(-1, 5).double()
    assert moments.count == 21
    assert torch.allclose(moments.hessian, rows.T @ rows / 21, rtol=1e-12, atol=1e-12)
    assert torch.allclose(moments.mean, rows.mean(0), rtol=1e-12, atol=1e-12)
    assert torch.allclose(moments.mean_magnitude, rows.abs().mean(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(moments.largest, rows.abs().amax(0))
