"""Layers that train sparse: hooks, names, saved training, checkpoints of dense models."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import reference
from ao_lab import SparseTrainingConfig, finish_sparsity_, sparsify_, step_sparsity_

CONFIGS = (
    SparseTrainingConfig(),
    SparseTrainingConfig(warmup=2),
    SparseTrainingConfig(masks="recomputed", every=3, gradient="sr-ste", decay=0.1),
    SparseTrainingConfig(masks="recomputed", transposable=True, warmup=1, cooldown=2, steps=5),
)


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def sparse(config, seed=0):
    net = model(seed)
    sparsify_(net, config)
    return net


def train(net, optimizer, steps):
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        net(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step_sparsity_(net)


def adam(net):
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


def saved(*things):
    """What a file gives back."""
    file = io.BytesIO()
    torch.save([thing.state_dict() for thing in things], file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(a, b):
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(m == n and torch.equal(x, y) for (m, x), (n, y) in pairs)


def test_parameters_names_and_hooks_stay():
    net = model()
    weight, seen = net[0].weight, []
    net[0].register_forward_hook(lambda *_: seen.append(1))
    optimizer = adam(net)
    sparsify_(net, CONFIGS[0])
    train(net, optimizer, range(2))
    assert net[0].weight is weight
    assert isinstance(net[0], nn.Linear)
    assert [name for name, _ in net.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    finish_sparsity_(net)
    assert net[0].weight is weight
    assert list(net.state_dict()) == list(model().state_dict())
    net(torch.randn(1, 16))
    assert len(seen) == 3
    assert set(vars(net[0])) == set(vars(model()[0]))


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_training_goes_on_where_it_was_saved(config, at):
    whole = sparse(config)
    train(whole, adam(whole), range(6))
    first = sparse(config)
    optimizer = adam(first)
    train(first, optimizer, range(at))
    weights, moments = saved(first, optimizer)
    other = sparse(config, seed=1)
    assert other.load_state_dict(weights, strict=True) == ([], [])
    assert equal(other, first)
    resumed = adam(other)
    resumed.load_state_dict(moments)
    train(other, resumed, range(at, 6))
    assert equal(other, whole)
    assert other[0].sparse_rule == whole[0].sparse_rule


@pytest.mark.parametrize("assign", [False, True])
def test_assigned_tensors(assign):
    config = SparseTrainingConfig(masks="recomputed", every=2)
    a, b = sparse(config), sparse(config, seed=1)
    train(a, adam(a), range(1))
    b.load_state_dict(saved(a)[0], assign=assign)
    train(a, adam(a), range(3))
    train(b, adam(b), range(3))
    assert equal(a, b)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_dense_checkpoints_load_strictly(config):
    """Masks are found again from what was loaded; the count of steps stays."""
    net, dense = sparse(config), model(seed=1)
    train(net, adam(net), range(2))
    assert net.load_state_dict(dense.state_dict(), strict=True) == ([], [])
    assert int(net[0].sparse_step) == 2
    find = reference.prune_transposable if config.transposable else reference.prune
    mask = torch.as_tensor(find(dense[0].weight.detach()))
    assert torch.equal(net[0].sparse_mask, mask)
    expected = dense[0].weight
    if config.masks == "fixed":
        expected = torch.where(mask, expected, 0)
    assert torch.equal(net[0].weight, expected)


def test_dense_checkpoints_during_warm_up():
    net = sparse(SparseTrainingConfig(warmup=2))
    net.load_state_dict(model(seed=1).state_dict())
    assert net[0].sparse_mask.all()
    assert torch.equal(net[0].weight, model(seed=1)[0].weight)


def test_other_missing_keys_are_errors():
    net = sparse(CONFIGS[0])
    state = model().state_dict()
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"\.'):
        net.load_state_dict(state)
    with pytest.raises(RuntimeError, match="sparse_mask"):
        model().load_state_dict(net.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies(copied):
    net = sparse(SparseTrainingConfig(masks="recomputed"))
    other = copied(net)
    train(net, adam(net), range(2))
    train(other, adam(other), range(2))
    assert equal(net, other)


@pytest.mark.parametrize("apart", [False, True])
def test_layers_that_share_a_weight(apart):
    """One mask, one count, also where a file gave each its own, in the same memory or not."""

    def tied():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        net[1].weight = net[0].weight
        sparsify_(net, SparseTrainingConfig(masks="recomputed", every=2))
        return net

    net, other = tied(), tied()
    train(net, adam(net), range(2))
    assert int(net[0].sparse_step) == 2
    assert torch.equal(net[0].sparse_mask, torch.as_tensor(reference.prune(net[0].weight.detach())))
    state = saved(net)[0]
    other.load_state_dict({k: v.clone() for k, v in state.items()} if apart else state, assign=True)
    other[1].weight = other[0].weight
    assert other[0].sparse_mask is not other[1].sparse_mask
    assert (other[0].sparse_mask.data_ptr() != other[1].sparse_mask.data_ptr()) == apart
    before = net[0].sparse_mask.clone()
    train(net, torch.optim.SGD(net.parameters(), lr=0.05), range(2))
    train(other, torch.optim.SGD(other.parameters(), lr=0.05), range(2))
    assert not torch.equal(net[0].sparse_mask, before)
    assert equal(net, other)
    finish_sparsity_(net)
    assert net[0].weight is net[1].weight


def test_a_model_in_another_dtype_keeps_its_mask():
    net = sparse(CONFIGS[0]).to(torch.bfloat16)
    assert net[0].sparse_mask.dtype == torch.bool
    net(torch.randn(2, 16, dtype=torch.bfloat16)).sum().backward()


def test_accumulated_gradients():
    """They are those of a leaf that is masked already, added up in the same order; one step, however many batches."""
    net = sparse(SparseTrainingConfig(masks="recomputed", gradient="straight-through"))
    dense = model()
    with torch.no_grad():
        for ours, theirs in ((net[0], dense[0]), (net[2], dense[2])):
            theirs.weight.copy_(torch.where(ours.sparse_mask, ours.weight, 0))
    for part in torch.randn(32, 16).split(4):
        net(part).square().sum().backward()
        dense(part).square().sum().backward()
    for ours, theirs in zip(net.parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    assert step_sparsity_(net).step == 1


def test_description():
    assert repr(sparse(CONFIGS[0])[0]) == (
        "SparseLinear(in_features=16, out_features=32, bias=True, 2:4, masks fixed, gradient masked)"
    )
