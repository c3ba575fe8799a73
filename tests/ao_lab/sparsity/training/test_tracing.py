"""Sparse layers under torch.compile, export and activation checkpointing."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from ao_lab import SparseSquaredReLU, SparseTrainingConfig, sparsify_, step_sparsity_
from tests.support.models.qat_models import same

CONFIGS = (
    SparseTrainingConfig(),
    SparseTrainingConfig(masks="recomputed", gradient="sr-ste", decay=0.3),
    SparseTrainingConfig(masks="recomputed", gradient="straight-through", transposable=True),
)
#: Dynamo's own warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))


def model(config, activation=nn.ReLU):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), activation(), nn.Linear(32, 8))
    sparsify_(net, config)
    return net


def gradients(net, run):
    net.zero_grad()
    x = X.clone().requires_grad_()
    y = run(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_compiled_whole(config, autocast):
    net = model(config)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pairs = zip(gradients(net, compiled), gradients(net, net), strict=True)
    assert all(same(ours, theirs) for ours, theirs in pairs)
    torch.compiler.reset()


@pytest.mark.nightly  # the same program by another compiler, which takes 15 seconds for it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor():
    """Sums of integers: exact in any order, so that its products have the bits of torch's."""
    net = model(SparseTrainingConfig(masks="recomputed", gradient="sr-ste", decay=0.25))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_((parameter * 20).round())
    step_sparsity_(net)
    compiled = torch.compile(net, fullgraph=True)
    x = (X * 2).round()
    for run in (compiled, net):
        run(x).sum().backward()
        found = [parameter.grad.clone() for parameter in net.parameters()]
        net.zero_grad()
        if run is compiled:
            first = found
    assert all(same(a, b) for a, b in zip(first, found, strict=True))
    torch.compiler.reset()


def test_steps_and_new_masks_are_one_program():
    torch.compiler.reset()
    net = model(SparseTrainingConfig(masks="recomputed", warmup=1, cooldown=1, steps=4))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    before = counters["stats"]["unique_graphs"]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        assert torch.equal(compiled(X), net(X))
        compiled(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step_sparsity_(net)
    assert counters["stats"]["unique_graphs"] - before == 1
    torch.compiler.reset()


def test_exported():
    net = model(CONFIGS[1]).eval()
    program = torch.export.export(net, (X,))
    assert torch.equal(program.module()(X), net(X))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_checkpointing(config):
    net = model(config)
    again = gradients(net, lambda x: checkpoint(net, x, use_reentrant=False))
    assert all(same(a, b) for a, b in zip(gradients(net, net), again, strict=True))


def test_activations():
    net = model(CONFIGS[0], SparseSquaredReLU)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert all(same(a, b) for a, b in zip(gradients(net, compiled), gradients(net, net), strict=True))
    torch.compiler.reset()
