"""Rows are called compiled where something was."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.fp8_training import blocks
from experiments.harness.cuda_graph import compiled_runs
from experiments.harness.measuring import Wrong


def layer():
    torch.compiler.reset()
    return nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))


def step(net):
    net.compile(backend="aot_eager")
    x = torch.randn(2, 8, requires_grad=True)
    net(x).sum().backward()
    with compiled_runs():
        net(x).sum().backward()


def test_a_step_that_is_not_compiled_is_no_row():
    """A forward that is a `functools.partial` runs operation by operation, without a word."""
    net = layer()
    net.forward = partial(checkpoint, net.forward, use_reentrant=False)
    with pytest.raises(Wrong, match="nothing was compiled"):
        step(net)


@pytest.mark.parametrize("kind", [blocks.PER_OP, pytest.param(blocks.FULL, marks=pytest.mark.nightly)])
def test_checkpointed_layers_are_compiled(kind):
    net = layer()
    blocks.apply([net], kind)
    step(net)
