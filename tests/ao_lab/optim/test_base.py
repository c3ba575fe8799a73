"""Optimizers in a training loop: they learn, resume bit for bit, and refuse what does not fit before anything has changed."""

import copy

import pytest
import torch

from ao_lab.optim import Adam8bit, AdamW4bit, AdamW8bit, AdamWFp8, Lion8bit

CLASSES = (AdamW8bit, AdamW4bit, AdamWFp8, Adam8bit, Lion8bit)


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))


def trained(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, 96, generator=generator)
        loss = (model(x) - x[:, :64].roll(1, -1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", CLASSES)
def test_a_loss_falls(kind):
    model = model_of()
    losses = trained(model, kind(model.parameters(), lr=3e-3 if kind is not Lion8bit else 1e-3), 40)
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("kind", CLASSES)
def test_a_resumed_run_has_the_same_bits(kind):
    """Codes come back as they are: the states of the eighth step lead to the same parameters."""
    model = model_of()
    optimizer = kind(model.parameters(), lr=1e-3)
    trained(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    trained(model, optimizer, 4, 4)
    again = model_of(1)
    again.load_state_dict(saved[0])
    resumed = kind(again.parameters(), lr=1e-3)
    resumed.load_state_dict(saved[1])
    trained(again, resumed, 4, 4)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
