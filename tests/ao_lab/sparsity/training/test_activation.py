"""Sparse squared ReLU: the reference's values, and a gradient that its mask is a constant of."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import reference
from ao_lab import SparseSquaredReLU, SparseTrainingConfig, sparse_squared_relu, sparsify_, step_sparsity_
from ao_lab.sparsity.training.layers import squared_relu_24_op
from tests.support.models.qat_models import same

#: Dynamo's own warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (0.0, -0.0, 1e-40, -1e-40, 2e-4, 3e38, -3e38, 60000.0, float("inf"), float("-inf"), float("nan"))


def values(dtype):
    """Normal numbers, groups with ties, and special values."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(64, 16, generator=random)
    x[32:] = (x[32:] * 2).round()
    special = torch.tensor(SPECIAL)
    x[:16] = special[torch.randint(0, len(special), (16, 16), generator=random)]
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_the_references(dtype):
    x = values(dtype)
    assert same(sparse_squared_relu(x), reference.squared_relu_24(x).values)
    assert same(
        SparseSquaredReLU()(x.reshape(4, 16, 16)).reshape(64, 16), reference.squared_relu_24(x).values
    )


def test_the_gradient_is_that_of_torch_where_the_mask_is_constant():
    """2 x g in float32, whose factor 2 rounds nothing."""
    x = values(torch.float32)[16:].requires_grad_()
    mask = torch.as_tensor(reference.squared_relu_24(x.detach()).mask)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.where(mask, x, 0).relu().square()
    (expected,) = torch.autograd.grad(theirs, x, g)
    (made,) = torch.autograd.grad(sparse_squared_relu(x), x, g)
    assert torch.equal(made, expected)
    assert (made != 0).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradients_rounding(dtype):
    """u(g x) in float32, doubled, then once to the dtype; +0 elsewhere."""
    x = values(dtype).requires_grad_()
    g = values(dtype).flip(1)
    (made,) = torch.autograd.grad(sparse_squared_relu(x), x, g)
    mask = torch.as_tensor(reference.squared_relu_24(x.detach()).mask)
    with np.errstate(all="ignore"):
        product = g.float().numpy() * x.detach().float().numpy() * np.float32(2)
    expected = torch.from_numpy(product).to(dtype)
    passes = mask & ((x.detach() > 0) | x.detach().isnan())
    nan = passes & expected.isnan()
    assert torch.equal(made.isnan(), nan)
    assert same(made[~nan], torch.where(passes, expected, torch.zeros((), dtype=dtype))[~nan])


def test_finite_numbers_give_no_nan():
    x = torch.tensor([[3e38, 2e38, 1e38, -3e38]]).requires_grad_()
    (made,) = torch.autograd.grad(sparse_squared_relu(x), x, torch.tensor([[0.0, 3e38, 1.0, 1.0]]))
    assert made.tolist() == [[0.0, float("inf"), 0.0, 0.0]]


def test_only_the_input_is_kept():
    x, kept = values(torch.float32).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        sparse_squared_relu(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_at_most_two_of_four():
    made = sparse_squared_relu(values(torch.bfloat16))
    assert int((made != 0).reshape(-1, 4).sum(-1).max()) == 2


def test_in_a_network():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), SparseSquaredReLU(), nn.Linear(16, 4))
    net(torch.randn(4, 8)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="multiple of 4"):
        sparse_squared_relu(torch.ones(2, 6))
    with pytest.raises(TypeError, match="float64"):
        sparse_squared_relu(torch.ones(2, 8, dtype=torch.float64))


def test_the_operator():
    torch.library.opcheck(
        squared_relu_24_op, (torch.randn(4, 8),), test_utils=("test_schema", "test_faketensor")
    )


# Sparse layers under torch.compile, export and activation checkpointing.


CONFIGS = (
    SparseTrainingConfig(),
    SparseTrainingConfig(masks="recomputed", gradient="sr-ste", decay=0.3),
    SparseTrainingConfig(masks="recomputed", gradient="straight-through", transposable=True),
)
X = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))


def net_of(config, activation=nn.ReLU):
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
    net = net_of(config)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        pairs = zip(gradients(net, compiled), gradients(net, net), strict=True)
    assert all(same(ours, theirs) for ours, theirs in pairs)
    torch.compiler.reset()


@pytest.mark.nightly  # the same program by another compiler, which takes 15 seconds for it
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_inductor():
    """Sums of integers: exact in any order, so that its products have the bits of torch's."""
    net = net_of(SparseTrainingConfig(masks="recomputed", gradient="sr-ste", decay=0.25))
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
    net = net_of(SparseTrainingConfig(masks="recomputed", warmup=1, cooldown=1, steps=4))
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
    net = net_of(CONFIGS[1]).eval()
    program = torch.export.export(net, (X,))
    assert torch.equal(program.module()(X), net(X))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_checkpointing(config):
    net = net_of(config)
    again = gradients(net, lambda x: checkpoint(net, x, use_reentrant=False))
    assert all(same(a, b) for a, b in zip(gradients(net, net), again, strict=True))


def test_activations():
    net = net_of(CONFIGS[0], SparseSquaredReLU)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert all(same(a, b) for a, b in zip(gradients(net, compiled), gradients(net, net), strict=True))
    torch.compiler.reset()
