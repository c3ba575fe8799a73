"""A model for tests of quantization-aware training, and what its layers multiply."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch import nn

from ao_lab import QATConfig, quantize_
from tests.ao_lab.config.test_every_config import TOKENS, Net


def everything(module, name):
    return isinstance(module, (nn.Linear, nn.Embedding))


def linears(module, name):
    return isinstance(module, nn.Linear)


def in_training(config, dtype=torch.float32, filter_fn=linears, **options):
    """A model prepared for a configuration; static scales that are not given are found with data."""
    net = Net(dtype)
    loop = (lambda model: model(TOKENS)) if config.observer() is not None else None
    quantize_(net, QATConfig(config, step="prepare", **options), filter_fn, forward_loop=loop)
    return net


def steps(net, count=2):
    """Some steps of training, so that weights are none that were rounded before."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(count):
        optimizer.zero_grad()
        net(TOKENS).float().square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


@contextmanager
def multiplied():
    """The operands of every F.linear inside, in order."""
    found, linear = [], nn.functional.linear

    def spy(x, weight, bias=None):
        found.append((x.detach().clone(), weight.detach().clone()))
        return linear(x, weight, bias)

    with mock.patch.object(nn.functional, "linear", spy):
        yield found


def same(a, b):
    """Bit for bit; both None too."""
    if a is None or b is None:
        return a is b
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
