"""Steps that were not counted are found in the next one, before it changes anything."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

from ao_lab import SparseTrainingConfig, finish_sparsity_, sparsify_, step_sparsity_
from ao_lab.sparsity.training import layers

pytestmark = pytest.mark.usefixtures("few_objects")

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8))
    sparsify_(net, SparseTrainingConfig(masks="recomputed"))
    return net


def step(net, optimizer, run=None):
    optimizer.zero_grad()
    (run or net)(X).square().sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_every_optimizer(kind, how, compiled):
    net = model()
    optimizer = kind(net.parameters(), lr=0.01, **how)
    run = torch.compile(net, fullgraph=True, backend="aot_eager") if compiled else net
    step(net, optimizer, run)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(
        RuntimeError, match=r"step\(\) was called twice without ao_lab.step_sparsity_\(model\)"
    ):
        step(net, optimizer, run)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), before, strict=True))
    assert step_sparsity_(net).step == 1
    step(net, optimizer, run)
    torch.compiler.reset()


def test_other_models_and_frozen_weights():
    """Optimizers that hold other weights, or weights without gradients, step as they like."""
    net, other = model(), nn.Linear(16, 8)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, other))
    step(net, optimizer)
    for _ in range(2):
        step(other, theirs)
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_have_their_own_count(copied):
    net = model()
    step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    other = copied(net)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    step(other, optimizer)
    with pytest.raises(RuntimeError, match="called twice"):
        step(other, optimizer)


def test_finished_and_forgotten_models():
    gc.collect()
    watched = len(layers._watched)
    net = model()
    assert len(layers._watched) == watched + 2
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    finish_sparsity_(net)
    step(net, optimizer)
    assert len(layers._watched) == watched
    net = model()
    del net
    gc.collect()
    assert len(layers._watched) == watched


def test_loading_settles():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    net.load_state_dict(model().state_dict())
    step(net, optimizer)
