"""Layers that train by a recipe under torch.func: the gradients of autograd, each example of vmap with scales of its own."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import ao_lab
from reference.training import RECIPES


def layer(name, inputs=64):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(inputs, 32))
    ao_lab.convert_for_training_(net, name, pad=True)
    return net, dict(net.named_parameters())


def loss(net):
    return lambda parameters, x: functional_call(net, parameters, (x,)).square().mean()


def by_autograd(net, x):
    net.zero_grad()
    net(x).square().mean().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    "name",
    ["rowwise", *(pytest.param(one, marks=pytest.mark.nightly) for one in RECIPES if one != "rowwise")],
)
def test_gradients_are_those_of_autograd(name):
    """Of parameters and of inputs, padded and not; under one seed the same random bits."""
    for inputs in (64, 40):
        net, parameters = layer(name, inputs)
        x = torch.randn(32, inputs)
        torch.manual_seed(1)
        found = torch.func.grad(loss(net))(parameters, x)
        torch.manual_seed(1)
        for key, truth in by_autograd(net, x).items():
            torch.testing.assert_close(found[key], truth)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        net(leaf).square().mean().backward()
        torch.manual_seed(1)
        torch.testing.assert_close(torch.func.grad(loss(net), 1)(parameters, x), leaf.grad)


@pytest.mark.parametrize("name", ["tensorwise", pytest.param("blockwise", marks=pytest.mark.nightly)])
def test_each_example_has_scales_of_its_own(name):
    """Outputs and gradients of vmap are those of a loop, whatever else is in the batch."""
    net, parameters = layer(name)
    x = torch.randn(3, 32, 64) * torch.tensor([1e-3, 1, 1e3])[:, None, None]
    assert torch.equal(torch.vmap(net)(x), torch.stack([net(one) for one in x]))
    found = torch.vmap(torch.func.grad(loss(net)), (None, 0))(parameters, x)
    for at in range(3):
        for key, truth in by_autograd(net, x[at]).items():
            assert torch.equal(found[key][at], truth)


def test_jacobians():
    """A row of the Jacobian is the gradient of one output."""
    net, _ = layer("rowwise")
    x = torch.randn(2, 64)
    found = torch.func.jacrev(net)(x)
    leaf = x.clone().requires_grad_()
    net(leaf)[1, 3].backward()
    assert torch.equal(found[1, 3], leaf.grad)


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("nvfp4", marks=pytest.mark.nightly)])
def test_random_bits(name):
    """Examples that are equal are rounded otherwise, unless vmap is told that they are not."""
    net, parameters = layer(name)
    x = torch.randn(1, 32, 64).expand(2, 32, 64)
    for randomness, same in (("different", False), ("same", True)):
        grads = torch.vmap(torch.func.grad(loss(net)), (None, 0), randomness=randomness)(parameters, x)
        weight = grads["0.weight"]
        assert torch.equal(weight[0], weight[1]) == same


# torch's forward mode compiles decompositions by torch.jit.script when it is first used.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    ("transform", "named"),
    [
        (lambda f, x: torch.func.jvp(f, (x,), (x,)), "tangents"),
        (lambda f, x: torch.func.jacfwd(f)(x), "tangents"),
        (lambda f, x: torch.func.hessian(f)(x), "gradients"),
        (lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).sum())(x), "gradients"),
    ],
)
def test_what_is_not_defined_says_so(transform, named):
    net, _ = layer("rowwise")
    with pytest.raises(NotImplementedError, match=f"LowPrecisionLinear trains by a recipe.*{named}"):
        transform(lambda x: net(x[None]).square().sum(), torch.randn(64))
