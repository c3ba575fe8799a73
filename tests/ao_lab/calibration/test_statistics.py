"""Sums over inputs: the reference's square sums bit for bit, Hessians, and layers that share one."""

import pytest
import torch
from torch import nn

import reference
from ao_lab.calibration.statistics import PIECE, Hessian, SquareSums, Statistics, square_sums
from ao_lab.transforms.hooks import watching


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3), (7, 5), (2, 6, 4), (0, 4), (2 * PIECE + 3, 2)])
def test_square_sums_are_those_of_the_reference(shape, dtype):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)
    assert torch.equal(square_sums(x), reference.square_sums(x))


def test_square_sums_of_extremes():
    x = torch.tensor([[1e-23, 3e38, 1e-38, 0.0], [3e-23, 3e38, -1e-38, -0.0], [2e-23, 1.0, 1.0, 0.0]])
    found = square_sums(x)
    assert torch.equal(found, reference.square_sums(x))
    assert 0 < found[0] < 2.0**-126
    assert found[1] == torch.inf


def test_calls_are_added_in_their_order():
    torch.manual_seed(0)
    sums, before = SquareSums(), None
    for x in torch.randn(5, 3, 8) * 10:
        sums.update(x)
        before = reference.square_sums(x, before)
    assert torch.equal(sums.value, before)


def test_a_hessian_is_the_sum_of_outer_products():
    torch.manual_seed(0)
    x = torch.randn(3, 40, 8, dtype=torch.bfloat16)
    hessian = Hessian()
    for batch in x:
        hessian.update(batch)
    rows = x.reshape(-1, 8).double()
    assert hessian.value.dtype == torch.float64
    torch.testing.assert_close(hessian.value, rows.T @ rows, rtol=1e-14, atol=1e-14 * 120)


class Block(nn.Module):
    """q and k with one input, o with another, and one with a copy of the first."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o, self.other = (nn.Linear(8, 8) for _ in range(4))
        self.copies = False

    def forward(self, x):
        q, k = self.q(x), self.k(x.clone() if self.copies else x)
        return self.o(q * k) + self.other(x.clone())


def statistics_of(block, batches, make=SquareSums):
    found = Statistics(make)
    with torch.no_grad(), watching((name, module, found) for name, module in block.named_children()):
        for x in batches:
            block(x)
    return found


def test_layers_with_one_input_share_a_statistic():
    torch.manual_seed(0)
    block, batches = Block(), torch.randn(3, 5, 8)
    found = statistics_of(block, batches)
    assert found.layers["q"] is found.layers["k"]
    assert len({id(shared) for shared in found.layers.values()}) == 3
    before = None
    for x in batches:
        before = reference.square_sums(x, before)
    for name in ("q", "k", "other"):
        assert torch.equal(found.layers[name].statistic.value, before)
        assert found.layers[name].tokens == 15
    assert not torch.equal(found.layers["o"].statistic.value, before)
    found.forget_inputs()
    assert all(shared.last is None for shared in found.layers.values())


def test_an_input_that_was_written_to_is_another_one():
    block, found, x = Block(), Statistics(SquareSums), torch.ones(2, 8)
    with torch.no_grad(), watching([("q", block.q, found), ("k", block.k, found)]):
        block.q(x)
        x.mul_(2)
        block.k(x)
    assert torch.equal(found.layers["q"].statistic.value, torch.full((8,), 2.0))
    assert torch.equal(found.layers["k"].statistic.value, torch.full((8,), 8.0))


def test_layers_that_stop_sharing_are_an_error():
    block = Block()
    found = statistics_of(block, torch.randn(1, 5, 8))
    block.copies = True
    said = "k had the input of q at first and has another one now"
    layers = list(block.named_children())
    with watching((name, module, found) for name, module in layers), pytest.raises(ValueError, match=said):
        block(torch.randn(5, 8))


def test_layers_that_are_seen_late_do_not_share_what_they_have_missed():
    """An expert that the first batch does not reach has the inputs of later ones alone."""
    block, found = Block(), Statistics(SquareSums)
    with torch.no_grad(), watching([("q", block.q, found), ("k", block.k, found)]):
        block.q(torch.ones(2, 8))
        x = torch.full((2, 8), 2.0)
        block.q(x)
        block.k(x)
    assert torch.equal(found.layers["q"].statistic.value, torch.full((8,), 10.0))
    assert torch.equal(found.layers["k"].statistic.value, torch.full((8,), 8.0))


def test_a_name_of_two_layers_sums_both():
    block, found, x = Block(), Statistics(SquareSums), torch.ones(2, 8)
    with watching([("tied", block.q, found), ("tied", block.k, found)]):
        block.q(x)
        block.k(x)
    assert torch.equal(found.layers["tied"].statistic.value, torch.full((8,), 4.0))


def test_layers_that_skip_an_input_of_others_are_an_error():
    """The sums that they share hold what only one of them has seen."""
    block, found = Block(), Statistics(SquareSums)
    with torch.no_grad(), watching([("q", block.q, found), ("k", block.k, found)]):
        for reached in (True, False):
            x = torch.randn(2, 8)
            block.q(x)
            if reached:
                block.k(x)
        block.q(x := torch.randn(2, 8))
        with pytest.raises(ValueError, match="k had the input of q at first"):
            block.k(x)


@pytest.mark.parametrize("statistic", [SquareSums, Hessian])
def test_sums_that_are_of_no_use(statistic):
    """NaN, infinity, and more than float32 holds, each in one channel."""
    for value, usable in ((torch.nan, False), (torch.inf, False), (1.5e19, False), (1e19, True)):
        statistics, x = Statistics(statistic), torch.ones(2, 4)
        assert statistic().is_usable()
        x[:, 2] = value
        for name, given in (("good", torch.ones(2, 4)), ("bad", x), ("too", x)):
            statistics.observe(name, nn.Linear(4, 4), given)
        assert statistics.unusable() == ([] if usable else ["bad", "too"])
