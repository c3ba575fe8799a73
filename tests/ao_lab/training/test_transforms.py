"""Layers that train by a recipe under torch.func: the gradients of autograd, each example of vmap with scales of its own."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import ao_lab
from ao_lab.training import casts
from reference.training import RECIPES
from tests.ao_lab.training.grouped.test_experts import GroupedExperts, Layer

# Modes, tracers and edges of inputs: what a layer that trains by a recipe does as torch's own, and what it refuses.


def support_layer(name, outputs=32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, outputs))
    ao_lab.convert_for_training_(net, name, pad=True)
    return net


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torch_jit_trace_is_refused():
    """The reference computes with values that a trace would keep as constants."""
    net, x = support_layer("rowwise"), torch.randn(4, 64)
    with pytest.raises(
        ValueError, match=r"LowPrecisionLinear\(in_features=64, out_features=32\): torch.jit.trace"
    ):
        torch.jit.trace(net, (x,))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_experts_are_refused():
    """By transforms of torch.func as by torch.jit.trace, whichever forward they have."""
    for net, given in ((Layer(), ()), (GroupedExperts("batch"), (torch.full((4,), 2),))):
        ao_lab.convert_for_training_(net, "rowwise")
        x = torch.randn(8, 32)
        with pytest.raises(NotImplementedError, match=r"4 experts of \(\d+, \d+\) .* torch.func"):
            torch.func.grad(lambda x, net=net, given=given: net(x, *given).sum())(x)
        with pytest.raises(ValueError, match=r"4 experts of .*torch.jit.trace"):
            torch.jit.trace(net, (x, *given))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_dual_numbers_are_refused():
    net = support_layer("rowwise")
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"in_features=64.*forward-mode"):
        net(forward_ad.make_dual(torch.randn(4, 64), torch.randn(4, 64)))


@pytest.mark.parametrize(
    "name", ["mxfp4", *(pytest.param(one, marks=pytest.mark.nightly) for one in RECIPES if one != "mxfp4")]
)
def test_fake_tensors(name):
    """Shapes of outputs and gradients, without a value."""
    with FakeTensorMode():
        net, x = support_layer(name), torch.randn(7, 64, requires_grad=True)
        y = net(x)
        y.sum().backward()
    assert (y.shape, x.grad.shape, net[0].weight.grad.shape) == ((7, 32), (7, 64), (32, 64))


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_seeds_do_not_know_the_default_device(name):
    net, x = support_layer(name), torch.randn(32, 64)
    grads = []
    for device in ("cpu", "meta"):
        net.zero_grad()
        torch.manual_seed(3)
        with torch.device(device):
            net(x).sum().backward()
        grads.append(net[0].weight.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_layers_without_outputs(name):
    """Gradients of zeros, as of nn.Linear."""
    with pytest.warns(UserWarning, match="zero-element"):
        net = support_layer(name, outputs=0)
    x = torch.randn(4, 64, requires_grad=True)
    y = net(x)
    y.sum().backward()
    assert y.shape == (4, 0)
    assert torch.equal(x.grad, torch.zeros(4, 64))
    assert net[0].weight.grad.shape == (0, 64)


def test_inputs_without_an_axis():
    with pytest.raises(ValueError, match=r"inputs are at least 1D; got shape \(\)"):
        support_layer("rowwise")(torch.tensor(1.0))


@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_autocast_leaves_float64(name):
    """As torch's layers do."""
    net = support_layer(name).double()
    x = torch.randn(4, 64, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
    assert y.dtype == torch.float64
    assert torch.equal(y, net(x))


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("mxfp4", marks=pytest.mark.nightly)])
def test_evaluation_draws_nothing(name):
    """Nor makes it the copy for the weight gradient; a forward of training without gradients draws as one with them, as
    recomputation counts on."""
    net, x = support_layer(name), torch.randn(32, 64)
    state = torch.get_rng_state()
    with torch.no_grad():
        net.eval()(x)
    assert torch.equal(torch.get_rng_state(), state)
    routed = Layer()
    ao_lab.convert_for_training_(routed, name)
    state = torch.get_rng_state()
    with torch.no_grad():
        routed.eval()(torch.randn(32, 32, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), state)
    after = []
    for grad in (True, False):
        torch.set_rng_state(state)
        with torch.set_grad_enabled(grad):
            net.train()(x)
        after.append(torch.get_rng_state())
    assert torch.equal(*after)
    assert not torch.equal(after[0], state)


def test_recomputed_layers_draw_other_bits():
    """Reentrant checkpointing: the generator goes on from one layer to the next."""
    torch.manual_seed(0)
    seen, net = [], nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    ao_lab.convert_for_training_(net, "mxfp4")
    x = torch.randn(32, 64, requires_grad=True)
    for one in net:
        checkpoint(lambda x, one=one: one(x), x, use_reentrant=True)
        seen.append(torch.get_rng_state())
    assert not torch.equal(*seen)


@pytest.mark.parametrize("name", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.nightly)])
def test_evaluation_casts_once(name, monkeypatch):
    """Not along both axes, as nothing is kept."""
    monkeypatch.setattr(casts.fast, "quantize_both", None)
    net = support_layer(name)
    with torch.no_grad():
        net(torch.randn(32, 64))
    with pytest.raises(TypeError, match="not callable"):
        net(torch.randn(32, 64))


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
