"""The offloading optimizer without a GPU: the steps, states and errors of the one inside, and what it copies when."""

import copy
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from ao_lab.optim import AdamW8bit, CPUOffloadOptimizer
from tests.ao_lab.optim.test_base import by_reference, model_of, same, trained

__all__ = ["by_reference"]


def test_it_steps_as_the_one_inside():
    model = model_of()
    other = copy.deepcopy(model)
    optimizer = CPUOffloadOptimizer(model.parameters(), AdamW8bit, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    plain = AdamW8bit(other.parameters(), lr=1e-2)
    trained(model, optimizer, 3)
    trained(other, plain, 3)
    assert same(model, other)
    plain.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


def test_frozen_parameters_are_left_out_and_errors_come_through():
    model = model_of()
    model[0].weight.requires_grad_(False)
    optimizer = CPUOffloadOptimizer([{"params": model.parameters(), "lr": 0.1}])
    assert len(optimizer.param_groups[0]["params"]) == 3
    with pytest.raises(ValueError, match="empty parameter list"):
        CPUOffloadOptimizer([])
    before = copy.deepcopy(model.state_dict())
    model(torch.randn(2, 96)).sum().backward()
    model[2].bias.grad[0] = float("nan")
    with pytest.raises(ValueError, match="nothing was changed"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Stream:
    """A stream of a GPU whose work is done at once."""

    def __init__(self, device=None):
        self.device = device

    def wait_stream(self, other):
        pass

    def record_event(self):
        return SimpleNamespace(synchronize=lambda: None)


@pytest.fixture
def pair(monkeypatch):
    """A model whose parameters of 4096 elements and more are stepped on copies, as those on a GPU are, and one like it."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory=False, **options: empty_like(x, **options))
    for name, value in {"Stream": Stream, "stream": nullcontext, "current_stream": Stream}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(CPUOffloadOptimizer, "_goes", lambda self, p: p.numel() >= self.minimal_size)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda grad, stream: None)
    model = model_of()
    other = copy.deepcopy(model)
    return model, other, AdamW8bit(other.parameters(), lr=1e-2)


def backward(*models, factor=1.0):
    for model in models:
        (factor * model(torch.ones(4, 96)).square().mean()).backward()


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_copies_step_as_parameters_do(pair, offload_gradients):
    model, other, plain = pair
    optimizer = CPUOffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=offload_gradients)
    assert len(optimizer.copies) == 2
    trained(model, optimizer, 3)
    trained(other, plain, 3)
    assert same(model, other)


def clipped(model):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def accumulated(model):
    backward(model)


def replaced(model):
    model[0].weight.grad = torch.ones_like(model[0].weight)


def dropped(model):
    model[0].weight.grad = None


@pytest.mark.parametrize(
    "change", [clipped, accumulated, replaced, dropped], ids=lambda change: change.__name__
)
def test_a_step_takes_gradients_as_they_are(pair, change):
    """Also those that were changed after backward had copied them."""
    model, other, plain = pair
    optimizer = CPUOffloadOptimizer(model.parameters(), lr=1e-2)
    backward(model, other)
    for one in (model, other):
        change(one)
    optimizer.step()
    plain.step()
    assert same(model, other)


@pytest.mark.parametrize("offload_gradients", [False, True])
def test_gradients_that_were_zeroed_are_not_stepped(pair, offload_gradients):
    """A batch that the loop skips: nothing of it is left for the next step."""
    model, other, _ = pair
    optimizer = CPUOffloadOptimizer(model.parameters(), lr=1e-2, offload_gradients=offload_gradients)
    backward(model)
    optimizer.zero_grad()
    optimizer.step()
    assert same(model, other)
