"""What a step on a sample writes to a model is put back, whatever holds it."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import ao_lab
from ao_lab.gemm import choices
from ao_lab.tuning.samples import untouched


class Writes(nn.Module):
    """Buffers, a codebook of moving averages, caches and counters that a forward writes to."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.register_buffer("codebook", torch.ones(4))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("late", None)
        self.generator = torch.Generator().manual_seed(3)
        self.cache, self.calls, self.last, self.by_name = [torch.zeros(2)], 0, None, {"a": torch.ones(1)}

    def forward(self, x):
        with torch.no_grad():
            self.codebook.mul_(0.5)
            self.cache[0].add_(1)
        self.replaced, self.late, self.last = self.replaced + 1, torch.ones(1), x.detach()
        self.cache.append(x.detach())
        self.by_name["b"], self.made = x, torch.ones(3)
        self.calls += 1
        torch.rand(1, generator=self.generator)
        np.random.rand(random.randrange(1, 3))  # noqa: NPY002
        return self.linear(self.norm(x))


def state(module):
    return {
        **module.state_dict(), "cache": list(module.cache), "calls": module.calls, "last": module.last, "late": module.late,
        "by_name": dict(module.by_name), "made": getattr(module, "made", None), "drawn": module.generator.get_state(),
        "random": random.getstate(), "torch": torch.get_rng_state(), "numpy": np.random.get_state()[1],  # noqa: NPY002
        "modes": [m.training for m in module.modules()],
    }  # fmt: skip


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert np.array_equal(one, other)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setenv("AO_LAB_CACHE", str(tmp_path))
    monkeypatch.setattr("ao_lab.tuning.measure.SECONDS", 0.0)
    choices.forget()
    yield
    choices.forget()


def test_tuning_leaves_no_state():
    model = Writes()
    ao_lab.convert_for_training_(model, "rowwise")
    x = torch.randn(40, 64, requires_grad=True)
    model(x.detach())
    held, buffers = {name: id(b) for name, b in model.named_buffers()}, model.cache[0]
    before = copy.deepcopy(state(model))

    def run(model):
        model.eval()
        model.train()
        model.norm.eval()
        return model(x).square().mean()

    for sample in (run, x, (x,), {"x": x}):
        ao_lab.tune(model, sample)
        assert_same(state(model), before)
    assert {name: id(b) for name, b in model.named_buffers()} == held
    assert model.cache[0] is buffers
    assert all(p.grad is None for p in model.parameters())


def test_gradients_of_the_sample_are_as_they_were():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    for given, call in ((x, layer), ((x,), lambda t: layer(*t)), ({"input": x}, lambda t: layer(**t))):
        with untouched(layer, given):
            call(given).sum().backward()
        assert x.grad is None
    x.grad = torch.ones(2, 4)
    with untouched(layer, x):
        x.grad = None
    assert torch.equal(x.grad, torch.ones(2, 4))


def test_optimizers_inside_of_backward_do_not_step():
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)

    def step(parameter):
        optimizer.step()
        parameter.grad = None

    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    weight = layer.weight.detach().clone()
    with untouched(layer):
        layer(torch.ones(2, 4)).sum().backward()
    assert torch.equal(layer.weight, weight)
    layer(torch.ones(2, 4)).sum().backward()
    assert not torch.equal(layer.weight, weight)


def test_parameters_that_are_written_to_are_told_of():
    layer = nn.Linear(4, 4)

    def write():
        with untouched(layer):
            layer.bias.detach().add_(1)

    with pytest.warns(UserWarning, match=r"wrote to 1 parameters, which tune does not put back: bias;"):
        write()


def test_all_comes_back_after_an_error():
    model = Writes()
    before = copy.deepcopy(state(model))

    def fail():
        with untouched(model):
            model(torch.randn(3, 64))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_same(state(model), before)
