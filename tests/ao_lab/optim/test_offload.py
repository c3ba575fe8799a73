"""The offloading optimizer without a GPU: the steps, states and errors of the one inside."""

import copy

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
