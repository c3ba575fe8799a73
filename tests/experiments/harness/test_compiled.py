"""Rows are called compiled where a compiled program runs."""

import pytest
import torch
from torch import nn

from experiments.harness.compiled import compiled_runs
from experiments.harness.outcome import Wrong


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).relu()


def run(net):
    net.compile(backend="eager")
    x = torch.ones(2, 8)
    net(x)
    with compiled_runs():
        net(x)


def test_a_program_of_another_model_is_one():
    torch.compiler.reset()
    run(Layer())
    run(Layer())


def test_what_runs_as_it_is_is_no_row():
    """torch's own containers run operation by operation, without a word."""
    torch.compiler.reset()
    with pytest.raises(Wrong, match="nothing was compiled"):
        run(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    with compiled_runs(wanted=False):
        nn.Linear(8, 8)(torch.ones(2, 8))
